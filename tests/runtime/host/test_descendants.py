"""The mark of a rank is in the environment of all that it starts, and the zygote finds these processes by it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from monarch_kernel.launch.base import agent_command, module_command
from monarch_kernel.runtime.host.descendants import VARIABLE, is_agent
from tests.support.waiting import wait_until

CHECKOUT = Path(__file__).parents[3]

MARKS = f"""
import os, subprocess, sys
from monarch_kernel.runtime.host.descendants import mark_rank

def shown(pid):
    with open(f"/proc/{{pid}}/environ") as file:
        return [each for each in file.read().split(chr(0)) if each.startswith("{VARIABLE}=")]

before = os.environ["BEFORE"], os.environ["ZULU"]
mark_rank(26, 3)
read_end, write_end = os.pipe()
if os.fork() == 0:
    os.write(write_end, repr(shown(os.getpid())).encode())
    os._exit(0)
executed = subprocess.run([sys.executable, "-c", "import os; print(os.environ['{VARIABLE}'])"], capture_output=True, text=True)
assert (os.environ["BEFORE"], os.environ["ZULU"]) == before
print(os.read(read_end, 1000).decode(), executed.stdout, end="")
"""

KILLS = """
import subprocess, sys
from monarch_kernel.runtime.host import descendants

descendants.name_agent()
command = ["sleep", "1000"]
rest = subprocess.Popen(command, env={"A": "1"}, start_new_session=True)
zygote = subprocess.Popen(command, start_new_session=True)
descendants.mark_rank(7, 0)
mine = [subprocess.Popen(command, start_new_session=True) for _ in range(2)]
descendants.name_agent()
descendants.mark_rank(7, 0)
other = subprocess.Popen(command, start_new_session=True)
with open(f"/proc/{mine[0].pid}/environ") as file:
    (mark,) = [each for each in file.read().split(chr(0)) if each.startswith(descendants.VARIABLE)]
descendants.os.environ[descendants.VARIABLE] = mark.partition("=")[2][:16] + "-" * 16
descendants.kill_marked()
print([each.wait() for each in mine], [each.poll() for each in (rest, zygote, other)])
for each in (rest, zygote, other):
    each.kill()
"""


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("order", ["BEFORE", "ZULU"])
def test_forks_and_programs_show_the_mark_of_their_rank(order: str) -> None:
    mark = "0123456789abcdef0000001a00000003"
    variables = {"BEFORE": "a=b", VARIABLE: "0123456789abcdef" + "-" * 16, "ZULU": f"{VARIABLE}=x"}
    first = {order: variables[order]}
    assert run(MARKS, **first, **{name: value for name, value in variables.items() if name != order}) == (
        f"['{VARIABLE}={mark}'] {mark}\n"
    )


def test_a_process_without_a_zygote_has_no_mark() -> None:
    code = "import os\nfrom monarch_kernel.runtime.host.descendants import *\nmark_rank(1, 0)\nkill_marked()\n"
    assert run(f"{code}print('{VARIABLE}' in os.environ)", **{VARIABLE: ""}) == "True\n"


def test_only_processes_of_ranks_of_the_agent_that_has_ended_are_killed() -> None:
    assert run(KILLS) == "[-9, -9] [None, None, None]\n"


@pytest.mark.parametrize("command", [agent_command(), module_command("monarch_kernel.bootstrap", "agent")])
def test_a_host_agent_is_known_by_its_command(command: Sequence[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()", *command[-2:]], stdin=subprocess.PIPE) as agent:
        wait_until(lambda: is_agent(agent.pid), "the process to have executed its command")
        assert not is_agent(os.getpid())
        agent.kill()
