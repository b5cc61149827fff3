"""Profiles of running code: where the time of a step goes, which rank others wait for, and one trace of all ranks.

Theory of operation
===================

While a profile is recorded, a rank runs ``torch.profiler`` for all its threads, and a thread that notes every few milliseconds
which line of the user's code runs (`worker`). Nothing in the user's code changes, so this works for cells, loops and endpoints.
A *step* is one of a live loop, else one of the optimizer; code that has neither is measured as a whole.

Collectives. Every rank is as long in a collective as it takes the last rank to arrive, so durations show which ranks wait,
and not why. The flight recorder of torch has the time at which each rank started each collective, with the number that the
collective has in its group. So ranks are compared at *arrivals* (`lateness`): the others wait for the last one to arrive.

The line. A rank that is late at a collective was delayed anywhere since the last one, and by then runs the same code as others.
So its samples are compared with those of the other ranks: its time is in the line that takes it longer than them. Time in which
a rank waits for others does not count (`analysis`).

Clocks. Ranks of a machine share a clock. The offset of another machine's clock comes from the shortest of several round trips
(`controller`).

*Late ranks.* Ranks note the times of their last collectives also without a profile (`arrivals`), and report some of them once a
second. The controller compares them when a view is shown (`late_ranks`).
"""
