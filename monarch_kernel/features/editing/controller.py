"""The controller's part of editing: sends the source of the user's modules to ranks, and reloads edited ones in its process.

Theory of operation
===================

An import that finds nothing on a rank sends `Fetch` and waits, on any thread. The controller answers `Fetched`, with the
text of the user's file, from a separate thread, since it reads the disk.

After an edit `Reshaped` tells all ranks which endpoints handles of an actor have now, and the kept `Spawn` takes the class
along (``Spawn.renewed``), so a process that is replaced later makes the actor with the edited class.
"""

from __future__ import annotations

import logging
from functools import partial

from monarch_kernel.features.editing.modules import LocalModules
from monarch_kernel.features.editing.sources import find_source
from monarch_kernel.net.transport.base import Peer
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import Fetch, Fetched, ModuleSource
from monarch_kernel.runtime.controller.effects import Effect, Later
from monarch_kernel.runtime.controller.extensions import Core, Extension, register
from monarch_kernel.runtime.controller.process_records import RankRecord
from monarch_kernel.runtime.rpc.requests import Send

__all__ = ["EditingExtension"]

_log = logging.getLogger(__name__)


@register
class EditingExtension(Extension):
    """Sends the source of modules to ranks that lack them.

    Attributes:
        modules: the user's modules in the controller's own process.
    """

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.modules = LocalModules()
        self.handlers = {Fetch: self._fetch}

    def _fetch(self, record: RankRecord, message: Fetch, now: float) -> list[Effect]:
        return [Later(partial(_find, record.peer, message))]


def _find(peer: Peer, message: Fetch) -> list[Effect]:
    source: ModuleSource | None = None
    try:
        source = find_source(message.name)
    except Exception:  # the rank's import waits for an answer in any case
        _log.exception("the source of module %r can't be read", message.name)
    return [Send(peer, pack(Fetched(message.turn, source)))]
