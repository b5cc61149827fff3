"""Where this process shows output: in a notebook's page, in a terminal, or in a file."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["shows_all_output"]


def shows_all_output() -> bool:
    """Whether all output of ranks is shown: in a script, and where stdout is a file or a pipe.

    The page of a notebook, and an interactive IPython in a terminal, show a flood in part: nobody could read it, and a
    Jupyter server drops messages above its limit.
    """
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return True
    return getattr(shell, "kernel", None) is None and not (sys.stdout is not None and sys.stdout.isatty())
