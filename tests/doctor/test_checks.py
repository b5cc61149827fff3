"""Each check reports what it finds and how to fix it, under real conditions: limits, filters of system calls, files."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import monarch_kernel
from monarch_kernel.doctor import connectivity, engines, jupyter, machine, run_checks, sessions, software
from monarch_kernel.doctor.children import ask, ask_python
from monarch_kernel.doctor.report import Finding, Sign
from monarch_kernel.doctor.run_checks import Check

ROOT = str(Path(__file__).parents[2])
SYSCALLS = {
    "x86_64": {"pidfd_open": 434, "process_vm_readv": 310, "memfd_create": 319},
    "aarch64": {"pidfd_open": 434, "process_vm_readv": 270, "memfd_create": 279},
}.get(platform.machine(), {})

LOOK = """
import json
from monarch_kernel.doctor import {module}
print(json.dumps([[f.item, f.sign.value, f.found, f.remedy] for f in {module}.{check}()]))
"""
FORBID = """
import ctypes, struct
FILTER = b"".join(struct.pack("HBBI", *each) for each in (
    (0x20, 0, 0, 0),           # the number of the system call
    (0x15, 0, 1, {number}),    # is it this one?
    (0x06, 0, 0, 0x50001),     # then EPERM
    (0x06, 0, 0, 0x7FFF0000),  # else allow
))
class Program(ctypes.Structure):
    _fields_ = [("n", ctypes.c_ushort), ("filter", ctypes.c_char_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert not libc.prctl(38, 1, 0, 0, 0)
assert not libc.prctl(22, 2, ctypes.byref(Program(4, FILTER)), 0, 0), "no filter"
"""


def look_elsewhere(module: str, check: str, before: str = "", **environment: str) -> list[Finding]:
    """Run a check in another process, after code that changes its conditions."""
    env = {**os.environ, "PYTHONPATH": ROOT, **environment}
    command = [sys.executable, "-c", before + LOOK.format(module=module, check=check)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env, cwd="/")
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout)
    return [Finding(item, Sign(sign), found, remedy) for item, sign, found, remedy in rows]


def limit(name: str, soft: int, hard: int | str = "hard") -> str:
    """Return code that sets a resource limit of its process."""
    return f"from resource import *\n_, hard = getrlimit({name})\nsetrlimit({name}, ({soft}, {hard}))\n"


def forbid(name: str) -> str:
    if name not in SYSCALLS:
        pytest.skip(f"this test does not know the system call numbers of {platform.machine()}")
    return FORBID.format(number=SYSCALLS[name])


def put(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


# -- the machine


def test_this_machine_has_no_problems() -> None:
    good = (
        machine.processors,
        machine.memory,
        connectivity.memory_access,
        connectivity.process_descriptors,
        connectivity.session_socket,
        connectivity.loopback,
    )
    for check in (*good, software.python, machine.temporary_files):
        for finding in check():
            assert finding.sign is not Sign.PROBLEM, finding
            assert finding.found


def test_few_open_files_are_a_warning_that_says_how_to_raise_the_limit() -> None:
    (low,) = look_elsewhere("machine", "descriptors", limit("RLIMIT_NOFILE", 256, 300))
    assert low.sign is Sign.WARNING
    assert "256 per process (ulimit -n), with a hard limit of 300" in low.found
    assert "limits.conf" in low.remedy
    (enough,) = look_elsewhere("machine", "descriptors", limit("RLIMIT_NOFILE", 4096, 4096))
    assert enough == Finding("open files", Sign.OK, "4,096 per process (ulimit -n)")


def test_below_a_high_hard_limit_the_shell_can_raise_the_soft_limit() -> None:
    (low,) = look_elsewhere("machine", "descriptors", limit("RLIMIT_NOFILE", 1024, 4096))
    assert "ulimit -n 4096" in low.remedy


def test_few_processes_are_a_warning() -> None:
    (low,) = look_elsewhere("machine", "tasks", limit("RLIMIT_NPROC", 100))
    assert (low.sign, low.found.startswith("100 per user")) == (Sign.WARNING, True)


def test_a_file_size_limit_bounds_the_values_that_can_be_sent() -> None:
    (bounded,) = look_elsewhere("machine", "shared_memory", limit("RLIMIT_FSIZE", 1 << 20))
    assert (bounded.sign, bounded.found) == (Sign.WARNING, "memory files (memfd) work, up to 1.0 MiB")
    (none,) = look_elsewhere("machine", "shared_memory", limit("RLIMIT_FSIZE", 1 << 16))
    assert (none.sign, "ulimit -f" in none.remedy) == (Sign.PROBLEM, True)


def test_forbidden_shared_memory_is_a_problem() -> None:
    (finding,) = look_elsewhere("machine", "shared_memory", forbid("memfd_create"))
    assert (finding.sign, "not permitted" in finding.found) == (Sign.PROBLEM, True)


def test_forbidden_process_memory_access_is_a_warning() -> None:
    (finding,) = look_elsewhere("connectivity", "memory_access", forbid("process_vm_readv"))
    assert finding.sign is Sign.WARNING
    assert "Operation not permitted; large values and buffers are slower" in finding.found
    assert finding.remedy


def test_a_container_without_pidfd_is_a_problem() -> None:
    (finding,) = look_elsewhere("connectivity", "process_descriptors", forbid("pidfd_open"))
    assert (finding.sign, finding.found) == (Sign.PROBLEM, "pidfd_open failed: Operation not permitted")


def test_sockets_are_in_another_directory_if_the_path_of_tmpdir_is_too_long(short_path: Path) -> None:
    folder, runtime = short_path / ("a" * 90), short_path / "r"
    folder.mkdir()
    runtime.mkdir()
    (finding,) = look_elsewhere("connectivity", "session_socket", TMPDIR=str(folder), XDG_RUNTIME_DIR=str(runtime))
    assert (finding.sign, finding.found.split(",")[0]) == (Sign.OK, f"in {runtime}")
    assert not [*folder.iterdir(), *runtime.iterdir()]


def test_no_directory_for_sockets_is_a_problem() -> None:
    before = "from monarch_kernel.base import directories\ndirectories.session_roots = lambda: ['/proc']\n"
    (finding,) = look_elsewhere("connectivity", "session_socket", before)
    assert finding.sign is Sign.PROBLEM
    assert finding.found.startswith("no directory for the sockets of a session: /proc (")
    assert "TMPDIR" in finding.remedy


def test_without_a_network_the_loopback_is_a_problem_and_addresses_are_missing() -> None:
    before = "import ctypes\nif ctypes.CDLL(None).unshare(0x40000000):\n    raise SystemExit(3)\n"
    if subprocess.run([sys.executable, "-c", before], check=False).returncode:
        pytest.skip("this process may not create a network namespace")
    (finding,) = look_elsewhere("connectivity", "loopback", before)
    assert (finding.sign, "unreachable" in finding.found) == (Sign.PROBLEM, True)
    (finding,) = look_elsewhere("connectivity", "addresses", before)
    assert finding.sign is Sign.WARNING


# -- what is installed


def test_the_package_reports_how_it_is_installed_and_where_it_runs_from(tmp_path: Path) -> None:
    (tmp_path / "monarch_kernel").symlink_to(Path(ROOT) / "monarch_kernel")
    (finding,) = look_elsewhere("software", "package", PYTHONPATH=str(tmp_path))
    assert finding.sign is Sign.WARNING
    assert f"runs from {tmp_path}" in finding.found


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("torch>=2", ""),
        ("torch>=99", ", but >=99 is required"),
        ("no-such-package-of-ours", "no-such-package-of-ours is not installed"),
    ],
)
def test_versions_are_compared_with_requirements(wanted: str, said: str) -> None:
    found = software.missing(Requirement(wanted))
    assert found.endswith(said)
    assert bool(found) == bool(said)


def test_a_missing_or_old_package_is_a_problem_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needed = [Requirement("torch>=99"), Requirement("no-such-package-of-ours")]
    monkeypatch.setattr(software, "requirements", lambda: needed)
    (finding,) = software.packages()
    assert finding.sign is Sign.PROBLEM
    assert finding.remedy.endswith("-m pip install 'torch>=99' 'no-such-package-of-ours'")


TORCH: dict[str, Any] = {
    "version": "2.9",
    "cuda": "12.8",
    "hip": None,
    "is_available": True,
    "devices": [["NVIDIA H100", 80 << 30], ["NVIDIA H100", 80 << 30]],
    "gloo": True,
    "nccl": True,
    "said": [],
}


@pytest.mark.parametrize(
    ("change", "gpus", "sign", "said"),
    [
        ({}, ["0", "1"], Sign.OK, "2.9, built for CUDA 12.8; devices: 2 x NVIDIA H100 (80 GiB)"),
        ({"said": ["too old"]}, ["0", "1"], Sign.WARNING, "torch warns: too old"),
        ({"is_available": False, "devices": [], "cuda": None}, [], Sign.OK, "no GPU, so ranks use CPUs"),
        ({"is_available": False, "devices": []}, [], Sign.OK, "no GPU, so ranks use CPUs"),
        ({"is_available": False, "devices": []}, ["0"], Sign.PROBLEM, "torch can't use the 1 GPU of this machine"),
        ({"gloo": False}, [], Sign.PROBLEM, "without gloo"),
    ],
)
def test_findings_about_torch(change: dict[str, Any], gpus: Sequence[str], sign: Sign, said: str) -> None:
    finding = software.torch_finding({**TORCH, **change}, gpus)
    assert finding.sign is sign
    assert said in finding.found
    assert bool(finding.remedy) == (sign is not Sign.OK)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ImportError('libcudart.so.12 is not there')", "ImportError: libcudart.so.12 is not there"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
    ],
)
def test_a_torch_that_fails_to_import_is_a_problem(tmp_path: Path, source: str, said: str) -> None:
    (tmp_path / "torch.py").write_text(source)
    (finding,) = look_elsewhere("software", "torch", PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert finding.sign is Sign.PROBLEM
    assert said in finding.found


def test_an_interrupt_raises_even_if_the_command_ends_by_itself() -> None:
    with pytest.raises(KeyboardInterrupt):
        ask(["sh", "-c", "sleep 0.1; kill -INT $PPID"], 60.0)


STUB = """
import warnings
from types import SimpleNamespace as Space
warnings.warn("a warning of the import is not about devices")
__version__, version = "2.9", Space(cuda="12.8", hip=None)
distributed = Space(is_available=lambda: True, is_gloo_available=lambda: True, is_nccl_available=lambda: True)
def is_available():
    warnings.warn("Found GPU0 which is too old\\nfor this build")
    return {available}
cuda = Space(is_available=is_available, device_count=lambda: 1,
             get_device_properties=lambda i: Space(name="NVIDIA H100", total_memory=80 << 30))
"""


DRIVER = """
class NVMLError(Exception): pass
nvmlInit, nvmlDeviceGetCount, nvmlDeviceGetHandleByIndex = lambda: None, lambda: 1, lambda i: i
nvmlDeviceGetUUID = lambda handle: "GPU-1234"
"""


def test_warnings_of_torch_about_devices_are_shown(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(STUB.format(available=True))
    (finding,) = look_elsewhere("software", "torch", PYTHONPATH=f"{ROOT}:{tmp_path}", CUDA_VISIBLE_DEVICES="0")
    assert finding.sign is Sign.WARNING
    devices = "devices: 1 x NVIDIA H100 (80 GiB); torch warns: Found GPU0 which is too old"
    assert finding.found == f"2.9, built for CUDA 12.8; {devices}"


def test_a_gpu_that_torch_cannot_use_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(STUB.format(available=False))
    (tmp_path / "pynvml.py").write_text(DRIVER)
    (finding,) = look_elsewhere("software", "torch", PYTHONPATH=f"{ROOT}:{tmp_path}", CUDA_VISIBLE_DEVICES="0")
    assert finding.sign is Sign.PROBLEM
    assert "torch can't use the 1 GPU of this machine; torch warns: Found GPU0" in finding.found
    assert "nvidia-smi" in finding.remedy


def test_engines_without_their_commands_are_not_available(tmp_path: Path) -> None:
    (finding,) = look_elsewhere("engines", "engines", PATH=str(tmp_path))
    assert finding.sign is Sign.OK
    assert finding.found.startswith("available: local")
    assert "slurm (no sbatch, squeue, scancel)" in finding.found


def test_a_missing_extra_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "missing", lambda requirement: f"{requirement.name} is not installed")
    monkeypatch.setattr(engines, "requirements", lambda extra: [Requirement(f"lib-of-{extra}")])
    (finding,) = engines.engines()
    assert finding.sign is Sign.OK
    assert "ssh (lib-of-ssh is not installed)" in finding.found
    assert "monarch_kernel[ray,ssh,kubernetes,lightning]" in finding.remedy


# -- Jupyter


@pytest.fixture
def apart(tmp_path: Path) -> dict[str, str]:
    """The environment of a process for which Jupyter's folders are only those below ``tmp_path``."""
    (tmp_path / "home").mkdir()
    return {
        "HOME": str(tmp_path / "home"),
        "JUPYTER_PATH": str(tmp_path / "jupyter"),
        "JUPYTER_CONFIG_PATH": str(tmp_path / "config"),
        "PATH": str(tmp_path),
    }


NO_PREFIX = "import sys; sys.prefix = '/nowhere'\n"  # Jupyter also searches this prefix


def kernels(apart: dict[str, str], name: str = "", **spec: Any) -> Finding:
    if name:
        start = spec.pop("start", ["-c", "from monarch_kernel.__main__ import main; main()"])
        argv = [spec.pop("python", sys.executable), *start, "-f", "{connection_file}"]
        put(Path(apart["JUPYTER_PATH"]) / "kernels" / name / "kernel.json", {"argv": argv, **spec})
    (finding,) = look_elsewhere("jupyter", "kernels", NO_PREFIX, **apart)
    return finding


def test_no_kernelspec_is_a_problem_that_says_how_to_install(apart: dict[str, str]) -> None:
    finding = kernels(apart)
    assert (finding.sign, finding.found) == (Sign.PROBLEM, "no Monarch kernel is installed")
    assert finding.remedy == f"{sys.executable} -m monarch_kernel install --user"


@pytest.mark.parametrize("python", ["python", sys.executable])
def test_a_kernelspec_that_starts_this_package_is_ok(apart: dict[str, str], python: str) -> None:
    finding = kernels(apart, "monarch", python=python)
    assert (finding.item, finding.sign) == ("kernel 'monarch'", Sign.OK), finding


def test_a_kernelspec_of_an_earlier_version_is_known(apart: dict[str, str]) -> None:
    finding = kernels(apart, "monarch", start=["-m", "monarch_kernel"])
    assert (finding.item, finding.sign) == ("kernel 'monarch'", Sign.OK), finding


def test_a_kernelspec_whose_interpreter_is_gone_is_a_problem(apart: dict[str, str]) -> None:
    finding = kernels(apart, "old", python="/gone/bin/python")
    assert (finding.sign, finding.found) == (Sign.PROBLEM, "its interpreter /gone/bin/python does not exist")
    assert finding.remedy.endswith("install --user --name old")


def test_a_kernelspec_whose_interpreter_imports_another_package_is_a_problem(
    apart: dict[str, str], tmp_path: Path
) -> None:
    other = tmp_path / "other" / "monarch_kernel"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("__version__ = '9.9'")
    finding = kernels(apart, "monarch", env={"PYTHONPATH": str(other.parent)})
    assert finding.sign is Sign.PROBLEM
    assert f"imports 9.9 from {other.parent}" in finding.found
    (other / "__init__.py").write_text("raise ImportError('half of it is not there')")
    finding = kernels(apart, "monarch", env={"PYTHONPATH": str(other.parent)})
    assert finding.sign is Sign.PROBLEM
    assert "can't import monarch_kernel: ImportError: half of it is not there" in finding.found
    (other / "__init__.py").write_text(f"__version__ = '{monarch_kernel.__version__}'")
    assert kernels(apart, "monarch", env={"PYTHONPATH": str(other.parent)}).sign is Sign.WARNING


def test_a_jupyter_of_another_environment_without_the_kernel_is_a_warning(
    apart: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "jupyter"
    script.write_text("#!/bin/sh\necho '{\"kernelspecs\": {}}'\n")
    script.chmod(0o755)
    _, other = look_elsewhere("jupyter", "kernels", NO_PREFIX, **apart)
    assert other.sign is Sign.WARNING
    assert f"{script} belongs to another environment, and lists no Monarch kernel" in other.found


def panel(apart: dict[str, str]) -> Finding:
    (finding,) = look_elsewhere("jupyter", "panel", NO_PREFIX, **apart)
    return finding


def test_the_panel_is_found_in_the_folders_of_jupyterlab(apart: dict[str, str]) -> None:
    without = panel(apart)
    assert (without.sign, "there is no panel of meshes" in without.found) == (Sign.WARNING, True)
    assert "optional" in without.remedy
    package = Path(apart["JUPYTER_PATH"]) / "labextensions" / jupyter.LAB_EXTENSION / "package.json"
    put(package, {"version": monarch_kernel.__version__})
    assert panel(apart) == Finding("panel in JupyterLab", Sign.OK, f"{monarch_kernel.__version__}, in {package.parent}")
    put(package, {"version": "0.0.9"})
    assert (panel(apart).sign, "0.0.9" in panel(apart).found) == (Sign.WARNING, True)


def test_a_disabled_panel_is_a_warning(apart: dict[str, str]) -> None:
    package = Path(apart["JUPYTER_PATH"]) / "labextensions" / jupyter.LAB_EXTENSION / "package.json"
    put(package, {"version": monarch_kernel.__version__})
    settings = Path(apart["JUPYTER_CONFIG_PATH"]) / "labconfig" / "page_config.json"
    put(settings, {"disabledExtensions": {jupyter.LAB_EXTENSION: True}})
    finding = panel(apart)
    assert (finding.sign, f"disabled in {settings}" in finding.found) == (Sign.WARNING, True)
    assert finding.remedy == f"jupyter labextension enable {jupyter.LAB_EXTENSION}"


@pytest.mark.parametrize(
    ("setting", "disabled"),
    [
        (None, False),
        ({jupyter.LAB_EXTENSION: False}, False),
        ({f"{jupyter.LAB_EXTENSION}:plugin": True}, True),
        ([jupyter.LAB_EXTENSION], True),
        ({"another": True}, False),
    ],
)
def test_disabled_extensions_may_be_a_list_or_a_mapping(setting: object, disabled: bool) -> None:
    assert jupyter.is_disabled(setting) is disabled


# -- sessions


def test_leftovers_of_a_killed_session_are_reported_and_kept_for_the_next_session() -> None:
    code = "from monarch_kernel.runtime.controller.stale_sessions import make_directory; print(make_directory()[0]); "
    held = subprocess.Popen([sys.executable, "-c", code + "input()"], stdin=-1, stdout=-1, text=True, cwd=ROOT)
    with held:
        assert held.stdout is not None
        directory = Path(held.stdout.readline().strip())
        (finding,) = sessions.leftovers()
        assert finding.sign is Sign.OK, finding  # its owner lives
        held.kill()
        held.wait()
    (finding,) = sessions.leftovers()
    assert (finding.sign, str(directory) in finding.found) == (Sign.WARNING, True)
    assert directory.is_dir()
    assert ask_python("from monarch_kernel.runtime.controller.stale_sessions import sweep; sweep()", 30.0).trouble == ""
    assert not directory.exists()


def test_the_test_rank_starts_and_ends() -> None:
    (finding,) = sessions.rank()
    assert finding.sign is Sign.OK, finding
    assert finding.found.startswith("started in ")


def test_a_rank_that_does_not_start_is_a_problem_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12 is not there')")
    (finding,) = look_elsewhere("sessions", "rank", PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert finding.sign is Sign.PROBLEM
    assert finding.found.startswith("failed while starting a rank: ")
    assert "libcudart.so.12 is not there" in finding.found


def test_a_rank_that_hangs_is_killed_with_its_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sessions, "RANK_S", 3.0)
    (finding,) = sessions.rank()
    assert finding.sign is Sign.PROBLEM
    assert "starting a rank: timed out after 3 s and was killed" in finding.found


# -- all of them


def test_a_check_that_fails_is_a_problem_and_the_next_check_runs() -> None:
    def fails() -> list[Finding]:
        raise RuntimeError("of all things")

    good = Finding("good", Sign.OK, "well")
    failed, other = run_checks.examine([Check("bad", fails), Check("good", lambda: [good])])
    assert failed.sign is Sign.PROBLEM
    assert failed.found == "the check failed: RuntimeError: of all things"
    assert other is good


def test_a_check_that_hangs_is_a_problem_and_the_next_check_runs(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def hangs() -> list[Finding]:
        pipe.read_bytes()
        return []

    good = Finding("good", Sign.OK, "well")
    late, other = run_checks.examine([Check("bad", hangs, 0.1), Check("good", lambda: [good])])
    assert (late.sign, late.found) == (Sign.PROBLEM, "no answer within 0.1 s")
    assert other is good
    pipe.open("w").close()


def test_item_names_fit_their_column() -> None:
    assert max(len(check.item) for check in run_checks.checks()) == run_checks.ITEM_WIDTH


def test_a_child_that_takes_too_long_is_killed_with_its_children() -> None:
    said = ask(["sh", "-c", "echo started; sleep 600 & sleep 600"], 0.5)
    assert said == ("started\n", "timed out after 0.5 s and was killed")


def test_a_missing_program_is_reported() -> None:
    assert ask(["/gone/bin/python"], 1.0).trouble == "/gone/bin/python can't be run: No such file or directory"
