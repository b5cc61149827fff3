"""The wheel brings the kernel to Jupyter, and ``python -m monarch_kernel install`` does for another environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from monarch_kernel import cli
from monarch_kernel.doctor.jupyter import LAB_EXTENSION

ROOT = Path(__file__).parents[1]
LOGOS = {"logo-32x32.png", "logo-64x64.png", "logo-svg.svg"}

CODE = "import sys; sys.path = [path for path in sys.path if path]; from monarch_kernel.__main__ import main; sys.exit(main())"
ARGUMENTS = ["-Xfrozen_modules=off", "-c", CODE, "-f", "{connection_file}"]


def _python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment},
    )


def _install(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return _python("-m", "monarch_kernel", "install", *arguments, **environment)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run = _python("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT))
    assert run.returncode == 0, run.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix with the installed wheel."""
    folder = tmp_path_factory.mktemp("site")
    run = _python(
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-compile",
        "--ignore-installed",
        "--prefix",
        str(folder),
        str(wheel),
    )
    assert run.returncode == 0, run.stderr
    return folder


def _with(site: Path) -> dict[str, str]:
    """Environment variables that make Python import the package from this prefix."""
    return {"PYTHONPATH": sysconfig.get_path("purelib", vars={"base": str(site)}), "PYTHONSAFEPATH": "1"}


def test_the_wheel_has_the_expected_files(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    data = "/data/share/jupyter/kernels/monarch/"
    assert {name.partition(data)[2] for name in names if data in name} == LOGOS | {"kernel.json"}
    assert {"monarch_kernel/py.typed", "monarch_kernel/kernelspec/kernel.json"} <= set(names)
    assert {name.split("/")[0] for name in names} == {
        "monarch_kernel",
        "monarch_kernel-0.1.0.data",
        "monarch_kernel-0.1.0.dist-info",
    }
    assert not [name for name in names if "test_" in name or name.endswith((".pyc", ".ipynb"))]


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    # A pattern of .gitignore that matches too much would silently leave out a module.
    package = ROOT / "monarch_kernel"
    files = {
        str(path.relative_to(ROOT))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }
    assert files <= set(zipfile.ZipFile(wheel).namelist())


def test_jupyter_finds_the_kernel_of_an_installed_wheel(site: Path) -> None:
    run = _python("-m", "jupyter", "kernelspec", "list", "--json", JUPYTER_PATH=str(site / "share" / "jupyter"))
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)["kernelspecs"]["monarch"]
    assert Path(found["resource_dir"]) == site / "share" / "jupyter" / "kernels" / "monarch"
    assert found["spec"]["argv"][1:] == ARGUMENTS
    assert found["spec"]["language"] == "python"
    assert found["spec"]["interrupt_mode"] == "signal"
    assert found["spec"]["metadata"]["debugger"] is True


def test_an_installed_wheel_can_write_a_kernelspec(site: Path, tmp_path: Path) -> None:
    run = _install("--prefix", str(tmp_path), **_with(site))
    assert run.returncode == 0, run.stderr
    folder = tmp_path / "share" / "jupyter" / "kernels" / "monarch"
    assert {path.name for path in folder.iterdir()} == LOGOS | {"kernel.json"}


def test_an_installed_wheel_has_a_command(site: Path) -> None:
    environment = _with(site)
    for arguments in (["--version"], ["doctor", "--help"]):
        run = _python(str(site / "bin" / "monarch-kernel"), *arguments, **environment)
        assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("usage: monarch-kernel doctor [-h] [--quick] [--json]")


def test_install_writes_the_absolute_interpreter(tmp_path: Path) -> None:
    arguments = ["--name", "x", "--display-name", "A y", "--env", "A", "1", "--env", "B", "two words"]
    run = _install("--prefix", str(tmp_path), *arguments)
    assert run.returncode == 0, run.stderr
    folder = tmp_path / "share" / "jupyter" / "kernels" / "x"
    assert run.stdout.startswith(f"Installed kernelspec x in {folder}\n")
    spec = json.loads((folder / "kernel.json").read_text())
    assert spec["argv"] == [sys.executable, *ARGUMENTS]
    assert spec["display_name"] == "A y"
    assert spec["env"] == {"A": "1", "B": "two words"}
    assert spec["interrupt_mode"] == "signal"
    for logo in LOGOS:
        assert (folder / logo).read_bytes() == (cli.TEMPLATE / logo).read_bytes()


def test_a_second_install_replaces_the_first(tmp_path: Path) -> None:
    cli.install("x", prefix=str(tmp_path), display_name="first")
    folder = cli.install("x", prefix=str(tmp_path))
    spec = json.loads((folder / "kernel.json").read_text())
    assert spec["display_name"] == "x"  # a launcher would show two entries with the same name
    assert "env" not in spec


def test_an_installed_wheel_brings_the_extension_to_another_environment(site: Path, tmp_path: Path) -> None:
    came = site / "share" / "jupyter" / "labextensions" / LAB_EXTENSION
    there = tmp_path / "share" / "jupyter" / "labextensions" / LAB_EXTENSION
    run = _install("--prefix", str(tmp_path), **_with(site))
    if not came.exists():
        assert "without the JupyterLab extension" in run.stdout
        assert not there.exists()
        return
    assert f"Installed the JupyterLab extension in {there}\n" in run.stdout
    for _ in range(2):
        assert _tree(there) == _tree(came)
        (there / "old.js").touch()
        run = _install("--prefix", str(tmp_path), **_with(site))
    run = _install("--prefix", str(site), **_with(site))
    assert run.returncode == 0, run.stderr
    assert _tree(there) == _tree(came)  # an installation onto itself changes nothing


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_install_for_the_user(tmp_path: Path) -> None:
    run = _install("--user", JUPYTER_DATA_DIR=str(tmp_path))
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "kernels" / "monarch" / "kernel.json").exists()


@pytest.mark.parametrize("name", ["a b", "a/b", "ä", "..", ".", ""])
def test_a_bad_name_is_one_line_and_writes_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["install", "--prefix", str(tmp_path), "--name", name]) == 2
    error = capsys.readouterr().err
    assert error.startswith("monarch_kernel: error: Invalid kernel name")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_prefix_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    assert cli.main(["install", "--prefix", str(file)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("monarch_kernel: error: cannot write what Jupyter needs: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["nonsense"], 2),
        (["install", "--nonsense"], 2),
        (["install", "--user", "--prefix", "x"], 2),
        (["install", "--env", "A"], 2),
        (["install", "--prefix", ""], 2),
        (["doctor", "--nonsense"], 2),
        (["--version"], 0),
        (["--help"], 0),
    ],
)
def test_usage(argv: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.is_addressed(argv)
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == code
    out, err = capsys.readouterr()
    assert bool(out) == (code == 0)
    assert bool(err) == (code != 0)


@pytest.mark.parametrize("argv", [[], ["-f", "connection.json"], ["--help-all"], ["--IPKernelApp.log_level=10"]])
def test_arguments_of_jupyter_go_to_the_kernel(argv: list[str]) -> None:
    assert not cli.is_addressed(argv)


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_version_and_help_need_no_heavy_imports(option: str) -> None:
    run = _python("-X", "importtime", "-m", "monarch_kernel", option)
    assert run.returncode == 0
    assert "monarch_kernel" in run.stdout
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in run.stderr.splitlines()}
    assert "argparse" in loaded
    assert not loaded & {"torch", "ipykernel", "IPython", "jupyter_client"}
