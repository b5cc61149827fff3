"""Names of Monarch's transport, as values: the transport of this product needs no choice."""

from __future__ import annotations

import enum
import re
import secrets
from dataclasses import dataclass

__all__ = ["BindSpec", "ChannelTransport", "ProcId", "Uid", "enable_transport"]


class ChannelTransport(enum.Enum):
    """The transports of Monarch."""

    TcpWithLocalhost = "tcp(localhost)"
    TcpWithHostname = "tcp(hostname)"
    MetaTlsWithHostname = "metatls(hostname)"
    MetaTlsWithIpV6 = "metatls(ipv6)"
    MetaQuicWithHostname = "metaquic(hostname)"
    MetaQuicWithIpV6 = "metaquic(ipv6)"
    Tls = "tls"
    Quic = "quic"
    Local = "local"
    Unix = "unix"

    def get(self) -> ChannelTransport:
        """Return the transport itself."""
        return self


_BY_SCHEME = {
    "tcp": ChannelTransport.TcpWithHostname,
    "metatls": ChannelTransport.MetaTlsWithIpV6,
    "metatls-hostname": ChannelTransport.MetaTlsWithHostname,
    "metaquic": ChannelTransport.MetaQuicWithIpV6,
    "metaquic-hostname": ChannelTransport.MetaQuicWithHostname,
    "tls": ChannelTransport.Tls,
    "quic": ChannelTransport.Quic,
    "local": ChannelTransport.Local,
    "inproc": ChannelTransport.Local,
    "ipc": ChannelTransport.Unix,
    "unix": ChannelTransport.Unix,
}


class BindSpec:
    """A transport, or the address at which a process listens.

    Raises:
        TypeError: it is neither a transport nor a text.
        ValueError: the text is neither the name of a transport nor an address.
    """

    def __init__(self, spec: ChannelTransport | str) -> None:
        if isinstance(spec, str):
            scheme, _, rest = spec.partition("://")
            if scheme not in _BY_SCHEME or ("://" in spec and not rest):
                raise ValueError(
                    f"unknown transport {spec!r}; give one of {', '.join(_BY_SCHEME)}, or an address such as tcp://host:1234"
                )
            spec = spec if rest else _BY_SCHEME[scheme]
        elif not isinstance(spec, ChannelTransport):
            raise TypeError(f"a transport is a ChannelTransport or a text, not {spec!r}")
        self.spec = spec

    def __eq__(self, other: object) -> bool:
        return self.spec == other.spec if isinstance(other, BindSpec) else self.spec == other

    def __hash__(self) -> int:
        return hash(self.spec)

    def __str__(self) -> str:
        return self.spec if isinstance(self.spec, str) else self.spec.value

    def __repr__(self) -> str:
        return f"BindSpec({self.spec!r})"


def enable_transport(transport: ChannelTransport | str) -> None:
    """Accept a transport: processes of a machine use memory and local sockets, and machines use encrypted TCP.

    Raises:
        TypeError: it is neither a transport nor a text.
        ValueError: the transport is unknown.
    """
    BindSpec(transport.partition("@")[0] if isinstance(transport, str) else transport)


@dataclass(frozen=True)
class Uid:
    """An identifier: a name that occurs once (``singleton``), or a number, maybe with a name (``instance``).

    Attributes:
        label: the name; None for a number without one.
        number: the number; 0 for a name that occurs once.
    """

    label: str | None
    number: int = 0

    @classmethod
    def singleton(cls, label: str) -> Uid:
        """Return the identifier of what exists once."""
        return cls(label)

    @classmethod
    def instance(cls, label: str | None = None) -> Uid:
        """Return a new identifier."""
        return cls(label, secrets.randbits(63) | 1)

    @classmethod
    def anonymous(cls) -> Uid:
        """Return a new identifier without a name."""
        return cls.instance()

    @classmethod
    def instance_from_value(cls, value: int, label: str | None = None) -> Uid:
        """Return the identifier with this number.

        Raises:
            ValueError: the number is less than 1.
        """
        if value < 1:
            raise ValueError(f"the number must be at least 1, not {value}")
        return cls(label, value)

    @classmethod
    def from_string(cls, uid: str) -> Uid:
        """Return the identifier that has this text: ``name``, ``<number>`` or ``name<number>``, with a hexadecimal number.

        Raises:
            ValueError: no identifier has it.
        """
        found = _UID.fullmatch(uid)
        if found is None:
            raise ValueError(f"{uid!r} is no identifier, such as 'service' or 'service<2a>'")
        return cls(found[1] or None, int(found[2] or "0", 16))

    @property
    def is_instance(self) -> bool:
        """Whether it has a number."""
        return self.number > 0

    @property
    def is_singleton(self) -> bool:
        """Whether it is a name that occurs once."""
        return not self.is_instance

    @property
    def instance_value(self) -> int | None:
        """The number; None if it has none."""
        return self.number or None

    def __str__(self) -> str:
        return f"{self.label or ''}<{self.number:x}>" if self.number else str(self.label)


@dataclass(frozen=True)
class ProcId:
    """The identifier of a process."""

    uid: Uid

    @classmethod
    def from_string(cls, proc_id: str) -> ProcId:
        """Return the identifier that has this text; the errors are those of `Uid.from_string`."""
        return cls(Uid.from_string(proc_id))

    @property
    def label(self) -> str | None:
        """The name of the process, if it has one."""
        return self.uid.label

    def __str__(self) -> str:
        return str(self.uid)


_UID = re.compile(r"(?!$)([^<>]*)(?:<([0-9a-f]+)>)?")
