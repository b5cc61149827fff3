"""What has become of a campaign."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Report"]


@dataclass
class Report:
    """What was done, what came of it, and what should not have been.

    Attributes:
        kinds: how often each fault was made.
        values: futures that ended with a value.
        errors: those that ended with an error, each of a rank that was harmed.
        lost: ranks that were lost, as they had to be.
        wrong: answers, errors and ends that should not have been.
        innocent: ranks that were lost though nobody had harmed them, or their host.
        left: processes and other things that were left behind.
        known_s: how long it took until all that were to be lost were, in seconds, for each step.
        healed_s: how long it took from then on until all was whole.
        transfers: of memory, by what has become of them.
        figures: in words, of what else was done.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    values: int = 0
    errors: int = 0
    lost: int = 0
    wrong: list[str] = field(default_factory=list)
    innocent: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    known_s: list[float] = field(default_factory=list)
    healed_s: list[float] = field(default_factory=list)
    transfers: Counter[str] = field(default_factory=Counter)
    figures: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether all was as it has to be."""
        return not (self.wrong or self.innocent or self.left)

    def text(self) -> str:
        """As a table, with what was wrong below it."""
        rows = [(kind, str(count)) for kind, count in sorted(self.kinds.items())]
        rows += [(f"transfers {what}", str(count)) for what, count in sorted(self.transfers.items())]
        if self.transfers:
            rows.append(("transfers", str(self.transfers.total())))
        rows += [
            ("faults", str(sum(self.kinds.values()))),
            ("ranks lost by them, and replaced", str(self.lost)),
            ("futures that ended with a value", str(self.values)),
            ("futures that ended with an error", str(self.errors)),
            ("wrong answers, errors that nothing excuses, futures without end", str(len(self.wrong))),
            ("ranks lost that nobody had harmed", str(len(self.innocent))),
            ("processes, sockets, threads, files left", str(len(self.left))),
        ]
        width = max(len(what) for what, _ in rows)
        lines = [f"{what:<{width}}  {count:>7}" for what, count in rows]
        for what, times in (("all losses known", self.known_s), ("whole again after that", self.healed_s)):
            if len(times) > 1:
                cuts = statistics.quantiles(times, n=20)
                lines.append(
                    f"{what}: median {statistics.median(times):.2f} s, 95 % within {cuts[-1]:.2f} s, "
                    f"longest {max(times):.2f} s"
                )
        lines += self.figures
        for title, found in (("wrong", self.wrong), ("innocent", self.innocent), ("left", self.left)):
            lines += [f"{title}: {each}" for each in found[:20]]
        return "\n".join(lines)
