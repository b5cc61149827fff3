"""What ``%mesh`` answers to a word that is none of the arguments of a command, without processes."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from monarch_kernel.base.mesh import ValueMesh
from monarch_kernel.notebook.magics.commands import MeshCommands
from monarch_kernel.notebook.syntax.arguments import unknown_mesh
from monarch_kernel.notebook.syntax.lines import UsageProblem
from monarch_kernel.notebook.syntax.options import parse_remote
from monarch_kernel.notebook.syntax.selector import evaluate, root_name


class Ranks(ValueMesh[int]):
    """A mesh that is sliced by an index, as meshes of processes are."""

    def __getitem__(self, key: Any) -> Any:
        return self._with_region(self._region.index(key))


RANKS = Ranks({"gpus": 2}, range(2))
LOOP = "(%mesh loop [SELECTOR] [pause | resume | step [N] | stop | KNOB=VALUE...])"


class Accepted(Exception):
    """The line names a mesh, and the command goes on with it."""


class NamedMeshes:
    """Two meshes by name, ``t`` and ``trainers``, of which commands select one."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.interrupt_others = lambda: None
        self.detached = SimpleNamespace(has=lambda name: False, available_text=lambda: "available: none")

    def __iter__(self) -> Any:
        return iter(())

    def is_mesh(self, name: str | None, namespace: Mapping[str, Any]) -> bool:
        return name in self.names

    def select(self, selector: str, namespace: Mapping[str, Any]) -> NoReturn:
        name = root_name(selector)
        if name is not None and name not in self.names:
            raise unknown_mesh(name, self.names)
        if selector:
            evaluate(selector, dict.fromkeys(self.names, RANKS), self.names[0])
        raise Accepted

    def get(self, name: str) -> NoReturn:
        raise Accepted


def run(line: str, *names: str) -> None:
    shell: Any = SimpleNamespace(user_ns={})
    meshes: Any = NamedMeshes(*(names or ("t", "trainers")))
    MeshCommands(shell, meshes, lambda cell: None, lambda *cell: None).run(line)


REFUSED = {
    # another command, or another order
    "shwo": "unknown command 'shwo'; one of up, show, {...}; did you mean show?",
    "stop t": "unknown command 'stop'; one of {...}; did you mean down (or loop stop)?",
    "list": "{...}; did you mean show?",
    "xyzzy": "unknown command 'xyzzy'; one of up, {...} (%mesh? shows help)",
    "t": "the command comes first: %mesh show t",
    "t loop pause": "the command comes first: %mesh loop t pause",
    "pause t": "pause is a command of %mesh loop: %mesh loop pause t",
    "help lop": "there is no command 'lop'; one of {...}; did you mean loop?",
    # loop
    "loop stepp": f"'stepp' is neither a mesh (t, trainers) nor one of pause, resume, step, stop, nor KNOB=VALUE; did you mean "
    f"step? {LOOP}",
    "loop trainer": "'trainer' is neither a mesh (t, trainers) nor {...}; did you mean trainers? {...}",
    "loop t stepp": "'stepp' is neither one of pause, resume, step, stop nor KNOB=VALUE; did you mean step?",
    "loop trainer pause": "'trainer' is neither a mesh (t, trainers) nor {...}; did you mean trainers? {...}",
    "loop lr 0.1": "'lr' is neither {...}; to set a knob, write lr=0.1 {...}",
    "loop t lr 0.1": "'lr' is neither {...}; to set a knob, write lr=0.1",
    "loop pause t": "the mesh comes first: %mesh loop t pause",
    "loop step t": "the mesh comes first: %mesh loop t step",
    "loop 5": "'5' is neither a mesh (t, trainers) nor one of {...}",
    "loop t 5": "'5' is neither one of {...}",
    "loop t step five": "step takes a number of steps, such as 10, not 'five'",
    "loop --pause": f"unknown option --pause; it has no options {LOOP}",
    # rollback
    "rollback abc": "'abc' is neither a mesh (t, trainers) nor a step, such as 40 (%mesh rollback [SELECTOR] [STEP])",
    "rollback trainer": "{...}; did you mean trainers? {...}",
    "rollback trainer 40": "'trainer' is neither a mesh {...}; did you mean trainers? {...}",
    "rollback 40 t": "the mesh comes first: %mesh rollback t 40",
    "rollback t 40 50": "takes a mesh and a step, such as t 40, not 't 40 50'",
    "rollback -5": "a step is a whole number, such as 40, not '-5'",
    "rollback t 1.5": "a step is a whole number, such as 40, not '1.5'",
    "rollback t last": "a step is a whole number, such as 40, not 'last'",
    "rollback --step": "unknown option --step; it has no options (%mesh rollback [SELECTOR] [STEP])",
    # check
    "check --axs dp": "unknown option --axs; its option is --axis; did you mean --axis? {...}",
    "check t --axis": "--axis needs the name of an axis, such as --axis dp",
    "check t --axis=": "--axis needs the name of an axis, such as --axis dp",
    "check t model.fc1": "'model.fc1' is no name of a variable; name whole variables, such as model",
    "check 0": "'0' is neither a mesh (t, trainers) nor a name of a variable {...}",
    "check tt[0]": "'tt[0]' is neither a mesh (t, trainers) nor a name of a variable {...}",
    # sync
    "sync trainer mylib": "give one module or path, and a mesh (t, trainers) before it, not 'trainer mylib', such as "
    "%mesh sync t mylib; did you mean trainers?",
    "sync t a b": "give one module or path, not 'a b', such as %mesh sync t mylib",
    "sync --all": "unknown option --all; it has no options {...}",
    # tensorboard
    "tensorboard": "takes a folder, such as runs/gpt (or off)",
    "tensorboard t": "t is a mesh; write a folder, too, such as t runs/t",
    "tensorboard runs t": "the mesh comes first: %mesh tensorboard t runs",
    "tensorboard trainer runs": "there is no mesh 'trainer'; available: t, trainers; did you mean trainers?",
    "tensorboard --off": "unknown option --off; it has no options (%mesh tensorboard [SELECTOR] FOLDER | off)",
    # record
    "record a b": "takes a folder, such as runs/gpt (or close), not 'a b'",
    "record --close": "unknown option --close; it has no options (%mesh record [FOLDER | close])",
    # commands that take a mesh
    "heal trainer": "there is no mesh 'trainer'; available: t, trainers; did you mean trainers?",
    "heal 0": "'0' is a number and selects no mesh; rank 0 of t is t[0]",
    "heal t 0": "give one selector, such as t, not 't 0'",
    "heal t[7]": "t[7]: axis 'gpus' has size 2: index 7 is out of range -2 to 1",
    "heal t[5:]": "t[5:]: axis 'gpus' has size 2: slice 5: selects nothing",
    "heal trainers[gpus=1]": "'trainers[gpus=1]' selects no mesh: an index has no names; write trainers.slice(gpus=1)",
    "logs trainers[gpus=0]": "'trainers[gpus=0]' selects no mesh: an index has no names; write trainers.slice(gpus=0)",
    "show trainers[gpus=1]": "takes a whole mesh, without an index: trainers, not trainers[gpus=1]",
    "heal --force": "unknown option --force; it has no options (%mesh heal [SELECTOR])",
    "restart": "specify the ranks: a mesh or a slice of one, such as t, t[0], t[0:4]",
    "restart --all": "unknown option --all; it has no options (%mesh restart SELECTOR)",
    "restart trainer": "there is no mesh 'trainer'{...}did you mean trainers?",
    "debug 1": "'1' is a number and selects no mesh; rank 1 of t is t[1]",
    "debug t u": "give one selector, such as t, not 't u'",
    "debug -r": "unknown option -r; its option is --dap (%mesh debug [SELECTOR] [--dap])",
    "debug --dap": "debug --dap: name one rank, such as %mesh debug t[0] --dap",
    "logs 50": "'50' is a number and selects no mesh; rank 50 of t is t[50]",
    "logs t 50": "unknown argument '50' (write --lines 50 for a number of lines); the options are {...}",
    "logs t --line 5": "unknown option '--line' (did you mean --lines?); the options are {...}",
    "logs t --lines": "--lines needs a value: --lines N",
    "show t[0]": "takes a whole mesh, without an index: t, not t[0]",
    "show trainer": "there is no mesh 'trainer'; available: t, trainers; did you mean trainers?",
    "show --all": "unknown option --all; it has no options (%mesh show [NAME])",
    "down": "name a mesh (t, trainers)",
    "down t[0]": "takes a whole mesh, without an index: t, not t[0]",
    "down t trainers": "name one mesh, not 't trainers'; %mesh down --all ends all",
    "down --al": "unknown option --al; its option is --all; did you mean --all? (%mesh down NAME | --all)",
    "interrupt": "name a mesh (t, trainers)",
    "interrupt --abort": "name a mesh (t, trainers)",
    "interrupt t --abrt": "unknown option --abrt; its option is --abort; did you mean --abort? {...}",
    "stacks trainer": "there is no mesh 'trainer'; available: t, trainers; did you mean trainers?",
    "stacks --raw": "unknown option --raw; it has no options (%mesh stacks [NAME])",
    "traffic t --raw": "unknown option --raw; it has no options (%mesh traffic [SELECTOR])",
    "attach": "name one detached mesh; available: none",
    "attach --all": "unknown option --all; it has no options (%mesh attach NAME)",
    "doctor --quik": "unknown option '--quik' (did you mean --quick?); the options are --quick",
    # up
    "up 4": "'4' is no name for a mesh: write %mesh up trainers -n 4",
    "up t 4": "unknown argument '4' (write -n 4 for a number of ranks); the options are {...}",
    "up t -n": "-n needs a value: -n N",
    "up t -n 2 --device gpu": "--device takes one of auto, cuda, cpu, not 'gpu'{...}",
    "up t -n 2 --on slurn": "--on takes one of {...}, not 'slurn'; did you mean slurm?",
    "up t -n 2 --restart": "--restart needs a value: --restart never|rank|mesh",
    "up t -n 2 --detatch": "unknown option '--detatch' (did you mean --detach?); the options are {...}",
}


@pytest.mark.parametrize(("line", "says"), REFUSED.items())
def test_a_word_that_is_no_argument_is_answered_with_what_is_possible(line: str, says: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        run(line)
    said = str(caught.value)
    assert said.startswith(("%mesh", "there is no mesh", "'", "t["))
    assert "\n" not in said
    at = 0
    for part in says.split("{...}"):  # in this order
        assert part in said[at:], said
        at = said.index(part, at) + len(part)
    assert says.endswith("{...}") or at == len(said), said


@pytest.mark.parametrize(
    "line",
    [
        "loop",
        "loop t",
        "loop t[0] pause",
        "loop step 3",
        "loop lr=-1",
        "loop trainers.slice(gpus=0) lr=1e-3",
        "rollback",
        "rollback t",
        "rollback 40",
        "rollback t 1_000",
        "check",
        "check model",
        "check t model --axis gpus",
        "check --axis=gpus",
        "sync",
        "sync mylib.model",
        "sync t ./lib/model.py",
        "tensorboard -/x",
        "tensorboard t runs/t",
        "heal",
        "heal t[0]",
        "restart t[0:2]",
        "debug",
        "debug t[0] --dap",
        "logs t --lines 3",
        "down t",
        "interrupt t --abort",
        "interrupt t[0]",
        "show t",
        "stacks t[0]",
        "traffic t",
    ],
)
def test_lines_that_are_right_select_a_mesh(line: str) -> None:
    with pytest.raises(Accepted):
        run(line)


def test_without_a_mesh_an_unknown_word_says_that_none_is_up() -> None:
    shell: Any = SimpleNamespace(user_ns={})
    empty: Any = NamedMeshes()
    commands = MeshCommands(shell, empty, lambda cell: None, lambda *cell: None)
    with pytest.raises(UsageProblem, match=r"'stepp' is neither a mesh \(none is up\) nor one of pause"):
        commands.run("loop stepp")
    with pytest.raises(UsageProblem, match="no mesh is up; bring one up with"):
        commands.run("down t")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("t 0", "unknown argument '0' (write --ranks 0 for a rank)"),
        ("t --bakground", "unknown option '--bakground' (did you mean --background?)"),
        ("t --out", "--out needs a value: --out NAME"),
        ("t -o", "--out needs a value: --out NAME"),
        ("t --ranks", "--ranks needs a value: --ranks RANKS"),
    ],
)
def test_a_slip_in_a_cell_magic_says_what_was_meant(line: str, says: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        parse_remote(line)
    assert f"%%remote: {says}" in str(caught.value)
