"""The command line: ``python -m monarch_kernel install`` tells Jupyter about the kernel of this very interpreter.

A wheel already brings a kernelspec, but its ``python`` means the interpreter of the Jupyter server. Where the server
lives in another environment than the kernel, ``install`` writes one with the absolute path. Nothing here loads torch
or ipykernel, so that ``--help`` and ``--version`` answer at once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["install", "is_addressed", "main"]

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
        display_name: what a launcher shows; by default the template's, or ``name`` where that is not the default one.
        user: write below the user's home. With neither ``user`` nor ``prefix`` it is written for the whole machine.
        prefix: write below this folder, such as ``sys.prefix``.
        env: variables to set in the kernel's environment.

    Raises:
        ValueError: ``name`` is not a valid name of a kernel.
        OSError: the destination cannot be written.
    """
    from jupyter_client.kernelspec import KernelSpecManager

    if not name.strip("."):  # Jupyter's own check lets "" and ".." through, and would replace the folder they denote
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 could not be done, 2 asked wrongly."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        folder = install(
            options.name,
            display_name=options.display_name,
            user=options.user,
            prefix=options.prefix,
            env=dict(options.env),
        )
    except ValueError as error:
        return _fail(str(error), 2)
    except OSError as error:
        hint = "" if options.user or options.prefix else " (--user and --sys-prefix need no special rights)"
        return _fail(f"cannot write the kernelspec: {error}{hint}", 1)
    print(f"Installed kernelspec {folder.name} in {folder}")
    return 0


def _fail(text: str, code: int) -> int:
    print(f"monarch_kernel: error: {' '.join(text.split())}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m monarch_kernel",
        description="A Jupyter kernel that is the single controller of a cluster.",
        epilog="With -f CONNECTION_FILE, as Jupyter calls it, this is the kernel itself; its options: --help-all.",
    )
    parser.add_argument("--version", action="version", version=f"monarch_kernel {_version()}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")

    command = commands.add_parser(
        "install",
        help="tell Jupyter about the kernel of this interpreter",
        description="Write a kernelspec that starts the kernel with this interpreter. "
        "With none of --user, --sys-prefix and --prefix it is written for the whole machine.",
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
    place.add_argument("--prefix", metavar="P", help="below P/share/jupyter/kernels")
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
    return parser


def _version() -> str:
    try:
        return metadata.version("monarch_kernel")
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "(not installed)"
