"""Plans how to distribute a model over ranks: from facts about the model, its mesh and their memory to a `Plan` with reasons.

Nothing here uses torch, a device or a process group: `monarch_kernel.train.parallel` collects the facts and applies the plan.
"""

from __future__ import annotations
