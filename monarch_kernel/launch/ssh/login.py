"""Logs in to machines with the user's SSH configuration, and says why a login failed."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import asyncssh

from monarch_kernel.launch.ssh.hostlist import SshTarget

__all__ = ["Login", "LoginFailed", "MachineUnreachable", "reason"]

_KEEPALIVE_S = 5.0

_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2", "/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")


class LoginFailed(Exception):
    """A login failed; the text names both machines, and says what to check."""


class MachineUnreachable(LoginFailed):
    """A machine can't be reached; the launcher may use another one."""


class Login:
    """Logs in to hosts.

    Args:
        user: user on hosts that name none; empty for the configured one.
        port: port of hosts that name none; 0 for the configured one.
        identity: file with the user's private key; empty for the configured one.
        config: configuration file; empty for ``~/.ssh/config``.
        forward_agent: whether programs on the hosts may use the user's SSH agent; None for the configured value.
        timeout_s: how long a login may take, in seconds.
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

    async def connect(self, place: SshTarget) -> asyncssh.SSHClientConnection:
        """Log in.

        Raises:
            LoginFailed: the login failed.
        """
        options = dict(self._options)
        if user := place.user or self._user:
            options["username"] = user
        if port := place.port or self._port:
            options["port"] = port
        subject = f"{place} (from {socket.gethostname()})"
        try:
            settings = asyncssh.SSHClientConnectionOptions(host=place.host, **options)
        except (asyncssh.Error, OSError, ValueError) as error:
            raise LoginFailed(f"{subject}: the SSH configuration is not valid: {reason(error)}") from error
        subject = f"{place} ({_address(settings)}, from {socket.gethostname()})"
        known = _KnownHosts(settings.known_hosts)
        options["known_hosts"] = known
        if not settings.keepalive_interval:
            options["keepalive_interval"] = _KEEPALIVE_S
        by_hand = f"`ssh {_words(place, settings, self._options)} true`"
        try:
            return await self._connect(place, options, known)
        except asyncssh.PermissionDenied as error:
            raise LoginFailed(
                f"{subject}: it refused all keys of user {settings.username!r}: check that {by_hand} works without a prompt "
                "(ssh-add for keys with a passphrase, IdentityFile and User in ~/.ssh/config, authorized_keys on the host)"
            ) from error
        except asyncssh.HostKeyNotVerifiable as error:
            if known.has_found:
                text = (
                    f"its host key differs from the one in {known.names}: if the machine was reinstalled, remove the old key "
                    f"(ssh-keygen -R {known.entry}); if not, someone may be intercepting the connection"
                )
            else:
                text = (
                    f"its host key is unknown ({known.names} has none): log in once with {by_hand}, and compare the key"
                )
            raise LoginFailed(f"{subject}: {text}") from error
        except asyncio.TimeoutError as error:
            raise MachineUnreachable(
                f"{subject}: timed out after {self._timeout_s:g} s: is it up, and do firewall and VPN let port "
                f"{settings.port} through?"
            ) from error
        except socket.gaierror as error:
            raise MachineUnreachable(
                f"{subject}: can't resolve its name: check the spelling, and ~/.ssh/config"
            ) from error
        except ConnectionRefusedError as error:
            raise MachineUnreachable(
                f"{subject}: connection refused: is sshd running on port {settings.port}?"
            ) from error
        except (asyncssh.Error, OSError) as error:
            raise MachineUnreachable(
                f"{subject}: connection failed: {reason(error)}: check that {by_hand} works"
            ) from error
        except ValueError as error:
            raise LoginFailed(f"{subject}: the SSH configuration is not valid: {reason(error)}") from error

    async def _connect(
        self, place: SshTarget, options: dict[str, Any], known: _KnownHosts
    ) -> asyncssh.SSHClientConnection:
        try:
            return await asyncssh.connect(place.host, **options)
        except (asyncssh.PermissionDenied, asyncssh.HostKeyNotVerifiable):
            raise
        except (asyncssh.DisconnectError, ConnectionError):
            if not known.has_found:
                raise
            # A server hangs up if it has no host key of a type in known_hosts. Accept any type, to report the mismatch.
            return await asyncssh.connect(place.host, **options, server_host_key_algs="default")


class _KnownHosts:
    """Looks up host keys, also in the system-wide files, which asyncssh ignores; records whether it found any."""

    def __init__(self, files: Any) -> None:
        wanted = list(files) if files else list(_KNOWN_HOSTS)  # None would disable the check
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
    """Format an error of the connection; its type if it has no text."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return text or type(error).__name__


def _address(settings: asyncssh.SSHClientConnectionOptions) -> str:
    return f"{settings.username}@{settings.host}, port {settings.port}"


def _words(place: SshTarget, settings: asyncssh.SSHClientConnectionOptions, options: dict[str, Any]) -> str:
    """Return the arguments of ``ssh`` to log in by hand."""
    config = f"-F {options['config'][0]} " if "config" in options else ""
    port = f"-p {settings.port} " if settings.port != 22 else ""
    return f"{config}{port}{place.user + '@' if place.user else ''}{place.host}"
