"""Parses ``%mesh torchrun [SELECTOR] [OPTION]... SCRIPT [ARGUMENT]...``. Pure."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from monarch_kernel.notebook.syntax.arguments import ARGUMENTS, Known
from monarch_kernel.notebook.syntax.lines import UsageProblem, hint, without_comment

__all__ = ["ScriptOptions", "parse_torchrun"]

_EXAMPLE = "%mesh torchrun trainers train.py --epochs 2"
_OWN = ("--background", "--raw", "-m")
_OF_THE_MESH = re.compile(
    r"--(?:n[-_]?nodes|nproc[-_]per[-_]node|standalone|node[-_]rank|master[-_](?:addr|port)|rdzv[-_]\w+"
    r"|max[-_]restarts|monitor[-_]interval|start[-_]method|role|local[-_]addr)"
)


@dataclass(frozen=True)
class ScriptOptions:
    """The arguments of ``%mesh torchrun``.

    Attributes:
        script: path of the script, or name of the module.
        arguments: its arguments.
        selector: expression that selects a mesh; empty for the mesh last brought up.
        is_module: whether ``script`` is the name of a module.
        background: whether the magic returns immediately, while the ranks continue.
        raw: whether to show every line of every rank separately.
    """

    script: str
    arguments: tuple[str, ...] = ()
    selector: str = ""
    is_module: bool = False
    background: bool = False
    raw: bool = False


def parse_torchrun(line: str, known: Known) -> ScriptOptions:
    """Parse the arguments of ``%mesh torchrun``; what follows the script is for the script.

    Raises:
        UsageProblem: the arguments are not valid; the text says why and what to write.
    """
    try:
        words = shlex.split(without_comment(line))
    except ValueError as error:
        raise UsageProblem(f"%mesh torchrun: {error}: {line.strip()!r}") from None
    selector = words.pop(0) if words and known.selects(words[0]) and not words[0].endswith(".py") else ""
    options = {"--background": False, "--raw": False}
    is_module = False
    while words and words[0].startswith("-") and not is_module:
        word = words.pop(0)
        if word == "-m":
            is_module = True
        elif word in options:
            options[word] = True
        elif _OF_THE_MESH.match(word):
            raise UsageProblem(
                f"%mesh torchrun: leave out {word}: the ranks of the mesh are up already, such as in {_EXAMPLE}"
            )
        else:
            raise UsageProblem(
                f"%mesh torchrun: unknown option {word!r}{hint(word, _OWN)}; the options are {', '.join(_OWN)}; arguments of "
                f"the script come after it (%mesh torchrun {ARGUMENTS['torchrun']})"
            )
        if words and not selector and known.selects(words[0]) and not words[0].endswith(".py") and not is_module:
            selector = words.pop(0)
    if not words:
        raise UsageProblem(f"%mesh torchrun: name {'a module' if is_module else 'a script'}, such as {_EXAMPLE}")
    script, *arguments = words
    return ScriptOptions(script, tuple(arguments), selector, is_module, options["--background"], options["--raw"])
