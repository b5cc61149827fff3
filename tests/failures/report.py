"""The result of a campaign."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Report"]


@dataclass
class Report:
    """What a campaign did, what came of it, and what went wrong.

    Attributes:
        kinds: how often each fault was made.
        values: number of futures that ended with a value.
        errors: number of futures that ended with an error, each of a rank that was harmed.
        lost: number of ranks that were lost because of faults.
        wrong: wrong answers, unexcused errors and missing ends.
        innocent: ranks that were lost although neither they nor their host were harmed.
        left: processes and other things that were left behind.
        known_s: seconds until the controller knew of all losses, for each step.
        healed_s: seconds from then until the mesh was whole again.
        transfers: number of transfers of memory, by outcome.
        figures: other figures, in words.
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
        """Whether nothing went wrong."""
        return not (self.wrong or self.innocent or self.left)

    def text(self) -> str:
        """Format the report as a table, followed by the failed checks."""
        rows = [(kind, str(count)) for kind, count in sorted(self.kinds.items())]
        rows += [(f"transfers {what}", str(count)) for what, count in sorted(self.transfers.items())]
        if self.transfers:
            rows.append(("transfers", str(self.transfers.total())))
        rows += [
            ("faults", str(sum(self.kinds.values()))),
            ("ranks lost by them, and replaced", str(self.lost)),
            ("futures that ended with a value", str(self.values)),
            ("futures that ended with an error", str(self.errors)),
            ("wrong answers, errors without an excuse, futures without an end", str(len(self.wrong))),
            ("ranks lost that no fault hit", str(len(self.innocent))),
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
