"""Questions about the namespace of a rank: completion and inspection, answered whatever the rank runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from monarch_kernel.net.wire.codec import Frame, dump, pack
from monarch_kernel.net.wire.messages import Complete, Inspect, Result
from monarch_kernel.runtime.diagnostics import inspection
from monarch_kernel.runtime.worker.extensions import register
from monarch_kernel.runtime.worker.rank import Rank

__all__ = ["Questions"]

_log = logging.getLogger(__name__)


@register
class Questions:
    """Answers `Complete` on the I/O thread, and `Inspect` on a separate thread.

    Args:
        rank: The rank whose namespace is looked at.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        rank.extend({Complete: self._complete, Inspect: self._inspect})

    def _complete(self, message: Complete, _: Sequence[Frame]) -> None:
        payload, frames = dump(self._completions(message), "names")
        self._rank.send_answer_now(message.id, pack(Result(message.id, payload), frames))

    def _completions(self, message: Complete) -> list[tuple[Any, str]] | None:
        namespace, hidden = self._rank.namespace
        try:
            if message.wanted == "names":
                return inspection.names(namespace, hidden)
            value = inspection.find(message.expression, namespace, message.imports)
            if message.wanted == "keys":
                return list(inspection.keys(value))
            if message.wanted == "arguments":
                return list(inspection.arguments(value))
            return list(inspection.attributes(value, private=message.wanted == "private attributes"))
        except LookupError:  # the expression means nothing here
            return None
        except Exception:  # raised by the user's types; Tab then offers nothing
            _log.exception("could not complete %r", message.expression)
            return None

    def _inspect(self, message: Inspect, _: Sequence[Frame]) -> None:
        # On another thread, because reading the source from a file may take long.
        threading.Thread(target=self._describe, args=[message], name="monarch-inspect", daemon=True).start()

    def _describe(self, message: Inspect) -> None:
        namespace, _ = self._rank.namespace
        try:
            value = inspection.find(message.expression, namespace, message.imports)
            description = inspection.about(value, source=message.source)
        except LookupError:  # the expression means nothing here
            description = None
        except Exception:  # raised by the user's types; Shift-Tab then shows nothing
            _log.exception("could not describe %r", message.expression)
            description = None
        payload, frames = dump(description, "a description")
        self._rank.send_answer(message.id, pack(Result(message.id, payload), frames))
