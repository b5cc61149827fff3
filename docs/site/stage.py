"""Prepare the sources of the documentation site: ``python -m docs.site.stage build/docs/source``.

The texts of the project stay where a reader of the repository expects them. This program copies them into a folder with the
same layout, so their links stay right, and adds the pages that are made from the code:

- a page for each section of the site, from `SECTIONS`;
- the magics, from the parsers that also print ``%mesh?``;
- the public modules, from the table in `ARCHITECTURE.md`; Sphinx takes their docstrings;
- an index of the error messages that the texts show.

A notebook is taken as it was executed by ``make demo``, if that was done; no notebook is executed here.
"""

from __future__ import annotations

import json
import posixpath
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["SECTIONS", "Message", "anchor", "errors_page", "headings", "messages", "session", "stage", "symptoms"]

ROOT = Path(__file__).parents[2]
EXECUTED = ROOT / "build" / "demo"
TEXTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff", "LICENSE")


@dataclass(frozen=True)
class Section:
    """A section of the site, with its pages in groups.

    Attributes:
        title: its title.
        about: a sentence about it.
        groups: title of a group -> (page, what it is about) for each page.
    """

    title: str
    about: str
    groups: Mapping[str, tuple[tuple[str, str], ...]]


SECTIONS = {
    "tutorials": Section(
        "Tutorials",
        "Notebooks to read from top to bottom, or to run with `make lab`.",
        {
            "First steps": (
                ("notebooks/01_quickstart", "cells, errors, values and actors on four ranks"),
                ("notebooks/02_live_training", "change a loop while it runs"),
                ("notebooks/05_failures", "what happens when a rank fails, hangs or dies"),
            ),
            "Training": (
                ("notebooks/03_fsdp_auto", "a model that no rank could hold alone"),
                ("notebooks/08_where_time_goes", "find the rank that others wait for"),
                ("notebooks/09_record", "record a run, and replay it"),
                ("notebooks/10_cluster_as_one_device", "one notebook drives all ranks, tensor by tensor"),
                ("notebooks/06_lightning", "Lightning's Trainer on a mesh"),
            ),
            "Further": (
                ("notebooks/04_actors_rl", "generators and a trainer as actors"),
                ("notebooks/11_post_training", "GRPO with vLLM and FSDP"),
                ("notebooks/07_many_machines", "hosts, on one machine"),
            ),
        },
    ),
    "howto": Section(
        "How to",
        "Answers to one question each.",
        {
            "Something is wrong": (
                ("docs/howto/my-run-hangs", "find out which rank is missing, and go on"),
                ("docs/howto/one-rank-is-slow", "find the rank that others wait for, and its line"),
                ("docs/howto/loss-went-nan", "find the step and the rank, and go back"),
                ("docs/howto/resume-on-fewer-gpus", "continue a run after losing GPUs"),
                ("docs/troubleshooting", "all problems, by what you see"),
            ),
            "Coming from": (
                ("docs/howto/from-torchrun", "a script as it is, or its code in cells"),
                ("docs/howto/from-accelerate", "the Trainer of Hugging Face in cells"),
                ("docs/howto/from-deepspeed", "ZeRO in cells"),
                ("docs/howto/from-trl", "SFTTrainer in cells"),
                ("docs/howto/from-ray-train", "a training function as cells"),
                ("docs/howto/data-libraries", "datasets, webdataset, torchdata and torchao"),
                ("docs/tensors-from-jax-and-dtensor", "the global view of JAX and DTensor"),
                ("docs/monarch", "programs for PyTorch Monarch"),
                ("docs/tensors-conformance", "Monarch's tests of tensors, and what shows the same here"),
            ),
            "Machines": (
                ("docs/guides/README", "meshes on many machines"),
                ("docs/guides/ray", "nodes of a Ray cluster"),
                ("docs/guides/slurm", "nodes of a Slurm cluster"),
                ("docs/guides/ssh", "machines that you can log in to"),
                ("docs/guides/kubernetes", "pods"),
                ("docs/guides/lightning", "Studios of Lightning.ai, and the Trainer"),
            ),
        },
    ),
    "topics": Section(
        "Topics",
        "What the parts do, what they promise, and what they cost.",
        {
            "Cells": (
                ("docs/magics", "cells and magics, with every message"),
                ("docs/view", "the live view"),
                ("docs/debugging", "pdb on a rank"),
                ("docs/editing", "edited code in living objects"),
                ("docs/detached", "meshes that outlive the kernel"),
                ("docs/agents", "meshes from a terminal, a script or an agent"),
                ("docs/text-from-ranks", "what a rank's text may do in the notebook"),
            ),
            "Training": (
                ("docs/parallelize", "spread a model over the ranks"),
                ("docs/live", "pause, step and change a loop"),
                ("docs/profile", "profiles and late ranks"),
                ("docs/record", "what ran, and the same again"),
                ("docs/snapshots", "state in the memory of two ranks"),
                ("docs/checkpoints", "state on disk"),
                ("docs/replicas", "tensors that should be equal"),
                ("docs/recovery", "new processes in place of dead ranks"),
            ),
            "Actors and memory": (
                ("docs/actors", "classes with state on every rank"),
                ("docs/supervision", "failures of actors, and their owners"),
                ("docs/buffers", "the memory of other ranks"),
                ("docs/tensors", "the ranks of a mesh as one device"),
                ("docs/tensors-operations", "how results of sharded tensors are placed"),
                ("docs/moving-tensors", "from one mesh to another"),
                ("docs/guides/vllm", "generate with vLLM, with the weights that you train"),
                ("docs/traffic", "bytes by data path"),
            ),
            "Limits and cost": (
                ("docs/performance", "measurements beside other tools"),
                ("docs/scale", "a thousand ranks and more"),
                ("docs/security", "what is protected, and what is not"),
            ),
        },
    ),
    "reference": Section(
        "Reference",
        "Made from the code.",
        {
            "Notebook": (
                ("reference/magics", "every magic with its options"),
                ("reference/errors", "error messages, each with its page"),
            ),
            "Python": (("reference/api", "the public modules"),),
        },
    ),
    "project": Section(
        "Project",
        "How it is made.",
        {
            "Project": (
                ("README", "the overview"),
                ("ARCHITECTURE", "the map of the code"),
                ("CONTRIBUTING", "tests and rules"),
                ("CHANGELOG", "what is new"),
                ("SECURITY", "report a vulnerability"),
            ),
        },
    ),
}
"""The site: the name of each section's page, and what is in it."""


# Markdown.


def headings(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the headings of a Markdown text: position, title, and the anchor that GitHub and MyST give it."""
    taken: dict[str, int] = {}
    fences = [match.span() for match in _FENCED.finditer(text)]
    for match in re.finditer(r"^#{1,6} (.+)$", text, re.MULTILINE):
        if any(begin <= match.start() < end for begin, end in fences):
            continue
        name = anchor(match[1])
        count = taken[name] = taken.get(name, -1) + 1
        yield match.start(), match[1], f"{name}-{count}" if count else name


def anchor(title: str) -> str:
    """Return the anchor of a heading."""
    title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


_FENCED = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, order=True)
class Message:
    """A message of an error that a page shows.

    Attributes:
        error: the class of the error.
        text: its first line.
        page: the page, relative to the root of the site.
        anchor: the section of the page; empty for its beginning.
        section: the title of that section.
    """

    error: str
    text: str
    page: str
    anchor: str
    section: str


_MESSAGE = re.compile(
    r"^\s*(?:\[[\d, -]+\] )?(?P<error>[A-Z]\w*(?:Error|Interrupt|Failure)): (?P<text>\S.*)$", re.MULTILINE
)


_TABLE = re.compile(r"^\| command[^|]*\| (?:answer|message) \|\n\|[-|]+\|\n(?P<rows>(?:\|.*\n)+)", re.MULTILINE)
_ANSWER = re.compile(r"^\| .* \| `(?P<text>%\S.*?)` \|$", re.MULTILINE)


_SPAN = re.compile(r"`(?P<error>[A-Z]\w*(?:Error|Interrupt|Failure)): (?P<text>[^`\n]+)`")


def messages(page: str, text: str) -> Iterator[Message]:
    """Find the messages of errors: in the blocks of a page that show output, in its sentences, and in its tables of commands.

    Args:
        page: the path of the page.
        text: its Markdown.
    """
    places = [(0, "", ""), *headings(text)]
    blocks = list(_FENCED.finditer(text))
    found = [
        (block.start(), match["error"], match["text"].strip())
        for block in blocks
        if not block[1]
        for match in _MESSAGE.finditer(block[2])
    ]
    found += [
        (span.start(), span["error"], span["text"].strip())
        for span in _SPAN.finditer(text)
        if span["text"] not in ("...", "…") and not any(block.start() <= span.start() < block.end() for block in blocks)
    ]
    found += [
        (table.start(), "UsageError", match["text"])
        for table in _TABLE.finditer(text)
        for match in _ANSWER.finditer(table["rows"])
    ]
    for position, error, line in found:
        _, title, name = [place for place in places if place[0] <= position][-1]
        yield Message(error, line, page, name, title)


_SYMPTOM = re.compile(
    r"^\| (?P<texts>\*.*\*) \| \[(?P<title>.*?)\]\((?P<page>[^)#]*)(?:#(?P<anchor>[^)]*))?\) \|$", re.MULTILINE
)


def symptoms(page: str, text: str) -> Iterator[Message]:
    """Find the parts of messages in the table of symptoms of a page; the class of the error is empty.

    Args:
        page: the path of the page.
        text: its Markdown.
    """
    for row in _SYMPTOM.finditer(text):
        target = posixpath.normpath(PurePosixPath(page).parent / row["page"]) if row["page"] else page
        for part in re.findall(r"\*([^*]+)\*", row["texts"]):
            yield Message("", part, target, row["anchor"] or "", row["title"])


def errors_page(found: Iterable[Message]) -> str:
    """Write the index of messages, by the class of the error; each message once, with the first page that shows it."""
    parts = [
        "# Error messages",
        "Search this page for a part of the text that you see. Numbers, names and paths differ. [Troubleshooting]"
        "(/docs/troubleshooting.md) says what to do without a message, and [Errors](/docs/actors.md#errors) lists the classes.",
    ]
    by_class: dict[str, dict[str, Message]] = {}
    for message in found:
        by_class.setdefault(message.error, {}).setdefault(message.text, message)
    for error in sorted(by_class, key=lambda name: (not name, name)):  # those without a class come last
        parts.append(f"## {error or 'Parts of messages'}")
        rows = [
            f"* - {_code(message.text)}\n  - [{message.section or message.page}](/{message.page}"
            f"{'#' + message.anchor if message.anchor else ''})"
            for message in by_class[error].values()
        ]
        parts.append(
            "\n".join(
                ["```{list-table}", ":header-rows: 1", ":widths: 70 30", "", "* - message\n  - page", *rows, "```"]
            )
        )
    return "\n\n".join(parts) + "\n"


_HEADER = "* - message\n  - page"


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def session(readme: str) -> str:
    """Return the recorded session of the README, without its heading."""
    begin = readme.index("\n## A session\n") + len("\n## A session\n")
    return readme[begin : readme.index("\n## ", begin)].strip()


# Pages.


def _section_page(section: Section, titles: Mapping[str, str]) -> str:
    parts = [f"# {section.title}", section.about]
    for group, pages in section.groups.items():
        cards = "\n\n".join(
            f":::{{grid-item-card}} {titles[page]}\n:link: /{page}\n:link-type: doc\n{about[0].upper()}{about[1:]}.\n:::"
            for page, about in pages
        )
        toctree = "\n".join(["```{toctree}", ":hidden:", "", *(f"/{page}" for page, _ in pages), "```"])
        heading = f"## {group}\n\n" if len(section.groups) > 1 else ""
        parts.append(f"{heading}::::{{grid}} 1 2 2 3\n:gutter: 3\n\n{cards}\n\n::::\n\n{toctree}")
    return "\n\n".join(parts) + "\n"


def _first_page(readme: str, template: str) -> str:
    cards = "\n\n".join(
        f":::{{grid-item-card}} {section.title}\n:link: /{name}\n:link-type: doc\n{section.about} {_list(section.groups)}\n:::"
        for name, section in SECTIONS.items()
        if name != "project"
    )
    wrong = "\n".join(
        f"- [{_sentence(page)}](/{page}.md): {about}" for page, about in SECTIONS["howto"].groups["Something is wrong"]
    )
    toctree = "\n".join(["```{toctree}", ":hidden:", "", *(f"/{name}" for name in SECTIONS), "```"])
    parts = {
        "note": "",
        "cards": f"::::{{grid}} 1 2 2 4\n:gutter: 3\n\n{cards}\n\n::::\n",
        "wrong": f"{wrong}\n",
        "session": f"{session(readme)}\n",
        "toctree": f"{toctree}\n",
    }
    return _TEMPLATE_PART.sub(lambda part: parts[part["name"]], template)


_TEMPLATE_PART = re.compile(r"^<!-- (?P<name>\w+) -->\n.*?^<!-- end -->\n", re.DOTALL | re.MULTILINE)
"""A part of the first page that the site has other text for; readers of the repository see what is in it."""


def _list(words: Iterable[str]) -> str:
    return f"*{', '.join(words)}*"


def _sentence(page: str) -> str:
    words = PurePosixPath(page).name.replace("-", " ")
    return f"{words[0].upper()}{words[1:]}".replace("nan", "NaN").replace("gpus", "GPUs")


def _title(text: str) -> str:
    return next((title for _, title, _ in headings(text)), "").replace("`", "")


def magics_page() -> str:
    """Write the reference of the magics from their parsers."""
    from monarch_kernel.notebook.syntax.options import COMMANDS
    from monarch_kernel.notebook.syntax.usage import command_help, options_help

    parts = [
        "# Options of the magics",
        "The same text as that of `%mesh?`, `%mesh help COMMAND` and `%%remote?`, from the same parsers. [Magics]"
        "(/docs/magics.md) explains what they do.",
        "## %mesh",
        "Without a command, `%mesh` lists the meshes that are up.",
    ]
    for command in COMMANDS:
        parts += [f"### %mesh {command}", _block(command_help(command))]
    for magic in ("%%remote", "%remote", "%autoremote"):
        parts += [f"## {magic}", _block(options_help(magic))]
    parts += ["## %%local", "Run a cell in the kernel, also while `%autoremote` is on."]
    return "\n\n".join(parts) + "\n"


def _block(text: str) -> str:
    return f"```text\n{text}\n```"


def public_modules(architecture: str) -> list[str]:
    """Return the public modules, as the table of `ARCHITECTURE.md` lists them."""
    begin = architecture.index("## Public surface")
    rows = re.findall(r"^\| `([\w.]+)`", architecture[begin : architecture.index("\n## ", begin)], re.MULTILINE)
    return [f"monarch_kernel.{name}" for name in rows]


def _api_page(module: str) -> str:
    parts = [f"# {module}", f"```{{eval-rst}}\n.. automodule:: {module}\n   :members:\n   :show-inheritance:\n```"]
    return "\n\n".join(parts) + "\n"


def _api_index(modules: Iterable[str]) -> str:
    names = list(modules)
    toctree = "\n".join(["```{toctree}", "", *(f"/reference/{name}" for name in names), "```"])
    return f"# Public modules\n\nWhat programs import; all else may change.\n\n{toctree}\n"


def stage(target: Path, executed: Path = EXECUTED) -> list[str]:
    """Write the sources of the site into a folder, in place of what is there, and return the notebooks without output.

    Args:
        target: the folder.
        executed: a folder with executed notebooks; those that are missing are taken as they are.
    """
    pages: dict[str, str] = {}
    for path in [*(ROOT / name for name in TEXTS), *sorted((ROOT / "docs").rglob("*.md"))]:
        if path.parent.name != "site":
            pages[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8")
    found = [message for name, text in pages.items() if name.startswith("docs/") for message in messages(name, text)]
    found += symptoms("docs/troubleshooting.md", pages["docs/troubleshooting.md"])
    modules = public_modules(pages["ARCHITECTURE.md"])
    pages["reference/magics.md"] = magics_page()
    pages["reference/errors.md"] = errors_page(found)
    pages["reference/api.md"] = _api_index(modules)
    pages.update({f"reference/{module}.md": _api_page(module) for module in modules})

    notebooks, without = _notebooks(executed)
    titles = {name.removesuffix(".md"): _title(text) for name, text in pages.items()}
    titles.update({name.removesuffix(".ipynb"): _notebook_title(text) for name, text in notebooks.items()})
    pages.update({f"{name}.md": _section_page(section, titles) for name, section in SECTIONS.items()})
    template = (ROOT / "docs" / "site" / "index.md").read_text(encoding="utf-8")
    pages["index.md"] = _first_page(pages["README.md"], template)

    files: dict[str, bytes] = {name: text.encode() for name, text in {**pages, **notebooks}.items()}
    for path in (path for folder in ("pictures", "scale") for path in (ROOT / "docs" / folder).iterdir()):
        files[path.relative_to(ROOT).as_posix()] = path.read_bytes()
    for path in (ROOT / "docs").glob("*.svg"):
        files[path.relative_to(ROOT).as_posix()] = path.read_bytes()
    _write(target, files)
    return without


def _notebooks(executed: Path) -> tuple[dict[str, str], list[str]]:
    texts, without = {}, []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        source = json.loads(path.read_text(encoding="utf-8"))
        copy = executed / path.name
        notebook = json.loads(copy.read_text(encoding="utf-8")) if copy.is_file() else source
        if [cell["source"] for cell in notebook["cells"]] != [cell["source"] for cell in source["cells"]]:
            notebook = source  # it has changed since
        if notebook is source:
            without.append(path.stem)
            note = f"```{{note}}\nThis copy has no output: the site was built without `make demo NOTEBOOK={path.stem}`.\n```\n"
            source["cells"].insert(1, {"cell_type": "markdown", "metadata": {}, "source": note})
        for number, cell in enumerate(notebook["cells"]):
            cell.setdefault("id", f"cell-{number}")
        texts[f"notebooks/{path.name}"] = json.dumps(notebook)
    return texts, without


def _notebook_title(text: str) -> str:
    cell = json.loads(text)["cells"][0]["source"]
    return _title(cell if isinstance(cell, str) else "".join(cell))


def _write(target: Path, files: Mapping[str, bytes]) -> None:
    """Write files, leave those that have not changed (Sphinx reads only what is newer), and remove all others."""
    for name, data in files.items():
        path = target / name
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    for path in target.rglob("*"):
        if path.is_file() and path.relative_to(target).as_posix() not in files:
            path.unlink()
    for path in sorted(target.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            shutil.rmtree(path)


def main(arguments: list[str]) -> int:
    """Run the command line."""
    (target,) = arguments
    without = stage(Path(target))
    if without:
        print(
            f"without output, as build/demo has no executed copy: {', '.join(without)} (make docs-notebooks executes them)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
