"""Logging in to machines by SSH, as the user's own configuration says; and why that fails, in words."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import asyncssh

from monarch_kernel.launch.ssh.hostlist import Place

__all__ = ["Login", "LoginFailed", "Unreachable", "reason"]

_KEEPALIVE_S = 5.0

_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2", "/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")


class LoginFailed(Exception):
    """A machine can't be logged in to; the text says which, from where, and what to check."""


class Unreachable(LoginFailed):
    """Nobody answers there; another machine may do as well."""


class Login:
    """How to log in.

    Args:
        user: on hosts that name none; empty: as configured.
        port: of hosts that name none; 0: as configured.
        identity: file with the user's private key; empty: as configured.
        config: file that is read in place of ``~/.ssh/config``; empty: that.
        forward_agent: whether programs there may use the user's SSH agent; None: as configured.
        timeout_s: how long it may take.
    """

    def __init__(
        self,
        user: str,
        port: int,
        identity: str | os.PathLike[str],
        config: str | os.PathLike[str],
        forward_agent: bool | None,
        timeout_s: float,
    ) -> None:
        self._user = user
        self._port = port
        self._timeout_s = timeout_s
        self._options: dict[str, Any] = {"connect_timeout": timeout_s}
        if identity:
            self._options["client_keys"] = [str(Path(identity).expanduser())]
        if config:
            self._options["config"] = [str(Path(config).expanduser())]
        if forward_agent is not None:
            self._options["agent_forwarding"] = forward_agent

    async def connect(self, place: Place) -> asyncssh.SSHClientConnection:
        """Log in.

        Raises:
            LoginFailed: it does not work.
        """
        options = dict(self._options)
        if user := place.user or self._user:
            options["username"] = user
        if port := place.port or self._port:
            options["port"] = port
        who = f"{place} (from {socket.gethostname()})"
        try:
            settings = asyncssh.SSHClientConnectionOptions(host=place.host, **options)
        except (asyncssh.Error, OSError, ValueError) as error:
            raise LoginFailed(f"{who}: the SSH configuration can't be used: {reason(error)}") from error
        who = f"{place} ({_address(settings)}, from {socket.gethostname()})"
        known = _KnownHosts(settings.known_hosts)
        options["known_hosts"] = known
        if not settings.keepalive_interval:
            options["keepalive_interval"] = _KEEPALIVE_S
        by_hand = f"`ssh {_words(place, settings, self._options)} true`"
        try:
            return await self._connect(place, options, known)
        except asyncssh.PermissionDenied as error:
            raise LoginFailed(
                f"{who}: it lets {settings.username!r} in by none of the keys: check that {by_hand} works without a "
                "question (ssh-add for keys with a passphrase, IdentityFile and User in ~/.ssh/config, authorized_keys there)"
            ) from error
        except asyncssh.HostKeyNotVerifiable as error:
            if known.has_found:
                text = (
                    f"its host key is not the one in {known.names}: if the machine was set up anew, remove the old key "
                    f"(ssh-keygen -R {known.entry}); if not, somebody is in between"
                )
            else:
                text = f"its host key is not known ({known.names} has none): log in once with {by_hand}, and compare the key"
            raise LoginFailed(f"{who}: {text}") from error
        except asyncio.TimeoutError as error:
            raise Unreachable(
                f"{who}: no answer within {self._timeout_s:g} s: is it up, and do firewall and VPN let port "
                f"{settings.port} through?"
            ) from error
        except socket.gaierror as error:
            raise Unreachable(f"{who}: its name is not known here: check the spelling, and ~/.ssh/config") from error
        except ConnectionRefusedError as error:
            raise Unreachable(f"{who}: connection refused: is sshd running there, on port {settings.port}?") from error
        except (asyncssh.Error, OSError) as error:
            raise Unreachable(f"{who}: no connection: {reason(error)}: check that {by_hand} works") from error
        except ValueError as error:
            raise LoginFailed(f"{who}: the SSH configuration can't be used: {reason(error)}") from error

    async def _connect(self, place: Place, options: dict[str, Any], known: _KnownHosts) -> asyncssh.SSHClientConnection:
        try:
            return await asyncssh.connect(place.host, **options)
        except (asyncssh.PermissionDenied, asyncssh.HostKeyNotVerifiable):
            raise
        except (asyncssh.DisconnectError, ConnectionError):
            if not known.has_found:
                raise
            # A server that has no key of the kind that we know hangs up; so have it show the one that it has.
            return await asyncssh.connect(place.host, **options, server_host_key_algs="default")


class _KnownHosts:
    """Looks keys up, also in the files of the whole machine, which asyncssh leaves out; and tells whether there was any."""

    def __init__(self, files: Any) -> None:
        wanted = list(files) if files else list(_KNOWN_HOSTS)  # None, for no check at all, is not for us
        paths = [Path(str(name)).expanduser() for name in wanted]
        self._files = [str(path) for path in paths if path.is_file() and os.access(path, os.R_OK)]
        self.names = ", ".join(self._files) or str(wanted[0])
        self.has_found = False
        self.entry = ""

    def __call__(self, host: str, address: str, port: int | None) -> Any:
        self.entry = f"'[{host}]:{port}'" if port else host
        found = asyncssh.match_known_hosts(self._files or b"", host, address, port)
        self.has_found = bool(found[0] or found[1])
        return found


def reason(error: BaseException) -> str:
    """What an error of the connection says, or what kind it is."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return text or type(error).__name__


def _address(settings: asyncssh.SSHClientConnectionOptions) -> str:
    return f"{settings.username}@{settings.host}, port {settings.port}"


def _words(place: Place, settings: asyncssh.SSHClientConnectionOptions, options: dict[str, Any]) -> str:
    """What to write after ``ssh`` to log in by hand."""
    config = f"-F {options['config'][0]} " if "config" in options else ""
    port = f"-p {settings.port} " if settings.port != 22 else ""
    return f"{config}{port}{place.user + '@' if place.user else ''}{place.host}"
