"""Shell scripts that the launcher runs on a host."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

__all__ = ["FOLLOW", "KILL", "PROBE", "SHELL", "START", "VERSION", "quoted"]

# Any login shell understands this command; it reads the actual script as one line.
SHELL = """exec /bin/sh -c 'IFS= read -r s; eval "$s"'"""

START = (
    "exec 3<&0 </dev/null 2>&1;"
    ' d=$(umask 077; mktemp -d "${{TMPDIR:-/tmp}}/monarch-ssh-XXXXXX") || exit 1; : >"$d/log";'
    ' setsid {command} <&3 3<&- >>"$d/log" 2>&1 & a=$!; exec 3<&-; echo "MONARCH-SSH $a $d";'
    ' tail -n +1 -f "$d/log" 2>/dev/null & t=$!; trap "" PIPE;'  # the connection may be gone when the agent ends
    ' wait $a; e=$?; kill $t; s=$(tail -n 20 "$d/log"); rm -rf "$d"; echo; echo "MONARCH-END $e"; echo "$s"'
)
FOLLOW = (
    'a={pid}; d={directory}; echo "MONARCH-SSH $a $d"; tail -n 20 -f "$d/log" 2>/dev/null & t=$!;'
    ' while [ -d "$d" ] && kill -0 $a 2>/dev/null; do sleep 0.5; done; kill $t; echo; echo "MONARCH-END -"'
)
# The pid may belong to another process by now. The shell that waits for the agent removes the directory.
KILL = (
    "a={pid}; d={directory};"
    " is() {{ grep -q monarch_kernel /proc/$a/cmdline 2>/dev/null; }};"
    ' gone() {{ i=0; while is || [ -d "$d" ]; do [ $i -lt {tenths} ] || return 1; sleep 0.1; i=$((i+1)); done; }};'
    ' is && kill -TERM $a; gone || {{ is && kill -KILL $a; gone; }}; if is; then echo MONARCH-ALIVE; else rm -rf "$d"; fi'
)
PROBE = (
    "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).close(); print('MONARCH-HERE')"
)
VERSION = "import sys; print('%d.%d.%d' % sys.version_info[:3])"


def quoted(words: Sequence[str]) -> str:
    """Quote words for a shell; ``~/`` at the start of the first is the home directory on the host."""
    if words[0].startswith("~/"):
        return '"$HOME"/' + shlex.join([words[0][2:], *words[1:]])
    return shlex.join(words)
