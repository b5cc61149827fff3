"""``python -m monarch_kernel``: run the kernel (what Jupyter does), or a subcommand of the command line."""

from __future__ import annotations

import sys

# ``python -m`` puts the working directory first on the path, so a notebook's own ``types.py`` or ``torch.py`` would be imported
# in place of the library, also by the imports below. IPython puts the directory back before the first cell runs.
if __name__ == "__main__" and sys.path and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

from monarch_kernel import cli

__all__ = ["main"]


def main() -> int:
    """Run the command line when it is addressed, else the kernel; return the exit code."""
    if cli.is_addressed(sys.argv[1:]):
        from monarch_kernel.notebook.clients.command_line import add_mcp, add_mesh, run_mcp, run_mesh

        return cli.main(sys.argv[1:], {"mesh": cli.Command(add_mesh, run_mesh), "mcp": cli.Command(add_mcp, run_mcp)})

    from monarch_kernel.notebook.kernel.app import main as run_kernel

    sys.argv[0] = (
        "notebook"  # the name of the program in the texts of argparse in cells, where the kernel's own says nothing
    )
    run_kernel()
    return 0


if __name__ == "__main__":
    sys.exit(main())
