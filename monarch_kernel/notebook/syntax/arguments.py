"""The arguments of the commands of ``%mesh``, and what to say about a word that is none of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from monarch_kernel.notebook.syntax.lines import UsageProblem, hint
from monarch_kernel.notebook.syntax.selector import root_name

__all__ = ["ARGUMENTS", "FLAGS", "Known", "refuse_flags", "unknown_mesh"]

ARGUMENTS = {
    "show": "[NAME]",
    "attach": "NAME",
    "down": "NAME | --all",
    "interrupt": "NAME [--abort]",
    "loop": "[SELECTOR] [pause | resume | step [N] | stop | KNOB=VALUE...]",
    "rollback": "[SELECTOR] [STEP]",
    "tensorboard": "[SELECTOR] FOLDER | off",
    "record": "[FOLDER | close]",
    "heal": "[SELECTOR]",
    "restart": "SELECTOR",
    "sync": "[SELECTOR] [MODULE | PATH]",
    "stacks": "[NAME]",
    "check": "[SELECTOR] [NAME]... [--axis AXIS]",
    "traffic": "[SELECTOR]",
    "profile": "[SELECTOR] [OPTION]...",
    "torchrun": "[SELECTOR] [--background] [--raw] SCRIPT | -m MODULE [ARGUMENT]...",
    "debug": "[SELECTOR] [--dap]",
    "logs": "[SELECTOR] [OPTION]...",
    "doctor": "[--quick]",
    "help": "[COMMAND]",
}
"""The arguments of each command, for its help and its errors; ``up`` has too many for one line."""

FLAGS = {"down": ("--all",), "interrupt": ("--abort",), "check": ("--axis",), "debug": ("--dap",)}
"""The options of commands without a parser."""

_FLAG = re.compile(r"--?[A-Za-z]")


def refuse_flags(command: str, words: Sequence[str]) -> None:
    """Refuse options that a command without a parser does not have, so that they are not taken for names.

    Raises:
        UsageProblem: there is one.
    """
    own = FLAGS.get(command, ())
    for word in words:
        flag = word.partition("=")[0]
        if _FLAG.match(word) and flag not in own:
            has = f"its option is {own[0]}" if own else "it has no options"
            raise UsageProblem(f"%mesh {command}: unknown option {flag}; {has}{hint(flag, own)}{_usage(command)}")


def unknown_mesh(name: str, known: Iterable[str], prefix: str = "") -> UsageProblem:
    """Return the error for a name that no mesh has.

    Args:
        name: the name.
        known: the names of the meshes that are up.
        prefix: the beginning of the text, such as ``%mesh down: ``.
    """
    names = list(known)
    have = ", ".join(names) or "none"
    return UsageProblem(f"{prefix}there is no mesh {name!r}; available: {have}{hint(name, names)}")


def _usage(command: str) -> str:
    return f" (%mesh {command} {ARGUMENTS[command]})"


@dataclass(frozen=True)
class Known:
    """The meshes that a line can name.

    Attributes:
        names: names of the meshes that are up.
        is_variable: whether a variable is a mesh, or a slice of one.
    """

    names: Sequence[str] = ()
    is_variable: Callable[[str], bool] = lambda name: False

    def selects(self, word: str) -> bool:
        """Whether a word starts with the name of a mesh, so that it is meant as a selector."""
        name = root_name(word)
        return name is not None and (name in self.names or self.is_variable(name))

    def unknown_word(self, command: str, word: str, what: str, meant: str | None = None) -> UsageProblem:
        """Return the error for a word that is neither a mesh nor one of the other arguments of a command.

        Args:
            command: the command.
            word: the word.
            what: the other arguments: ``one of pause, resume``, ``a step``.
            meant: what may have been meant, as `hint` returns it; by default the name of a mesh that is similar.
        """
        meshes = f"a mesh ({', '.join(self.names)})" if self.names else "a mesh (none is up)"
        near = hint(word, self.names) if meant is None else meant
        return UsageProblem(f"%mesh {command}: {word!r} is neither {meshes} nor {what}{near}{_usage(command)}")
