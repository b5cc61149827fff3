"""Parses lists of hosts: names, or a host file."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch_kernel.errors import LaunchError

__all__ = ["SshTarget", "read_hosts"]

_SLOTS = re.compile(r"(max_)?slots=\d+")


@dataclass(frozen=True)
class SshTarget:
    """A machine as the user wrote it: ``[user@]host[:port]``.

    Attributes:
        host: its name, as in ``~/.ssh/config``, or its address.
        user: the user; empty for the configured one.
        port: the port; 0 for the configured one.
    """

    host: str
    user: str = ""
    port: int = 0

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host and self.port else self.host
        return (f"{self.user}@" if self.user else "") + host + (f":{self.port}" if self.port else "")

    @classmethod
    def parse(cls, text: str) -> SshTarget:
        """Parse one host.

        Raises:
            ValueError: the text is not a host; the message says why.
        """
        user, _, rest = text.rpartition("@")
        bracketed = re.fullmatch(r"\[([^\]]+)\](?::(.*))?", rest)
        if bracketed:
            host, port = bracketed[1], bracketed[2]
        elif rest.count(":") == 1:
            host, _, port = rest.partition(":")
        else:  # a name, or an IPv6 address
            host, port = rest, None
        if not re.fullmatch(r"[\w:][\w.:%-]*", host) or not re.fullmatch(r"[^\s:/]*", user):
            raise ValueError(f"{text!r} is not a host: write [user@]host[:port]")
        if port is not None and not (re.fullmatch(r"[0-9]{1,5}", port) and 0 < int(port) < 65536):
            raise ValueError(f"{text!r}: {port!r} is not a port")
        return cls(host, user, int(port or 0))


def read_hosts(hosts: Sequence[str] | str | os.PathLike[str]) -> list[SshTarget]:
    """Read a list of hosts: names, ``"a,b,c"``, or the path of a host file.

    A host file has one host per line; ``#`` starts a comment; ``slots=N``, as in host files of MPI and DeepSpeed, is ignored. A
    text with a slash is a path, and so is the name of an existing file.

    Raises:
        LaunchError: the file does not exist, has no host, repeats a host, or has a line that can't be parsed; the text says
            where.
    """
    path: Path | None = None
    texts: list[tuple[str, list[str]]]
    if isinstance(hosts, os.PathLike) or (isinstance(hosts, str) and ("/" in hosts or os.path.isfile(hosts))):
        path = Path(hosts).expanduser()
        texts = [(f"{path}, line {i}", words) for i, words in enumerate(_words_of(path), 1)]
    else:
        names = hosts.split(",") if isinstance(hosts, str) else hosts
        texts = [("", name.split()) for name in names]
    found: dict[SshTarget, str] = {}
    for where, words in texts:
        if not words:
            continue
        at = f"{where}: " if where else ""
        more = " ".join(word for word in words[1:] if not _SLOTS.fullmatch(word))
        if more:
            raise LaunchError(f"{at}can't parse {more!r}: write one host per line, as [user@]host[:port]")
        try:
            place = SshTarget.parse(words[0])
        except ValueError as error:
            raise LaunchError(f"{at}{error}") from error
        if place in found:
            first = f", first in line {found[place].rpartition(' ')[2]}" if where else ""
            raise LaunchError(f"{at}{place} is in the list of hosts twice{first}; a host runs only one agent")
        found[place] = where
    if not found:
        raise LaunchError(
            f"there is no host in {path}" if path else "the list of hosts is empty: give names, or a host file"
        )
    return list(found)


def _words_of(path: Path) -> list[list[str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"can't read the host file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LaunchError(f"the host file {path} is not a text file") from error
    return [line.partition("#")[0].split() for line in text.splitlines()]
