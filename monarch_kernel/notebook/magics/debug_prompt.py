"""Leads the user through the debuggers of several ranks: chooses the rank of the next prompt, and shows the replies.

One prompt is open at a time. It belongs to the lowest rank that waits, and stays with that rank until the rank continues. A
rank that does not return to its prompt within `PATIENCE_S` runs something slow, perhaps a collective that the others must join;
then the next rank gets the prompt.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from IPython.core.error import StdinNotImplementedError

from monarch_kernel.base.events import StopEvent
from monarch_kernel.base.text import one_line
from monarch_kernel.errors import format_ranks
from monarch_kernel.notebook.cells.display import Sink
from monarch_kernel.notebook.cells.held_interrupts import HeldInterrupts

__all__ = ["TOGETHER_S", "Conversation", "Prompter", "grouped", "label"]

PATIENCE_S = 1.0
TOGETHER_S = 0.1
"""Ranks that stop within this time, in seconds, are announced in one line."""
_HELP = "several ranks: 'ranks' lists them, 'all COMMAND' goes to each, 'rank N' opens the prompt of rank N"


class Prompter(Protocol):
    """What a conversation needs: asks the user for input and sends it to ranks."""

    def may_ask(self) -> bool:
        """Whether the frontend accepts input."""
        ...

    def ask(self, prompt: str, stop: StopEvent, interrupts: HeldInterrupts) -> str | None:
        """Ask for a line; None if the prompt was interrupted, the rank is gone, or another conversation asks."""
        ...

    def answer(self, stop: StopEvent, line: str) -> None:
        """Send a rank the line that it waits for."""
        ...

    def skip_breakpoints(self, stops: Iterable[StopEvent]) -> None:
        """Let stopped code continue without asking the user."""
        ...


class Conversation:
    """Leads the user through the stops of one cell, or of the ranks of a mesh.

    Args:
        prompt: asks the user for input.
        sink: shows the debuggers' output.
    """

    def __init__(self, prompt: Prompter, sink: Sink) -> None:
        self._prompt = prompt
        self._sink = sink
        self._announced: set[tuple[int, int]] = set()
        self._shown: set[tuple[int, int]] = set()
        self._asked: set[int] = set()
        self._asked_at = 0.0
        self._to_all = False
        self._rank: int | None = None
        self._has_helped = False

    def poll(self, stops: Sequence[StopEvent], interrupts: HeldInterrupts) -> None:
        """Show what is new, and ask for the next line if a rank waits for one."""
        now = time.monotonic()
        waiting = {stop.rank: stop for stop in stops if stop.is_waiting}
        if not self._prompt.may_ask():
            self._prompt.skip_breakpoints(waiting.values())
            return
        if any(stop.begins and now - stop.since < TOGETHER_S for stop in waiting.values()):
            return  # other ranks may stop at the same place in a moment
        self._announce(waiting.values())
        running = self._asked & {stop.rank for stop in stops if not stop.is_waiting}
        if running and now < self._asked_at + PATIENCE_S:
            return
        if not waiting:
            return
        self._show_replies([waiting[rank] for rank in sorted(self._asked) if rank in waiting])
        self._asked = set()
        if self._rank not in waiting:
            if self._rank in running:
                self._say(f"[{self._rank}] continues to run")
            self._rank = min(waiting)
        stop = waiting[self._rank]
        self._show([stop])
        try:
            line = self._prompt.ask(f"[{stop.rank}] {one_line(stop.prompt)}", stop, interrupts)
        except StdinNotImplementedError:
            self._prompt.skip_breakpoints(waiting.values())
            return
        if line is not None:
            self._obey(line, stop, waiting)

    def _obey(self, line: str, stop: StopEvent, waiting: dict[int, StopEvent]) -> None:
        words = line.split()
        if words == ["ranks"]:
            for where, stops in grouped(waiting.values(), lambda each: each.where):
                self._say(f"{label(stops)} {where}")
        elif len(words) == 2 and words[0] == "rank" and re.fullmatch(r"\d+", words[1]):
            if int(words[1]) in waiting:
                self._rank = int(words[1])
                chosen = waiting[self._rank]
                if (chosen.proc, chosen.turn) in self._shown:  # else its place is shown before the prompt
                    self._say(f"[{chosen.rank}] {chosen.where}")
            else:
                self._say(f"[{words[1]}] has not stopped; stopped: {format_ranks(waiting)}")
        elif len(words) > 1 and words[0] == "all":
            self._give(line.split(None, 1)[1], waiting.values(), to_all=True)
        else:
            self._give(line, [stop], to_all=False)

    def _give(self, line: str, stops: Iterable[StopEvent], *, to_all: bool) -> None:
        for stop in stops:
            self._prompt.answer(stop, line)
            self._asked.add(stop.rank)
        self._asked_at, self._to_all = time.monotonic(), to_all

    # -- output

    def _announce(self, waiting: Iterable[StopEvent]) -> None:
        new = [stop for stop in waiting if stop.begins and (stop.proc, stop.turn) not in self._announced]
        self._announced.update((stop.proc, stop.turn) for stop in new)
        new = [stop for stop in new if stop.description != "a post-mortem"]
        for where, stops in grouped(new, lambda stop: stop.where):
            self._say(f"{label(stops)} stopped at breakpoint: {where}")
        if len(new) > 1 and not self._has_helped:
            self._has_helped = True
            self._say(_HELP)

    def _show_replies(self, replies: Sequence[StopEvent]) -> None:
        if not self._to_all:
            self._show(replies)
            return
        for text, stops in grouped(replies, lambda stop: stop.text.rstrip("\n")):
            ranks = label(stops)
            self._shown.update((stop.proc, stop.turn) for stop in stops)
            if text:
                self._say(f"{ranks} " + ("\n" + " " * (len(ranks) + 1)).join(text.split("\n")))

    def _show(self, stops: Iterable[StopEvent]) -> None:
        for stop in stops:
            if (stop.proc, stop.turn) not in self._shown:
                self._shown.add((stop.proc, stop.turn))
                self._sink.write("stdout", stop.text)

    def _say(self, text: str) -> None:
        self._sink.write("stdout", text + "\n")


def grouped(stops: Iterable[StopEvent], key: Callable[[StopEvent], str]) -> list[tuple[str, list[StopEvent]]]:
    """Group stops with the same mesh and key, ordered by their lowest rank."""
    groups: dict[tuple[str, str], list[StopEvent]] = {}
    for stop in sorted(stops, key=lambda stop: stop.rank):
        groups.setdefault((stop.mesh, key(stop)), []).append(stop)
    return [(text, group) for (_, text), group in groups.items()]


def label(stops: Iterable[StopEvent]) -> str:
    """Format the ranks of stops, such as ``[0-2]``."""
    return format_ranks(stop.rank for stop in stops)
