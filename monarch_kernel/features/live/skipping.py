"""Skips the update of a step whose loss jumps, on all ranks: implements ``live.loop(on_spike="skip")``.

Theory of operation. The other actions come some steps later, because logged values are read a few times a second. An update
that was applied can't be undone, so here the loss is read where it is logged, and the ranks agree where the first optimizer of
the step is about to apply it: in one collective with three numbers. If the loss of any rank jumps, no rank applies an update in
this step. The optimizers run, but see no gradients, which leaves parameters and their own state as they are; afterwards the
gradients are back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monarch_kernel.features.watch.values import LossWatch, is_loss

__all__ = ["UpdateSkipper"]

_HERE = "live.loop(on_spike='skip')"


class UpdateSkipper:
    """Decides for each step of one loop whether its update is applied.

    Args:
        step: returns the current step.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self._step = step
        self._losses: dict[str, LossWatch] = {}
        self._thread = 0
        self._seen_in = -1  # the last step with a loss
        self._jumps_in = -1  # the last step whose loss jumps on this rank
        self._decided_in = -1
        self._skips = False
        self._hidden: dict[int, list[tuple[Any, Any]]] = {}  # by optimizer: parameters and their gradients
        self._hooks: list[Any] = []

    def begin(self) -> None:
        """The loop starts.

        Raises:
            RuntimeError: there is no torch.
        """
        try:
            from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        except ImportError as error:
            raise RuntimeError(
                f"{_HERE} skips updates of torch's optimizers, but torch can't be imported: {error}"
            ) from None
        self._thread = threading.get_ident()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]

    def end(self) -> None:
        """The loop has ended."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def forget(self) -> None:
        """Forget the last losses: the loop goes on from an earlier state."""
        self._losses.clear()

    def log(self, name: str, value: Any) -> None:
        """Take a value that the loop logs: a number, or a tensor with one element.

        Raises:
            RuntimeError: it is the loss of a step that was applied already.
        """
        if not is_loss(name):
            return
        step = self._step()
        if self._decided_in == step and self._seen_in != step:
            raise RuntimeError(
                f"{_HERE}: the update of step {step:,} was applied before live.log({name}=...); "
                "log the loss before optimizer.step()"
            )
        self._seen_in = step
        if self._losses.setdefault(name, LossWatch()).is_far_above(float(value)):
            self._jumps_in = step

    def _before_update(self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Hide the gradients from an optimizer if the update is skipped.

        Raises:
            RuntimeError: the ranks are in different steps, or the optimizer computes the gradients itself.
        """
        if threading.get_ident() != self._thread:
            return
        step = self._step()
        if self._decided_in != step:
            self._decided_in, self._skips = step, False
            if (rank := _agreed(step, jumps=self._jumps_in == step)) is not None:
                self._skips = True
                print(
                    f"live loop: the loss of step {step:,} jumps on rank {rank}: no rank applies the update of this step"
                )
        if not self._skips:
            return
        if kwargs.get("closure") is not None or any(each is not None for each in args[1:2]):
            raise RuntimeError(f"{_HERE} can't skip optimizer.step(closure): compute the gradients before it")
        parameters = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        self._hidden[id(optimizer)] = [(each, each.grad) for each in parameters]
        for each in parameters:
            each.grad = None

    def _after_update(self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for parameter, gradient in self._hidden.pop(id(optimizer), ()):
            parameter.grad = gradient


def _agreed(step: int, *, jumps: bool) -> int | None:
    """Return a rank whose loss jumps, the same on all ranks of the default process group; None if there is none.

    Raises:
        RuntimeError: the ranks are in different steps.
    """
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return 0 if jumps else None
    if dist.get_world_size() == 1:
        return dist.get_rank() if jumps else None
    world: Any = dist.group.WORLD
    kinds = [each.type for each in world._device_types]
    device = torch.device("cpu" if "cpu" in kinds or not kinds else kinds[0])
    found = torch.tensor([dist.get_rank() if jumps else -1, step, -step], dtype=torch.int64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    rank, latest, earliest = found.tolist()
    if latest != -earliest:
        raise RuntimeError(
            f"{_HERE}: some ranks apply the update of step {-earliest:,} and others that of step {latest:,}; "
            "all ranks must call optimizer.step() in the same steps"
        )
    return rank if rank >= 0 else None
