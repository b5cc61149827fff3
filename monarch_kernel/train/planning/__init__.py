"""Decides how a model is spread over ranks: from facts about it, its mesh and their memory, to a `Plan` with its reasons.

Nothing here knows torch, a device or a process group: `monarch_kernel.train.parallel` finds the facts and carries the plan out.
"""

from __future__ import annotations
