"""The command line: ``monarch-kernel``, which is also ``python -m monarch_kernel``.

``install`` registers the kernel of this interpreter with Jupyter. A wheel already contains a kernelspec, but its ``python``
means the interpreter of the Jupyter server. Where the server lives in another environment than the kernel, ``install`` writes
one with the absolute path, and copies the JupyterLab extension to where that server looks for it. ``doctor`` checks whether
the package has everything it needs. This module loads neither torch nor ipykernel, so ``--help`` and ``--version`` are quick.
`__main__` adds the commands that need the notebook's side of the package.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from monarch_kernel.base import numbers

__all__ = ["Command", "install", "install_extension", "is_addressed", "main"]

DEFAULT_NAME = "monarch"
TEMPLATE = Path(__file__).parent / "kernelspec"


def is_addressed(argv: Sequence[str]) -> bool:
    """Tell whether arguments are for the command line rather than for the kernel.

    Args:
        argv: the arguments after ``python -m monarch_kernel``; Jupyter passes ``-f connection_file``.
    """
    return bool(argv) and (argv[0] in {"-h", "--help", "--version"} or not argv[0].startswith("-"))


def install(
    name: str = DEFAULT_NAME,
    *,
    display_name: str | None = None,
    user: bool = False,
    prefix: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Path:
    """Write a kernelspec that starts the kernel with this interpreter, and return its folder.

    Args:
        name: what ``jupyter --kernel`` calls it: ASCII letters, digits, ``-``, ``.`` and ``_``.
        display_name: what a launcher shows; by default the template's, or ``name`` if that is not the default.
        user: write below the user's home. With neither ``user`` nor ``prefix``, write for the whole machine.
        prefix: write below this folder, such as ``sys.prefix``.
        env: variables to set in the kernel's environment.

    Raises:
        ValueError: ``name`` is not a valid name of a kernel.
        OSError: the destination cannot be written.
    """
    from jupyter_client.kernelspec import KernelSpecManager

    if not name.strip("."):  # Jupyter's own check accepts "" and "..", and would replace the folder they denote
        raise ValueError(f"Invalid kernel name {name!r}.")
    spec: dict[str, Any] = json.loads((TEMPLATE / "kernel.json").read_text(encoding="utf-8"))
    spec["argv"][0] = sys.executable
    if display_name is not None or name != DEFAULT_NAME:
        spec["display_name"] = display_name if display_name is not None else name
    if env:
        spec["env"] = dict(env)
    with tempfile.TemporaryDirectory(prefix="monarch-install-") as scratch:
        source = Path(scratch) / "kernelspec"
        # Plain copies: a template in a read-only site-packages must not make the written one read-only.
        shutil.copytree(TEMPLATE, source, copy_function=shutil.copyfile)
        source.chmod(0o755)
        (source / "kernel.json").write_text(json.dumps(spec, indent=2) + "\n", encoding="utf-8")
        return Path(KernelSpecManager().install_kernel_spec(str(source), name, user=user, prefix=prefix))


def install_extension(data: Path) -> Path | None:
    """Copy the JupyterLab extension of this package into a data folder of Jupyter.

    Returns:
        Its folder there, even if that is where it was installed; None if this package was installed without it.

    Raises:
        OSError: the destination cannot be written.
    """
    from monarch_kernel.doctor.jupyter import LAB_EXTENSION

    try:
        files = metadata.files("monarch_kernel") or []
    except metadata.PackageNotFoundError:
        return None
    markers = [Path(str(file.locate())) for file in files if file.parts[-2:] == (LAB_EXTENSION, "install.json")]
    if not markers or not markers[0].exists():
        return None
    source, target = markers[0].resolve().parent, data / "labextensions" / LAB_EXTENSION
    if target.resolve() != source:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target, copy_function=shutil.copyfile)
    return target


class Command(NamedTuple):
    """A further command.

    Attributes:
        add: adds its parser to the parsers of commands.
        run: runs it, and returns the exit code.
    """

    add: Callable[[Any], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None, more: Mapping[str, Command] | None = None) -> int:
    """Run the command line and return its exit code: 0 for success, 1 for a failure, 2 for wrong arguments.

    Args:
        argv: the arguments; those of the process by default.
        more: further commands, by name.
    """
    further = more or {}
    parser = _parser(further.values())
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return 0
    if options.command in further:
        return _guarded(further[options.command].run, options)
    if options.command == "record":
        return _guarded(_record, options)
    return _doctor(options) if options.command == "doctor" else _guarded(_install, options)


def _record(options: argparse.Namespace) -> int:
    from monarch_kernel.train.record.commands import run

    return run(options)


def _guarded(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a command, and print our errors, and that a package is missing, in one line."""
    from monarch_kernel.errors import MonarchError

    try:
        return run(options)
    except MonarchError as error:
        return _fail(str(error), 1)
    except ModuleNotFoundError as error:
        return _fail(f"{error}: {_prog()} doctor says what to install", 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # the reader has closed the pipe: write nothing at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _install(options: argparse.Namespace) -> int:
    try:
        folder = install(
            options.name,
            display_name=options.display_name,
            user=options.user,
            prefix=options.prefix,
            env=dict(options.env),
        )
        extension = install_extension(folder.parent.parent)
    except ValueError as error:
        return _fail(str(error), 2)
    except OSError as error:
        hint = "" if options.user or options.prefix else " (--user and --sys-prefix need no special rights)"
        return _fail(f"cannot write what Jupyter needs: {error}{hint}", 1)
    print(f"Installed kernelspec {folder.name} in {folder}")
    if extension is not None:
        print(f"Installed the JupyterLab extension in {extension}")
    else:
        print("This package was installed without the JupyterLab extension (there was no node): no panel, no menu")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from monarch_kernel.doctor.report import as_json, exit_code, finding_text, summary
    from monarch_kernel.doctor.run_checks import ITEM_WIDTH, checks, examine

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack a sign; the word is beside it
    width = min(120, shutil.get_terminal_size((100, 24)).columns)
    findings = []
    try:
        for finding in examine(checks(quick=options.quick)):
            findings.append(finding)
            if not options.json:
                print(finding_text(finding, ITEM_WIDTH, width), flush=True)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # the reader has closed the pipe: write nothing at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if options.json:
        print(json.dumps(as_json(findings, _version()), indent=2))
    else:
        print(f"\n{summary(findings)}")
    return exit_code(findings)


def _fail(text: str, code: int) -> int:
    print(f"monarch_kernel: error: {' '.join(text.split())}", file=sys.stderr)
    return code


def _parser(more: Iterable[Command]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_prog(),
        description="A Jupyter kernel that is the single controller of a cluster.",
        epilog="With -f CONNECTION_FILE, as Jupyter calls it, this is the kernel itself; its options: --help-all.",
    )
    parser.add_argument("--version", action="version", version=f"monarch_kernel {_version()}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")

    command = commands.add_parser(
        "install",
        help="register the kernel of this interpreter with Jupyter",
        description="Write a kernelspec that starts the kernel with this interpreter, and copy the JupyterLab extension. "
        "With none of --user, --sys-prefix and --prefix, the destination is the whole machine.",
    )
    place = command.add_mutually_exclusive_group()
    place.add_argument("--user", action="store_true", help="for the current user")
    place.add_argument(
        "--sys-prefix",
        action="store_const",
        const=sys.prefix,
        dest="prefix",
        help="in this interpreter's environment; short for --prefix %(const)s",
    )
    place.add_argument("--prefix", metavar="P", type=_folder, help="below P/share/jupyter")
    command.add_argument("--name", metavar="N", default=DEFAULT_NAME, help="name of the kernelspec (%(default)s)")
    command.add_argument("--display-name", metavar="D", help="the name that a launcher shows")
    command.add_argument(
        "--env",
        nargs=2,
        action="append",
        default=[],
        metavar=("K", "V"),
        help="set a variable in the kernel's environment; may be repeated",
    )

    command = commands.add_parser(
        "doctor",
        help="check whether the kernel has everything it needs, and say what to do if not",
        description="Check this interpreter, this machine and Jupyter, and say for each item what was found, whether it is "
        "good, and what to do if it is not. The exit code is 1 if there is a problem; warnings allow 0.",
    )
    command.add_argument("--quick", action="store_true", help="do not bring a rank up, which takes seconds")
    command.add_argument("--json", action="store_true", help="print JSON, for other programs")
    _add_record(commands)
    for each in more:
        each.add(commands)
    return parser


def _add_record(commands: Any) -> None:
    command = commands.add_parser(
        "record",
        help="show, compare, repeat or export the record of a run",
        description="A run record is the folder that `%%mesh record FOLDER` has written.",
    )
    actions = command.add_subparsers(dest="action", title="actions", metavar="ACTION", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        action: argparse.ArgumentParser = actions.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}."
        )
        action.add_argument("run", metavar="RUN", help="the folder of the record")
        return action

    add("show", "show what a record holds").add_argument("--json", action="store_true", help="print JSON")
    diff = add("diff", "compare two records; the exit code is 1 if they differ")
    diff.add_argument("other", metavar="RUN", help="the folder of the other record")
    replay = add(
        "replay", "run the cells of a record again on new ranks, and compare; the exit code is 1 if results differ"
    )
    replay.add_argument("--until-step", type=numbers.count, metavar="N", help="end each loop before this step")
    replay.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="the devices (%(default)s)")
    export = add("export", "write what ran as a program, a notebook or a table, or describe the folder as an RO-Crate")
    export.add_argument(
        "to", metavar="FILE", help="a file that ends in .py, .ipynb or .parquet; or ro-crate-metadata.json"
    )
    export.add_argument("--table", default="metrics", metavar="NAME", help="the table, for .parquet (%(default)s)")
    export.add_argument("--license", default="", metavar="URL", help="the licence of the run, for the RO-Crate")
    send = add("send", "send the metrics and knobs to an experiment tracker, as one run")
    send.add_argument("to", metavar="TRACKER", help="wandb, mlflow or trackio")
    send.add_argument("option", nargs="*", metavar="NAME=VALUE", help="an option of the tracker, such as project=gpt")
    for each in (replay, export):
        each.add_argument("--mesh", default="", metavar="NAME", help="the mesh, if the record has several")


def _folder(text: str) -> str:
    if not text:  # such as an unset variable; for Jupyter that means the whole machine
        raise argparse.ArgumentTypeError("an empty name is not a folder")
    return text


def _prog() -> str:
    """Return the name of the command: the console script, or the module."""
    name = Path(sys.argv[0]).name
    return name if name == "monarch-kernel" else "python -m monarch_kernel"


def _version() -> str:
    try:
        return metadata.version("monarch_kernel")
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "(not installed)"
