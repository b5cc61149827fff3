"""Run the tests of torchmonarch and TorchStore through the alias: ``make test-conformance``.

The wheel of torchmonarch has the tests of Monarch. They are fetched, run, and compared with ``differences.txt``, which says for
each test that fails why it may; ``left_out.txt`` says why the other modules are not run. No code of theirs is kept here.
TorchStore's package on PyPI is older than Monarch 0.7, which refuses its actors; so its tests run from a checkout, which
`TORCHSTORE` names.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from tests.integrations.monarch.upstream.path.upstream_placeholders import FORKS, LIMIT, MARK
from tests.support.results import Results, read

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[4]
BUILD = ROOT / "build" / "conformance"
PACKAGE = "torchmonarch==0.7.0"
HELPERS = ("pytest-asyncio", "pygtrie", "portpicker", "pytest-unordered")
MONARCH = (
    "test_actor_error", "test_actor_logging", "test_actor_shape", "test_concurrent_endpoints", "test_config",
    "test_controller_dedup", "test_cookbook", "test_failure_introspection", "test_future_characterization", "test_host_mesh",
    "test_inter_mesh_ping_pong", "test_job", "test_mesh_trait", "test_port_forward", "test_proc_mesh", "test_python_actors",
    "test_rdma", "test_rdma_action", "test_rdma_characterize", "test_rdma_cpu_no_torch",
    "test_receive_ownership_characterization", "test_returns_future", "test_shell", "test_spmd", "test_supervision_hierarchy",
    "test_sync_actor_driver", "test_telemetry_attributes", "test_value_mesh_compression_scheme", "test_worker_fork_contract",
    "_monarch/test_hyperactor", "_monarch/test_ndslice",
)  # fmt: skip
PRIVATE = r"has no attribute '_[a-z]|does not have the attribute '_[a-z]|unexpected keyword argument '_[a-z]|'_Private'"
"""The text of an error of a test that uses a private attribute of a public class, or computes with a private name."""
TORCHSTORE = ("test_keys", "test_tensor_slice", "test_store", "test_shared_memory")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.integrations.monarch.upstream", description=__doc__)
    parser.add_argument("--torchstore", type=Path, help="a checkout of TorchStore, whose tests run instead")
    parser.add_argument("--forks", action="store_true", help="start ranks as forks that have torch, which is faster")
    parser.add_argument(
        "--limit", type=int, metavar="SECONDS", help="end a test after so long; by default 90, and 600 for TorchStore, one of "
        "whose tests starts 66 processes"
    )  # fmt: skip
    parser.add_argument(
        "modules", nargs="*", help="names of test modules; by default those of the table in docs/monarch.md"
    )
    options, rest = parser.parse_known_args()
    os.environ[FORKS] = "yes" if options.forks else ""
    os.environ[LIMIT] = str(options.limit or (600 if options.torchstore else 90))
    BUILD.mkdir(parents=True, exist_ok=True)
    if options.torchstore:
        source = options.torchstore.absolute()
        paths = [source, *helpers()]
        modules = options.modules or TORCHSTORE
        name = "torchstore"
    else:
        source = torchmonarch()
        paths = [source / "tests", *helpers()]
        modules = options.modules or MONARCH
        name = "monarch"
    failures = 0
    if name == "monarch" and not options.modules and (unknown := unaccounted(source / "tests")):
        print(f"neither run nor in left_out.txt: {', '.join(unknown)}", flush=True)
        failures += len(unknown)
    for module in modules:
        results = run(source, f"tests/{module}.py", paths, rest)
        text, unexpected = report(f"{name}/{module}", results, differences())
        print(text, flush=True)
        failures += unexpected
    return int(failures > 0)


def torchmonarch() -> Path:
    """Fetch the tests of Monarch, and return their folder."""
    target = BUILD / PACKAGE
    if not target.is_dir():
        fetch = ["download", "--quiet", "--no-deps", "--dest", str(BUILD), PACKAGE]
        subprocess.run([sys.executable, "-m", "pip", *fetch], check=True)
        (wheel,) = BUILD.glob("torchmonarch-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target, [name for name in archive.namelist() if name.startswith("tests/")])
        wheel.unlink()
    return target


def helpers() -> list[Path]:
    """Fetch what the tests import, into a folder apart from this environment."""
    target = BUILD / "site"
    if not target.is_dir():
        install = ["install", "--quiet", "--no-deps", "--target", str(target), *HELPERS]
        subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    return [target]


def run(source: Path, module: str, paths: Sequence[Path], rest: Sequence[str]) -> Results:
    """Run a test module of others."""
    log = BUILD / f"{Path(module).stem}.jsonl"
    log.unlink(missing_ok=True)
    path = os.pathsep.join(map(str, [HERE / "path", ROOT, *paths]))
    given = ["-q", "-p", "upstream_plugin", "-p", "no:cacheprovider", "--noconftest"]
    given += ["-o", "asyncio_mode=auto", "-c", os.devnull, f"--rootdir={source}", f"--report-log={log}", *rest, module]
    with (BUILD / f"{Path(module).stem}.txt").open("w") as output:
        subprocess.run(
            [sys.executable, "-m", "pytest", *given],
            cwd=source,
            env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=False,
        )
    return read(log)


def unaccounted(tests: Path) -> list[str]:
    """Return the names of test modules that are not run, without a reason."""
    found = sorted(str(path.relative_to(tests).with_suffix("")) for path in tests.rglob("test_*.py"))
    known = [*MONARCH, *(pattern for pattern, _ in left_out())]
    return [name for name in found if not any(fnmatchcase(name, pattern) for pattern in known)]


def left_out() -> list[tuple[str, str]]:
    """Return a pattern of names and a reason for each test module that is not run."""
    return _reasons("left_out.txt")


def differences() -> list[tuple[str, str]]:
    """Return a pattern of test names and a reason for each known difference."""
    return _reasons("differences.txt")


def _reasons(file: str) -> list[tuple[str, str]]:
    lines = (HERE / file).read_text(encoding="utf-8").splitlines()
    return [
        (match[1], match[2])
        for line in lines
        if (match := re.match(r"(\S+)\s+(.+)", line)) and not line.startswith("#")
    ]


def report(name: str, results: Results, known: Iterable[tuple[str, str]]) -> tuple[str, int]:
    """Summarize a run, and count the failures without a known reason."""
    reasons: Counter[str] = Counter()
    lines = []
    private = 0
    known = list(known)
    for test, text in results.failed.items():
        short = f"{name}::{test.partition('::')[2]}"
        reason = next((reason for pattern, reason in known if fnmatchcase(short, pattern)), "")
        if MARK in text or re.search(PRIVATE, text):
            private += 1
        elif reason:
            reasons[reason] += 1
        else:
            lines.append(f"    {short}: {(text.strip().splitlines() or ['?'])[-1][:160]}")
    skipped_for_names = sum(MARK in text for text in results.skipped.values())
    private += skipped_for_names
    skipped = len(results.skipped) - skipped_for_names
    head = (
        f"{name}: {len(results.passed)} pass, {len(lines)} fail, {sum(reasons.values())} differ on purpose, "
        f"{private} use private names, {skipped} skip themselves{'' if results.is_complete else '; THE RUN DID NOT END'}"
    )
    return "\n".join([head, *lines]), len(lines) + (not results.is_complete)


if __name__ == "__main__":
    raise SystemExit(main())
