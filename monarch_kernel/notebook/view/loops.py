"""Describes live loops as text."""

from __future__ import annotations

from monarch_kernel.base.events import CurveView, LoopView
from monarch_kernel.base.text import format_seconds, one_line, plain

__all__ = ["loader_text", "loop_text"]

_SIGNS = {"running": "▶", "pausing": "❚❚", "paused": "❚❚", "stopping": "■", "over": "■"}
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
_MAX_SHOWN = 8


def loop_text(view: LoopView) -> str:
    """Format a loop in one line: its progress, time, speed, last logged metrics and knobs."""
    steps = f"step {view.step:,}" + ("" if view.steps is None else f" of {view.steps:,}")
    where = f" in {plain(view.where)}" if view.where else ""
    parts = [f"loop{where}: {_SIGNS[view.state]} {view.state}, {steps}, {format_seconds(view.age_s)} elapsed"]
    if view.left_s is not None:
        parts[0] += f", {format_seconds(view.left_s)} left"
    if view.step_s:
        step = f"{view.step_s * 1000:.3g} ms" if view.step_s < 1 else format_seconds(view.step_s)
        parts.append(
            ", ".join([f"{step} a step", _steps_per_s(view.step_s), *(_rate(name, rate) for name, rate in view.per_s)])
        )
        if view.mfu is not None:
            parts[-1] += f", MFU {view.mfu:.1%}".replace("%", " %")
    if loader := loader_text(view):
        parts.append(loader)
    parts += [_metric(curve) for curve in view.curves[:_MAX_SHOWN]]
    parts += [f"{plain(knob.name)}={_value(knob.value)}" for knob in view.knobs[:_MAX_SHOWN]]
    hidden = max(0, len(view.curves) - _MAX_SHOWN) + max(0, len(view.knobs) - _MAX_SHOWN)
    if hidden:
        parts.append(f"and {hidden} more")
    if view.refused:
        parts.append(f"some names are left out: {view.refused}")
    return "; ".join(map(one_line, parts))


def loader_text(view: LoopView) -> str:
    """Say how long ranks wait for a DataLoader: ``loader 31 % of a step, 64 % on [2]``; empty if none uses one."""
    if not view.loader:
        return ""
    mean = sum(share for _, share in view.loader) / len(view.loader)
    rank, most = max(view.loader, key=lambda each: each[1])
    uneven = f", {most:.0%} on [{rank}]" if most > 1.5 * mean and most >= 0.01 else ""
    return f"loader {mean:.0%} of a step{uneven}".replace("%", " %")


def _steps_per_s(step_s: float) -> str:
    """Format the speed of a loop: ``81 steps/s``."""
    rate = 1 / step_s
    return f"{rate:,.0f} steps/s" if rate >= 99.95 else f"{rate:.3g} steps/s"


def _rate(name: str, rate: float) -> str:
    """Format a rate: ``84,120 tokens/s``, ``413 TFLOP/s``."""
    if name != "flops":
        return f"{rate:,.0f} {name}/s"
    for prefix in _PREFIXES[:-1]:
        if rate < 999.5:
            return f"{rate:.3g} {prefix}FLOP/s"
        rate /= 1000
    return f"{rate:.3g} {_PREFIXES[-1]}FLOP/s"


def _metric(curve: CurveView) -> str:
    """Format a metric, ``loss 2.3026 (2.28 rank 3, 2.32 rank 0)``: the mean over ranks, the minimum and the maximum."""
    ends = ", ".join(f"{value:.5g} rank {rank}" for rank, value in curve.ends)
    return f"{plain(curve.name)} {curve.last:.5g}" + (f" ({ends})" if ends else "")


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)
