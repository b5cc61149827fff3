"""Find words in the project's texts that plain technical English does without.

Each rule is a pattern and what to write instead. It applies to docstrings, comments and all other string constants of Python
files, to their identifiers ("cell_begun" is read as "cell begun"), to Markdown, TypeScript, JavaScript and CSS, and to the
Markdown cells of notebooks. `python -m tests.support.prose [PATH ...]` prints what it finds below these paths.
"""

from __future__ import annotations

import functools
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("monarch_kernel", "tests", "docs", "notebooks", "benchmarks", "labextension/src")
SUFFIXES = (".py", ".md", ".ipynb", ".ts", ".tsx", ".js", ".css")
# These files name the words.
EXEMPT = frozenset({"tests/support/prose.py", "tests/test_prose.py"})

_PERSON = (
    r"(?:anybody|anyone|colleagues?|developers?|engineers?|everyone|newcomers?|nobody|people|persons?|readers?|somebody|someone"
    r"|those|users?)"
)
_BE = r"(?:is|are|was|were|be|been|being)"
# Pattern: advice. Patterns ignore case, and match whole words only.
RULES = {
    r"whoever|whomever": "name the thread, process or user that acts",
    r"whom": "a process is 'it': use 'that' or 'which'",
    rf"(?P<person>{_PERSON},?\s)?who(?:'s)?": "a process is 'it': use 'that' or 'which'",
    rf"{_BE}(?: \w+)? told": "say what is sent: 'gets a message', 'receives', 'learns that'",
    rf"{_BE} had": "say where it comes from",
    rf"{_BE} seen to": "use the active voice",
    rf"it {_BE} looked": "name what looks",
    r"(?:is|are) to be": "use 'must' or 'will'",
    r"anew|afresh": "again",
    r"mend(?:s|ed|ing)?": "repair, or recover",
    r"in vain": "without effect, or name the failure",
    r"of (?:its|their|his|her|one's) own(?: accord)?": "'its own ...', 'a separate ...' or 'automatically'",
    r"begun": "started",
    r"by and by": "gradually",
    r"shall": "must, or will",
    r"stands? (?:above|below)": "name the section, or write 'the rows above'",
    r"whence|whither|lest|henceforth|hitherto|nought|naught|thereof|wherein": "use the current word",
    r"baton": "I/O lock",
    r"roads?|noroad": "data path",
    r"steer(?:s|ed|ing)?": "name the live loop and its knobs",
    r"strays?": "dropped messages",
    r"homeward": "sync back",
}


@dataclass(frozen=True)
class Finding:
    """A word that a rule forbids.

    Attributes:
        path: Relative to the root of the project.
        line: Counts from 1; for a notebook, in its JSON.
        words: What was found.
        advice: What to write instead.
    """

    path: str
    line: int
    words: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.words!r}: {self.advice}"


_COMPILED = [
    (re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])".replace(" ", r"\s+"), re.IGNORECASE), advice)
    for pattern, advice in RULES.items()
]

_ANY = re.compile("|".join(re.sub(r"\(\?P<\w+>", "(?:", pattern.pattern) for pattern, _ in _COMPILED), re.IGNORECASE)
"""All rules at once: most texts match none of them."""


def check_text(text: str) -> Iterator[tuple[int, str, str]]:
    """Find forbidden words.

    Yields:
        The index of the line, counting from 0, the words and the advice.
    """
    if not _ANY.search(text):
        return
    for pattern, advice in _COMPILED:
        for match in pattern.finditer(text):
            if match.groupdict().get("person"):
                continue
            yield text.count("\n", 0, match.start()), " ".join(match[0].split()), advice


@functools.cache
def check_name(name: str) -> tuple[tuple[int, str, str], ...]:
    """Check an identifier by its words; the same few thousand occur again and again."""
    return tuple(check_text(read_words(name)))


def read_words(name: str) -> str:
    """Split an identifier into its words: "LoopBegun" and "loop_begun" are "loop begun"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_+", " ", name).lower().strip()


def check_python(source: str) -> Iterator[tuple[int, str, str]]:
    """Check comments, strings and identifiers; successive lines of comments are one text."""
    texts: list[tuple[int, str]] = []
    names: list[tuple[int, str]] = []
    last_comment = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind, text, line = token.type, token.string, token.start[0]
        if kind == tokenize.COMMENT:
            words = text.lstrip("# ")
            if texts and last_comment == line - 1:
                texts[-1] = (texts[-1][0], f"{texts[-1][1]}\n{words}")
            else:
                texts.append((line, words))
            last_comment = line
        elif kind == tokenize.NAME:
            names.append((line, text))
        elif kind == tokenize.STRING or tokenize.tok_name[kind] == "FSTRING_MIDDLE":
            texts.append((line, text.replace("_", " ") if " " not in text else text))
    found = [(line + index, words, advice) for line, text in texts for index, words, advice in check_text(text)]
    found += [(line, words, advice) for line, name in names for _, words, advice in check_name(name)]
    yield from sorted(found)


def check_file(path: Path) -> Iterator[Finding]:
    """Check one file by its suffix."""
    text = path.read_text()
    if path.suffix == ".py":
        found = check_python(text)
    elif path.suffix == ".ipynb":
        cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        found = check_text("\n".join(line for cell in cells for line in cell))
    else:
        found = check_text(text)
    for index, words, advice in found:
        line = index if path.suffix == ".py" else index + 1
        yield Finding(str(path.relative_to(ROOT)), line, words, advice)


def find_files(paths: list[Path]) -> list[Path]:
    """List the files below the paths that have prose."""
    found = {
        file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]) if file.suffix in SUFFIXES
    }
    return sorted(
        file
        for file in found
        if str(file.relative_to(ROOT)) not in EXEMPT and not {"node_modules", "__pycache__"} & set(file.parts)
    )


def check_project(paths: list[Path] | None = None) -> list[Finding]:
    """Check all files below the paths; of the whole project by default."""
    paths = paths or [*(ROOT / folder for folder in FOLDERS), *ROOT.glob("*.md")]
    return [finding for file in find_files(paths) for finding in check_file(file)]


if __name__ == "__main__":
    findings = check_project([Path(argument).resolve() for argument in sys.argv[1:]])
    print(*findings, f"{len(findings)} found", sep="\n")
    sys.exit(bool(findings))
