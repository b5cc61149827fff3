"""The tools of the documentation site: its pages, the index of messages, the examples of texts, and the check of links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.site import blocks
from docs.site.blocks import Example, examples, missing_line, missing_packages
from docs.site.check import Links, broken_links
from docs.site.conf import use_rubrics
from docs.site.stage import SECTIONS, Message, anchor, errors_page, headings, messages, session, stage, symptoms
from monarch_kernel import errors
from monarch_kernel.notebook.syntax.options import COMMANDS
from monarch_kernel.notebook.syntax.usage import command_help

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/guides/*.md"), *ROOT.glob("docs/howto/*.md")]


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    (folder / "old").mkdir()
    (folder / "old" / "page.md").write_text("# Old")
    stage(folder, ROOT / "no-such-folder")
    return folder


def test_each_page_is_two_clicks_from_the_first() -> None:
    listed = [page for section in SECTIONS.values() for group in section.groups.values() for page, _ in group]
    assert len(listed) == len(set(listed))
    texts = {path.relative_to(ROOT).with_suffix("").as_posix() for path in [*PAGES, *ROOT.glob("notebooks/*.ipynb")]}
    assert not texts - set(listed)


def test_the_reference_of_magics_is_their_help(staged: Path) -> None:
    text = (staged / "reference" / "magics.md").read_text()
    for command in COMMANDS:
        assert f"### %mesh {command}\n\n```text\n{command_help(command)}\n```" in text


def test_a_page_for_each_public_module_names_it(staged: Path) -> None:
    table = re.findall(r"^\| `([\w.]+)`.* \| `", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    pages = {path.stem for path in (staged / "reference").glob("monarch_kernel.*.md")}
    assert {f"monarch_kernel.{name}" for name in table} == pages
    assert ".. automodule:: monarch_kernel.actor\n" in (staged / "reference" / "monarch_kernel.actor.md").read_text()


def test_headings_in_docstrings_give_no_labels_that_several_pages_share() -> None:
    lines = [
        "A module.",
        "",
        "Theory of operation",
        "===================",
        "",
        "| a | b |",
        "|---|---|",
        "",
        "Parts",
        "-----",
    ]
    use_rubrics(None, "module", "toy", None, None, lines)
    assert lines == [
        "A module.",
        "",
        ".. rubric:: Theory of operation",
        "",
        "| a | b |",
        "|---|---|",
        "",
        ".. rubric:: Parts",
    ]


def test_what_is_not_of_the_site_is_removed(staged: Path) -> None:
    assert not (staged / "old").exists()
    assert (staged / "docs" / "pictures" / "view-4-trouble-light.png").is_file()


def test_a_notebook_without_output_says_so(staged: Path) -> None:
    assert "make demo NOTEBOOK=01_quickstart" in (staged / "notebooks" / "01_quickstart.ipynb").read_text()


def test_the_first_page_has_the_session_of_the_readme(staged: Path) -> None:
    text = (staged / "index.md").read_text()
    assert session((ROOT / "README.md").read_text()) in text
    assert "<!--" not in text


def test_readers_of_the_repository_see_text_in_each_part_of_the_first_page(staged: Path) -> None:
    template = (ROOT / "docs" / "site" / "index.md").read_text()
    parts = dict(re.findall(r"<!-- (\w+) -->\n(.*?)<!-- end -->", template, re.DOTALL))
    assert list(parts) == ["note", "cards", "wrong", "session", "toctree"]
    assert "build/docs/html/index.html" in parts["note"]
    assert ":::" not in template
    page = (staged / "index.md").read_text()
    for name, text in parts.items():
        assert bool(text) == (name != "toctree")
        assert not text or text not in page


TEXT = """# Page

## `a.b()`, and [more](x.md)

```python
# not a heading
```
```
[0-1] ValueError: no `data`
  more
```

## Twice
## Twice

```
RanksError: a
[2] ValueError: b
```

| command | answer |
|---|---|
| `%mesh up t` | `%mesh up: no` |
| `x` | something else |

A call raises `TypeError: c`, and `KeyError: ...`.
"""


def test_anchors_are_those_of_github() -> None:
    assert [name for _, _, name in headings(TEXT)] == ["page", "ab-and-more", "twice", "twice-1"]
    assert anchor("%mesh loop [SELECTOR] [pause | resume]") == "mesh-loop-selector-pause--resume"


def test_messages_are_found_with_their_section() -> None:
    assert [(found.error, found.text, found.anchor) for found in messages("p.md", TEXT)] == [
        ("ValueError", "no `data`", "ab-and-more"),
        ("RanksError", "a", "twice-1"),
        ("ValueError", "b", "twice-1"),
        ("TypeError", "c", "twice-1"),
        ("UsageError", "%mesh up: no", "twice-1"),
    ]


def test_parts_of_messages_are_found_with_the_section_that_explains_them() -> None:
    table = (
        "| you see | section |\n|---|---|\n| *a*, *b 80 c* | [A b](#a-b) |\n| *d* | [E](../e.md#f) |\n| g | [H](#h) |\n"
    )
    assert list(symptoms("docs/p.md", table)) == [
        Message("", "a", "docs/p.md", "a-b", "A b"),
        Message("", "b 80 c", "docs/p.md", "a-b", "A b"),
        Message("", "d", "e.md", "f", "E"),
    ]


# The roots of the tree, and classes whose errors are shown under the name of another class.
NOT_SHOWN = {"MonarchError", "RanksError", "ActorDiedError", "BootstrapError", "AttachError"}


def test_the_index_has_a_message_of_each_error_of_the_package(staged: Path) -> None:
    text = (staged / "reference" / "errors.md").read_text()
    shown = set(re.findall(r"^## (\w+)$", text, re.MULTILINE))
    classes = {
        name
        for name in errors.__all__
        if isinstance(kind := getattr(errors, name), type) and issubclass(kind, BaseException)
    }
    assert classes > NOT_SHOWN
    assert classes - NOT_SHOWN <= shown
    assert (
        "- `did not come up`\n  - [A mesh does not come up](/docs/troubleshooting.md#a-mesh-does-not-come-up)" in text
    )


def test_the_index_has_each_message_once_by_class() -> None:
    found = [Message("B", "x", "p.md", "s", "S"), Message("A", "y", "p.md", "", ""), Message("B", "x", "q.md", "", "")]
    text = errors_page(found)
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["A", "B"]
    assert re.findall(r"\* - (.*)\n  - (.*)", text.replace("* - message\n  - page\n", "")) == [
        ("`y`", "[p.md](/p.md)"),
        ("`x`", "[S](/p.md#s)"),
    ]


def test_examples_are_code_with_its_output() -> None:
    text = """
<!-- setup: a = 1
b = 2 -->
```python
a
```
```
1
```
```python
left_out()
```
<!-- run -->
```python
c = 3
```
<!-- not run: it needs a GPU -->
```python
d
```
```
4
```
```python
e
```
Some text.
```
5
```
"""
    assert list(examples(text)) == [
        Example(2, "a = 1\nb = 2"),
        Example(4, "a\n", "1\n"),
        Example(14, "c = 3\n"),
        Example(18, "d\n", "4\n", "it needs a GPU"),
    ]


@pytest.mark.parametrize(
    ("expected", "actual", "missing"),
    [
        ("[0] 1\n[1] 2\n", "x\n[0] 1\ny\n\x1b[31m[1] 2\x1b[0m", None),
        ("a\nb", "b\na", "b"),
        ("on vm (pid 12), 157 MiB", "on box (pid 3), 80.5 MiB", None),
        ("[0] 6.0", "[0] 7.0", "[0] 6.0"),
        ("killed by ...", "killed by SIGKILL", None),
        ("...\nend", "end", None),
        ("cell [3] failed", "cell [11] failed", None),
        ("rank  device\n   0  cpu", "rank  device   memory    in   out\n   0  cpu     171 MiB  25 B/s  2 B/s", None),
        ("[1] killed; it held 185 MiB at the last reading", "[1] killed", None),
    ],
)
def test_outputs_are_compared_without_what_varies(expected: str, actual: str, missing: str | None) -> None:
    assert missing_line(expected, actual) == missing


class Stuck:
    """A kernel whose cells do not end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, code: str) -> tuple[str, bool]:
        raise TimeoutError

    def end(self) -> None:
        self.folder.rmdir()


def test_an_example_that_does_not_end_fails_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "Kernel", Stuck)
    n_run, (failure,) = blocks.run_page(ROOT / "docs" / "howto" / "from-torchrun.md", tmp_path)
    assert n_run == 0
    assert failure.startswith("docs/howto/from-torchrun.md:8: it does not end within")
    assert not tmp_path.exists()


def test_a_page_names_the_packages_that_it_needs() -> None:
    assert missing_packages("# Page\n\n<!-- needs: pytest, no_such_package -->\n") == ["no_such_package"]
    assert missing_packages("# Page\n") == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    texts = {
        "a.html": '<a href="b.html#here">x</a> <a href="#top">x</a> <a href="https://example.org/#x">x</a>',
        "b.html": '<p id="here"></p><img src="none.png"> <a href="a.html#no">x</a>',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    pages = {tmp_path / name: Links(text) for name, text in texts.items()}
    assert list(broken_links(tmp_path, pages)) == [
        "a.html: #top: the page has no such place",
        "b.html: none.png: there is no such file",
        "b.html: a.html#no: the page has no such place",
    ]
