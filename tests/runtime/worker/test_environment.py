"""A rank uses the directory and the import path of the controller, if its machine has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from monarch_kernel.runtime.worker.environment import path_here

CONTROLLER = [
    "",
    "/home/ada/project",
    "/opt/c/lib/python311.zip",
    "/opt/c/lib/python3.11",
    "/opt/c/lib/python3.11/lib-dynload",
]
CONTROLLER += ["/opt/c/lib/python3.11/site-packages", "/home/ada/editable"]
HOST = ["/usr/lib/python3.11", "/usr/lib/python3/dist-packages", "/srv/monarch"]


def test_a_host_that_shares_no_files_keeps_its_path() -> None:
    assert path_here(CONTROLLER, HOST, lambda path: False) == ["", *HOST]


def test_shared_folders_keep_their_place_before_or_behind_the_libraries() -> None:
    assert path_here(CONTROLLER, HOST, lambda path: True) == ["", "/home/ada/project", *HOST, "/home/ada/editable"]


def test_packages_of_the_controllers_interpreter_are_not_used() -> None:
    theirs = ["/a/lib64/python3.12/site-packages", "/a/lib/python3/dist-packages/x.egg", "/a/site-packages"]
    assert path_here(theirs, HOST, lambda path: True) == HOST


def test_the_same_interpreter_has_the_same_path() -> None:
    assert path_here(CONTROLLER[2:], CONTROLLER[2:], lambda path: True) == CONTROLLER[2:]


def environment_with_this_package(**added: str) -> dict[str, str]:
    """The environment of a new process that imports this package, also where its dependencies come by PYTHONPATH."""
    package = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, **added}


SETTLE = """
import json, os, sys
from monarch_kernel.runtime.worker.environment import settle
from monarch_kernel.net.wire.messages import RankSpec
before = list(sys.path)
cwd, sys_path, threads = json.loads(sys.argv[1])
settle(RankSpec(1, 0, 2, 0, 2, (("ranks", 2),), "m", "cpu", threads, {"X": "y"}, cwd, tuple(sys_path)))
print(json.dumps([os.getcwd(), [entry for entry in sys.path if entry not in before], os.environ["OMP_NUM_THREADS"]]))
"""


def settled(where: Path, cwd: str, sys_path: list[str], threads: int = 0) -> list[object]:
    environment = environment_with_this_package()
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        [sys.executable, "-c", SETTLE, json.dumps([cwd, sys_path, threads])],
        env=environment,
        cwd=where,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout)
    return found


def test_a_rank_uses_the_directory_of_the_controller_if_it_exists(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    cpus = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert settled(tmp_path, str(there), [str(there), "/no/such"]) == [str(there), [str(there)], cpus]


def test_otherwise_a_rank_stays_in_the_directory_of_the_agent(tmp_path: Path) -> None:
    assert settled(tmp_path, "/no/such/directory", ["/no/such"])[:2] == [str(tmp_path), []]


def test_a_rank_on_the_controllers_machine_uses_its_path_unchanged(tmp_path: Path) -> None:
    path = ["/no/such", str(Path(__file__).parents[3])]
    assert settled(tmp_path, str(tmp_path), path, threads=3)[1:] == [["/no/such"], "3"]
    with pytest.raises(AssertionError, match="FileNotFoundError"):
        settled(tmp_path, "/no/such/directory", path, threads=3)


CHANGED = """
import os, tempfile, time
tempfile.gettempdir(), time.localtime()
from monarch_kernel.runtime.worker.environment import settle
from monarch_kernel.net.wire.messages import RankSpec
axes = (("ranks", 1),)
env = {"TZ": "Asia/Tokyo", "TMPDIR": os.getcwd(), "OMP_NUM_THREADS": "3"}
settle(RankSpec(1, 0, 1, 0, 1, axes, "m", "cpu", 1, env, os.getcwd(), (), unset=("GONE", "OMP_NUM_THREADS", "NEVER")))
print("GONE" in os.environ, os.environ["OMP_NUM_THREADS"], tempfile.gettempdir() == os.getcwd(), time.strftime("%Z"))
print(os.environ.get("TORCH_FR_BUFFER_SIZE"))
"""


def test_a_rank_uses_changed_variables_and_not_removed_ones(tmp_path: Path) -> None:
    environment = environment_with_this_package(GONE="1", TZ="UTC", TMPDIR="/tmp")
    done = subprocess.run(
        [sys.executable, "-c", CHANGED], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "3", "True", "JST", "500"]


@pytest.mark.parametrize(
    ("name", "value"), [("TORCH_FR_BUFFER_SIZE", "2000"), ("TORCH_NCCL_TRACE_BUFFER_SIZE", "None")]
)
def test_the_users_size_of_the_flight_recorder_is_kept(tmp_path: Path, name: str, value: str) -> None:
    environment = environment_with_this_package(**{name: "2000"})
    done = subprocess.run(
        [sys.executable, "-c", CHANGED], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == value


ARGUMENTS = """
import argparse, os, sys
from monarch_kernel.runtime.worker.environment import settle
from monarch_kernel.net.wire.messages import RankSpec
settle(RankSpec(1, 0, 1, 0, 1, (("ranks", 1),), "m", "cpu", 1, {}, os.getcwd(), tuple(sys.path)))
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
print(parser.parse_args(), sys.argv)
print(parser.format_usage(), end="")
"""


def test_a_script_in_a_cell_parses_no_arguments_of_the_zygote() -> None:
    command = [sys.executable, "-c", ARGUMENTS, "zygote", "4"]
    done = subprocess.run(command, env=environment_with_this_package(), capture_output=True, text=True, check=True)
    assert done.stdout == "Namespace(lr=0.1) ['remote_cell']\nusage: remote_cell [-h] [--lr LR]\n"


STEPS = """
import os, resource
from monarch_kernel.runtime.worker.environment import settle
from monarch_kernel.net.wire.messages import RankSpec
settle(RankSpec(1, 0, 1, 0, 1, (("ranks", 1),), "m", "cpu", 1, {}, os.getcwd(), ()))
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        blocks = [bytearray(b"x") * (4 << 20) for _ in range(4)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(sorted(faults() for _ in range(9))[4])
"""
TOLD = [{"MALLOC_MMAP_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}]


@pytest.mark.parametrize(("told", "is_kept"), [({}, True), *((told, False) for told in TOLD)])
def test_freed_memory_is_kept_unless_the_user_has_configured_malloc(told: dict[str, str], is_kept: bool) -> None:
    environment = environment_with_this_package(**told)
    done = subprocess.run([sys.executable, "-c", STEPS], env=environment, capture_output=True, text=True, check=True)
    faults = int(done.stdout)
    assert (faults < 100) == is_kept, faults  # of 32 blocks with 1,024 pages each
