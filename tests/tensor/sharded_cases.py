"""Functions of torch whose results on sharded tensors are compared with those on plain ones."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

__all__ = ["GROUPS", "Case", "placements_of", "values_of"]

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A function of tensors.

    Attributes:
        name: In tables and test names.
        function: Takes the tensors, and returns one or several.
        shapes: Of its arguments; one that has ``kinds`` other than ``f`` has integers.
        kinds: For each argument: ``f`` for floats that have a gradient, ``c`` for floats that have none, ``p`` for positive
            floats, ``i3`` for integers less than 3, ``b`` for booleans.
        sharded: The indexes of the arguments that are placed together, where they have so many dimensions; others are
            replicated.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[Shape, ...]
    kinds: tuple[str, ...]
    sharded: tuple[int, ...]


def values_of(case: Case) -> list[torch.Tensor]:
    """Make the arguments of a case."""
    made = []
    for place, (shape, kind) in enumerate(zip(case.shapes, case.kinds)):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{case.name} {place}".encode()))
        if kind.startswith("i"):
            made.append(torch.randint(int(kind[1:]), shape, generator=generator))
        elif kind == "b":
            made.append(torch.rand(shape, generator=generator) < 0.5)
        else:
            x = torch.randn(shape, generator=generator)
            made.append(x.sigmoid() * 0.8 + 0.1 if kind == "p" else x)
    return made


def placements_of(case: Case) -> Iterator[str]:
    """Yield the placements of the arguments that are sharded: ``S(0)`` and so on, ``R``, ``P(sum)``."""
    yield "R"
    yield from (f"S({dim})" for dim in range(len(case.shapes[case.sharded[0]])))
    if case.kinds[case.sharded[0]] == "f":
        yield "P(sum)"


def _case(
    name: str, function: Callable[..., Any], *shapes: Shape, kinds: str = "", sharded: Sequence[int] = (0,)
) -> Case:
    return Case(name, function, shapes, tuple(kinds.split()) or ("f",) * len(shapes), tuple(sharded))


def _losses() -> Iterator[Case]:
    same = (
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "soft_margin_loss",
        "binary_cross_entropy_with_logits",
    )
    for reduction in ("mean", "sum", "none"):
        for name in same:
            function = getattr(F, name)
            yield _case(
                f"{name} {reduction}", lambda x, y, f=function, r=reduction: f(x, y, reduction=r), (5, 3), (5, 3),
                kinds="f p" if name.startswith("b") else "f c", sharded=(0, 1),
            )  # fmt: skip
            if reduction == "mean":
                yield _case(
                    f"{name} whole target", lambda x, y, f=function: f(x, y), (5, 3), (5, 3),
                    kinds="f p" if name.startswith("b") else "f c",
                )  # fmt: skip
        r = {"reduction": reduction}
        yield _case(
            f"cross_entropy {reduction}",
            lambda x, y, r=r: F.cross_entropy(x, y, **r),
            (5, 3),
            (5,),
            kinds="f i3",
            sharded=(0, 1),
        )
        yield _case(
            f"nll_loss {reduction}", lambda x, y, r=r: F.nll_loss(x, y, **r), (5, 3), (5,), kinds="f i3", sharded=(0, 1)
        )
        yield _case(
            f"nll_loss2d {reduction}", lambda x, y, r=r: F.nll_loss(x, y, **r), (3, 4, 2, 3), (3, 2, 3), kinds="f i4"
        )
        yield _case(
            f"kl_div {reduction}", lambda x, y, r=r: F.kl_div(x, y, **r), (5, 3), (5, 3), kinds="f p", sharded=(0, 1)
        )
        yield _case(
            f"binary_cross_entropy {reduction}",
            lambda x, y, r=r: F.binary_cross_entropy(x.sigmoid(), y, **r),
            (5, 3),
            (5, 3),
            kinds="f p",
            sharded=(0, 1),
        )
        yield _case(
            f"poisson_nll_loss {reduction}",
            lambda x, y, r=r: F.poisson_nll_loss(x, y, **r),
            (5, 3),
            (5, 3),
            kinds="f p",
            sharded=(0, 1),
        )
        yield _case(
            f"hinge_embedding_loss {reduction}",
            lambda x, y, r=r: F.hinge_embedding_loss(x, y, **r),
            (5, 3),
            (5, 3),
            kinds="f p",
            sharded=(0, 1),
        )
        yield _case(
            f"margin_ranking_loss {reduction}",
            lambda x, y, z, r=r: F.margin_ranking_loss(x, y, z, **r),
            (5,),
            (5,),
            (5,),
            kinds="f f c",
            sharded=(0, 1, 2),
        )
        yield _case(
            f"cosine_embedding_loss {reduction}",
            lambda x, y, z, r=r: F.cosine_embedding_loss(x, y, z.sign(), **r),
            (5, 3),
            (5, 3),
            (5,),
            kinds="f f c",
        )
        yield _case(
            f"triplet_margin_loss {reduction}",
            lambda x, y, z, r=r: F.triplet_margin_loss(x, y, z, **r),
            (5, 3),
            (5, 3),
            (5, 3),
            sharded=(0, 1, 2),
        )
        yield _case(
            f"multi_margin_loss {reduction}",
            lambda x, y, r=r: F.multi_margin_loss(x, y, **r),
            (5, 3),
            (5,),
            kinds="f i3",
        )
        yield _case(
            f"multilabel_soft_margin_loss {reduction}",
            lambda x, y, r=r: F.multilabel_soft_margin_loss(x, y, **r),
            (5, 3),
            (5, 3),
            kinds="f p",
            sharded=(0, 1),
        )
    yield _case("cross_entropy whole target", lambda x, y: F.cross_entropy(x, y), (5, 3), (5,), kinds="f i3")
    yield _case("cross_entropy weights", lambda x, y, w: F.cross_entropy(x, y, w), (5, 3), (5,), (3,), kinds="f i3 p")
    yield _case(
        "cross_entropy smoothing",
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
        (5, 3),
        (5,),
        kinds="f i3",
        sharded=(0, 1),
    )
    yield _case(
        "cross_entropy ignore",
        lambda x, y: F.cross_entropy(x, y, ignore_index=1),
        (5, 3),
        (5,),
        kinds="f i3",
        sharded=(0, 1),
    )
    yield _case(
        "cross_entropy probabilities", lambda x, y: F.cross_entropy(x, y), (5, 3), (5, 3), kinds="f p", sharded=(0, 1)
    )
    yield _case("cross_entropy pixels", lambda x, y: F.cross_entropy(x, y), (3, 4, 3, 2), (3, 3, 2), kinds="f i4")
    yield _case(
        "gaussian_nll_loss",
        lambda x, y, v: F.gaussian_nll_loss(x, y, v),
        (5, 3),
        (5, 3),
        (5, 3),
        kinds="f c p",
        sharded=(0, 1, 2),
    )
    yield _case(
        "ctc_loss",
        lambda x, y: F.ctc_loss(x.log_softmax(2), y + 1, (5, 5, 5), (2, 2, 2)),
        (5, 3, 4),
        (3, 2),
        kinds="f i3",
    )


def _norms() -> Iterator[Case]:
    yield _case("layer_norm", lambda x, w, b: F.layer_norm(x, (5,), w, b), (3, 4, 5), (5,), (5,))
    yield _case("layer_norm 2 dims", lambda x, w, b: F.layer_norm(x, (4, 5), w, b), (3, 4, 5), (4, 5), (4, 5))
    yield _case("layer_norm plain", lambda x: F.layer_norm(x, (5,)), (3, 4, 5))
    yield _case(
        "layer_norm weights too", lambda x, w, b: F.layer_norm(x, (5,), w, b), (5,), (5,), (5,), sharded=(0, 1, 2)
    )
    yield _case("rms_norm", lambda x, w: F.rms_norm(x, (5,), w), (3, 4, 5), (5,))
    yield _case("rms_norm plain", lambda x: F.rms_norm(x, (5,)), (3, 4, 5))
    yield _case("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), (3, 4, 5), (4,), (4,))
    yield _case("group_norm image", lambda x, w, b: F.group_norm(x, 2, w, b), (3, 6, 2, 3), (6,), (6,))
    yield _case("group_norm plain", lambda x: F.group_norm(x, 2), (3, 4, 5))
    yield _case(
        "batch_norm train", lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), (5, 4, 3), (4,), (4,)
    )
    yield _case("batch_norm plain", lambda x: F.batch_norm(x, None, None, training=True), (5, 4, 3))
    yield _case(
        "batch_norm channels",
        lambda w, x, b: F.batch_norm(x, None, None, w, b, training=True),
        (4,),
        (5, 4, 3),
        (4,),
        sharded=(0, 2),
    )
    yield _case(
        "batch_norm eval",
        lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b),
        (5, 4, 3),
        (4,),
        (4,),
        (4,),
        (4,),
        kinds="f c p f f",
    )
    yield _case("batch_norm statistics", _running, (5, 4, 3), (4,), (4,), (4,), (4,), kinds="f c p f f")
    yield _case("instance_norm", lambda x: F.instance_norm(x), (3, 4, 5))
    yield _case("local_response_norm", lambda x: F.local_response_norm(x, 2), (3, 4, 5))
    yield _case("normalize", lambda x: F.normalize(x, dim=1), (3, 4, 5))
    yield _case("weight_norm", lambda v, g: torch._weight_norm(v, g, 0), (5, 4), (5, 1))
    for p in (1, 2, 3, float("inf")):
        yield _case(f"vector_norm {p}", lambda x, p=p: torch.linalg.vector_norm(x, p), (5, 3))
        yield _case(f"vector_norm {p} dim", lambda x, p=p: torch.linalg.vector_norm(x, p, dim=1), (5, 3))


def _running(x: Any, mean: Any, var: Any, w: Any, b: Any) -> Any:
    mean, var = mean.clone(), var.clone()
    y = F.batch_norm(x, mean, var, w, b, training=True)
    return y, mean, var


def _convs() -> Iterator[Case]:
    for groups in (1, 2):
        yield _case(
            f"conv1d groups {groups}",
            lambda x, w, b, g=groups: F.conv1d(x, w, b, padding=1, groups=g),
            (3, 4, 6),
            (4, 4 // groups, 3),
            (4,),
        )
        yield _case(
            f"conv1d weight groups {groups}",
            lambda w, x, b, g=groups: F.conv1d(x, w, b, groups=g),
            (4, 4 // groups, 3),
            (3, 4, 6),
            (4,),
        )
    yield _case("conv1d plain", lambda x, w: F.conv1d(x, w), (3, 4, 6), (4, 4, 3))
    yield _case("conv1d bias", lambda b, x, w: F.conv1d(x, w, b), (4,), (3, 4, 6), (4, 4, 3))
    yield _case("conv2d", lambda x, w, b: F.conv2d(x, w, b), (3, 4, 5, 6), (2, 4, 3, 3), (2,))
    yield _case(
        "conv2d stride", lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1), (3, 4, 5, 6), (2, 4, 3, 3), (2,)
    )
    yield _case("conv2d dilation", lambda x, w: F.conv2d(x, w, dilation=2), (3, 2, 5, 6), (2, 2, 2, 2))
    yield _case("conv2d 1x1", lambda x, w, b: F.conv2d(x, w, b), (3, 4, 5, 6), (2, 4, 1, 1), (2,))
    yield _case("conv2d same", lambda x, w, b: F.conv2d(x, w, b, padding="same"), (3, 4, 5, 6), (2, 4, 3, 3), (2,))
    yield _case("conv2d patches", lambda x, w, b: F.conv2d(x, w, b, stride=2), (3, 4, 6, 8), (2, 4, 2, 2), (2,))
    yield _case("conv3d", lambda x, w, b: F.conv3d(x, w, b), (3, 2, 3, 4, 4), (2, 2, 2, 2, 2), (2,))
    yield _case("conv_transpose1d", lambda x, w, b: F.conv_transpose1d(x, w, b), (3, 4, 6), (4, 2, 3), (2,))
    yield _case(
        "conv_transpose2d", lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2), (3, 4, 3, 4), (4, 2, 3, 3), (2,)
    )
    yield _case("unfold", lambda x: F.unfold(x, 2), (3, 2, 4, 5))
    yield _case("fold", lambda x: F.fold(x, (3, 4), 2), (3, 8, 6))


def _pools() -> Iterator[Case]:
    yield _case("max_pool1d", lambda x: F.max_pool1d(x, 2), (3, 4, 6))
    yield _case("max_pool2d", lambda x: F.max_pool2d(x, 2), (3, 2, 5, 6))
    yield _case("max_pool2d overlap", lambda x: F.max_pool2d(x, 3, 1, 1), (3, 2, 5, 6))
    yield _case("max_pool3d", lambda x: F.max_pool3d(x, 2), (3, 2, 3, 4, 4))
    yield _case("avg_pool1d", lambda x: F.avg_pool1d(x, 2), (3, 4, 6))
    yield _case("avg_pool2d", lambda x: F.avg_pool2d(x, 2, 1), (3, 2, 5, 6))
    yield _case("avg_pool3d", lambda x: F.avg_pool3d(x, 2), (3, 2, 3, 4, 4))
    yield _case("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 2), (3, 4, 6))
    yield _case("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 2), (3, 2, 5, 6))
    yield _case("adaptive_avg_pool2d 1", lambda x: F.adaptive_avg_pool2d(x, 1), (3, 2, 5, 6))
    yield _case("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 2), (3, 2, 5, 6))
    yield _case("lp_pool1d", lambda x: F.lp_pool1d(x.abs() + 1, 2, 2), (3, 4, 6))


def _reductions() -> Iterator[Case]:
    for name in ("sum", "mean", "prod", "amax", "amin", "std", "var", "logsumexp", "nansum"):
        function = getattr(torch, name)
        if name not in ("logsumexp",):
            yield _case(name, lambda x, f=function: f(x), (5, 3))
        for dim in (0, 1):
            yield _case(f"{name} dim {dim}", lambda x, f=function, d=dim: f(x, dim=d), (5, 3))
        yield _case(f"{name} keepdim", lambda x, f=function: f(x, dim=-1, keepdim=True), (4, 3))
    for name in ("max", "min", "median"):
        yield _case(name, lambda x, n=name: getattr(torch, n)(x), (5, 3))
        for dim in (0, 1):
            yield _case(f"{name} dim {dim}", lambda x, n=name, d=dim: tuple(getattr(torch, n)(x, dim=d)), (5, 3))
    for name in ("argmax", "argmin", "any", "all", "count_nonzero"):
        yield _case(name, lambda x, n=name: getattr(torch, n)(x), (5, 3))
        for dim in (0, 1):
            yield _case(f"{name} dim {dim}", lambda x, n=name, d=dim: getattr(torch, n)(x, dim=d), (5, 3))
    yield _case("aminmax", lambda x: tuple(torch.aminmax(x)), (5, 3))
    yield _case("var_mean", lambda x: torch.var_mean(x, dim=0), (5, 3))
    yield _case("norm", lambda x: x.norm(), (5, 3))
    yield _case("quantile", lambda x: torch.quantile(x, 0.3, dim=0), (5, 3))
    yield _case("mode", lambda x: torch.mode(x, 0)[0], (5, 3), kinds="i3")
    yield _case("trace", lambda x: x.trace(), (5, 3))
    yield _case("softmax 0", lambda x: x.softmax(0), (5, 3))
    yield _case("softmax 1", lambda x: x.softmax(1), (5, 3))
    yield _case("log_softmax 0", lambda x: x.log_softmax(0), (5, 3))
    yield _case("log_softmax 1", lambda x: x.log_softmax(1), (5, 3))
    for name in ("cumsum", "cumprod", "logcumsumexp"):
        for dim in (0, 1):
            yield _case(f"{name} {dim}", lambda x, n=name, d=dim: getattr(torch, n)(x, d), (5, 3))
    for dim in (0, 1):
        yield _case(f"cummax {dim}", lambda x, d=dim: tuple(x.cummax(d)), (5, 3))
        yield _case(f"sort {dim}", lambda x, d=dim: tuple(x.sort(d)), (5, 3))
        yield _case(f"argsort {dim}", lambda x, d=dim: x.argsort(d), (5, 3))
        yield _case(f"topk {dim}", lambda x, d=dim: tuple(x.topk(2, d)), (5, 3))
        yield _case(f"kthvalue {dim}", lambda x, d=dim: tuple(x.kthvalue(2, d)), (5, 3))
        yield _case(f"diff {dim}", lambda x, d=dim: x.diff(dim=d), (5, 3))
    yield _case("renorm", lambda x: x.renorm(2, 0, 1), (5, 3))
    yield _case("histc", lambda x: torch.histc(x, 4, -2, 2), (5, 3), kinds="c")
    yield _case("bincount", lambda x: torch.bincount(x, minlength=5), (7,), kinds="i5")
    yield _case("searchsorted", lambda x, y: torch.searchsorted(x.sort()[0], y), (7,), (5,), kinds="c c")
    yield _case("bucketize", lambda x, y: torch.bucketize(x, y.sort()[0]), (5, 3), (4,), kinds="c c")
    yield _case("unique", lambda x: x.unique(), (7,), kinds="i5")
    yield _case("nonzero", lambda x: x.nonzero(), (5, 3), kinds="b")
    yield _case("isin", lambda x, y: torch.isin(x, y), (5, 3), (2,), kinds="i5 i5")


def _without_positive(x: torch.Tensor, number: float) -> torch.Tensor:
    made = x * 1
    made[made > 0] = number
    return made


def _doubled_where_positive(x: torch.Tensor) -> torch.Tensor:
    made = x * 1
    made[x > 0] = x[x > 0] * 2
    return made


def _window(x: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(x[0, :4])


def _flat(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    made = x * 1
    part = made.view(-1)[3:9]
    part.mul_(10)
    return made, part


def _indexing() -> Iterator[Case]:
    for dim in (0, 1):
        yield _case(f"index_select {dim}", lambda x, i, d=dim: x.index_select(d, i), (5, 3), (4,), kinds="f i3")
        yield _case(f"gather {dim}", lambda x, i, d=dim: x.gather(d, i), (5, 3), (5, 3), kinds="f i3")
        yield _case(
            f"gather both {dim}", lambda x, i, d=dim: x.gather(d, i), (5, 3), (5, 3), kinds="f i3", sharded=(0, 1)
        )
        yield _case(
            f"scatter {dim}", lambda x, i, y, d=dim: x.scatter(d, i[:1, :1], y), (5, 3), (5, 3), (5, 3), kinds="f i3 c"
        )
        yield _case(
            f"scatter_add {dim}", lambda x, i, y, d=dim: x.scatter_add(d, i, y), (5, 3), (5, 3), (5, 3), kinds="f i3 f"
        )
        yield _case(
            f"scatter_add from {dim}",
            lambda y, i, x, d=dim: x.scatter_add(d, i, y),
            (5, 3),
            (5, 3),
            (5, 3),
            kinds="f i3 f",
            sharded=(0, 1),
        )
        yield _case(
            f"scatter_reduce {dim}",
            lambda x, i, y, d=dim: x.scatter_reduce(d, i, y, "amax"),
            (5, 3),
            (5, 3),
            (5, 3),
            kinds="f i3 f",
        )
        yield _case(
            f"index_add {dim}", lambda x, i, y, d=dim: x.index_add(d, i, y), (5, 5), (5,), (5, 5), kinds="f i5 f"
        )
        yield _case(
            f"index_copy {dim}",
            lambda x, i, y, d=dim: x.index_copy(d, i, y),
            (5, 3),
            (1,),
            (1, 3) if dim == 0 else (5, 1),
            kinds="f i3 f",
        )
        yield _case(f"index_fill {dim}", lambda x, i, d=dim: x.index_fill(d, i, 7.0), (5, 3), (2,), kinds="f i3")
        yield _case(f"select {dim}", lambda x, d=dim: x.select(d, 1), (5, 3))
        yield _case(f"narrow {dim}", lambda x, d=dim: x.narrow(d, 1, 2), (5, 3))
        yield _case(f"split {dim}", lambda x, d=dim: x.split(2, d), (5, 3))
        yield _case(f"chunk {dim}", lambda x, d=dim: x.chunk(2, d), (5, 3))
        yield _case(f"unbind {dim}", lambda x, d=dim: x.unbind(d), (5, 3))
        yield _case(f"roll {dim}", lambda x, d=dim: x.roll(1, d), (5, 3))
        yield _case(f"flip {dim}", lambda x, d=dim: x.flip(d), (5, 3))
        yield _case(f"cat {dim}", lambda x, y, d=dim: torch.cat([x, y], d), (5, 3), (5, 3))
        yield _case(f"cat both {dim}", lambda x, y, d=dim: torch.cat([x, y], d), (5, 3), (5, 3), sharded=(0, 1))
        yield _case(f"stack {dim}", lambda x, y, d=dim: torch.stack([x, y], d), (5, 3), (5, 3))
        yield _case(f"repeat_interleave {dim}", lambda x, d=dim: x.repeat_interleave(2, d), (5, 3))
        yield _case(f"unfold {dim}", lambda x, d=dim: x.unfold(d, 2, 1), (5, 3))
        yield _case(
            f"take_along_dim {dim}", lambda x, i, d=dim: torch.take_along_dim(x, i, d), (5, 3), (5, 3), kinds="f i3"
        )
        yield _case(f"select_scatter {dim}", lambda x, y, d=dim: x.select_scatter(y, d, 1), (5, 5), (5,))
        yield _case(
            f"slice_scatter {dim}",
            lambda x, y, d=dim: x.slice_scatter(y, d, 1, 3),
            (5, 2) if dim == 0 else (2, 5),
            (2, 2),
        )
        yield _case(f"write column {dim}", lambda x, y, d=dim: _written(x, y, d), (5, 5), (5,))
    yield _case("index", lambda x, i: x[i], (5, 3), (4,), kinds="f i3")
    yield _case("index by sharded", lambda i, x: x[i], (4,), (5, 3), kinds="i3 f")
    yield _case("index columns", lambda x, i: x[:, i], (5, 3), (4,), kinds="f i3")
    yield _case("index pairs", lambda x, i, j: x[i, j], (5, 3), (4,), (4,), kinds="f i5 i3")
    yield _case("index mask", lambda x, m: x[m], (5, 3), (5, 3), kinds="f b")
    yield _case("index None", lambda x: x[:, None, 1:], (5, 3))
    yield _case("index step", lambda x: x[::2, ::2], (5, 3))
    yield _case("index_put", lambda x, i, y: x.index_put((i,), y), (5, 3), (4,), (4, 3), kinds="f i5 c")
    yield _case(
        "index_put add", lambda x, i, y: x.index_put((i,), y, accumulate=True), (5, 3), (4,), (4, 3), kinds="f i5 f"
    )
    yield _case("index_put mask", lambda x: _without_positive(x, 0.5), (5, 3))
    yield _case("index_put mask values", _doubled_where_positive, (5, 3))
    yield _case("masked_fill", lambda x, m: x.masked_fill(m, 3.0), (5, 3), (5, 3), kinds="f b")
    yield _case("masked_fill both", lambda x, m: x.masked_fill(m, 3.0), (5, 3), (5, 3), kinds="f b", sharded=(0, 1))
    yield _case("masked_scatter", lambda x, m, y: x.masked_scatter(m, y), (5, 3), (5, 3), (5, 3), kinds="f b f")
    yield _case("masked_select", lambda x, m: x.masked_select(m), (5, 3), (5, 3), kinds="f b")
    yield _case("where", lambda m, x, y: torch.where(m, x, y), (5, 3), (5, 3), (5, 3), kinds="b f f")
    yield _case("take", lambda x, i: x.take(i), (5, 3), (4,), kinds="f i9")
    yield _case("put", lambda x, i, y: x.put(i, y), (5, 3), (4,), (4,), kinds="f i9 c")
    yield _case("embedding", lambda w, i: F.embedding(i, w), (5, 4), (2, 3), kinds="f i5")
    yield _case("embedding indexes", lambda i, w: F.embedding(i, w), (3, 2), (5, 4), kinds="i5 f")
    yield _case("embedding padding", lambda w, i: F.embedding(i, w, padding_idx=1), (5, 4), (2, 3), kinds="f i5")
    yield _case("one_hot", lambda i: F.one_hot(i, 5), (4, 3), kinds="i5")
    yield _case("tril", lambda x: x.tril(), (5, 3))
    yield _case("triu", lambda x: x.triu(1), (5, 3))
    yield _case("diagonal", lambda x: x.diagonal(), (5, 3))
    yield _case("diag", lambda x: x.diag(), (5, 3))
    yield _case("diag_embed", lambda x: x.diag_embed(), (5, 3))
    yield _case("rot90", lambda x: x.rot90(), (5, 3))
    yield _case("tile", lambda x: x.tile(2, 3), (5, 3))
    yield _case("repeat", lambda x: x.repeat(2, 1, 2), (5, 3))
    yield _case("expand", lambda x: x.expand(2, 5, 3), (5, 3))
    yield _case("expand one", lambda x: x.expand(5, 3), (5, 1))
    yield _case("view", lambda x: x.reshape(2, 2, 3), (4, 3))
    yield _case("view merge", lambda x: x.reshape(12), (4, 3))
    yield _case("view regroup", lambda x: x.reshape(3, 4), (4, 3))
    yield _case("flatten", lambda x: x.flatten(1), (3, 4, 5))
    yield _case("unflatten", lambda x: x.unflatten(1, (2, 2)), (3, 4, 5))
    yield _case("permute", lambda x: x.permute(2, 0, 1), (3, 4, 5))
    yield _case("transpose", lambda x: x.transpose(0, 1).contiguous(), (3, 4, 5))
    yield _case("movedim", lambda x: x.movedim(0, 2), (3, 4, 5))
    yield _case("squeeze", lambda x: x.squeeze(), (5, 1, 3))
    yield _case("unsqueeze", lambda x: x.unsqueeze(1), (5, 3))
    yield _case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (3, 4, 2, 3))
    yield _case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), (3, 2, 4, 6))
    yield _case("channel_shuffle", lambda x: F.channel_shuffle(x, 2), (3, 4, 3, 2), kinds="c")
    for mode in ("constant", "reflect", "replicate", "circular"):
        yield _case(f"pad {mode}", lambda x, m=mode: F.pad(x, (1, 2), mode=m), (3, 4, 5))
    yield _case("pad value", lambda x: F.pad(x, (1, 0, 2, 1), value=3.0), (3, 4, 5))
    yield _case("pad crop", lambda x: F.pad(x, (-1, 0)), (3, 4, 5))
    for mode in ("nearest", "bilinear", "bicubic", "area"):
        yield _case(f"interpolate {mode}", lambda x, m=mode: F.interpolate(x, scale_factor=2, mode=m), (3, 2, 3, 4))
    yield _case("interpolate linear", lambda x: F.interpolate(x, size=7, mode="linear"), (3, 2, 5))
    yield _case("grid_sample", lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), (3, 2, 4, 5), (3, 2, 3, 2))


def _written(x: Any, y: Any, dim: int) -> Any:
    made = x.clone()
    if dim:
        made[:, 1] = y
    else:
        made[1] = y
    return made


def _views(x: Any, dim: int) -> Any:
    made = x.clone()
    column = made.select(dim, 3)
    made.mul_(2)
    rows = made.narrow(dim, 2, 2)
    column.add_(1)
    return made, column * 1, rows * 1


def _nested(x: Any) -> Any:
    made = x.clone()
    inner = made[1:4][:, 1:].t()[2]
    inner.mul_(3)
    made.view(-1)[7] = 5.0
    return made, inner * 1


def _products() -> Iterator[Case]:
    yield _case("mm", lambda x, y: x @ y, (5, 4), (4, 3))
    yield _case("mm right", lambda y, x: x @ y, (4, 3), (5, 4))
    yield _case("mm both", lambda x, y: x @ y, (5, 5), (5, 5), sharded=(0, 1))
    yield _case("mv", lambda x, y: x @ y, (5, 4), (4,))
    yield _case("dot", lambda x, y: x @ y, (5,), (5,), sharded=(0, 1))
    yield _case("dot half", lambda x, y: x @ y, (5,), (5,))
    yield _case("outer", lambda x, y: torch.outer(x, y), (5,), (3,))
    yield _case("bmm", lambda x, y: x @ y, (3, 4, 5), (3, 5, 2))
    yield _case("bmm both", lambda x, y: x @ y, (3, 5, 5), (3, 5, 5), sharded=(0, 1))
    yield _case("matmul broadcast", lambda x, y: x @ y, (3, 4, 5), (5, 2))
    yield _case("linear", lambda x, w, b: F.linear(x, w, b), (3, 4, 5), (2, 5), (2,))
    yield _case("linear weight", lambda w, x, b: F.linear(x, w, b), (3, 5), (4, 5), (3,))
    yield _case("linear bias", lambda b, x, w: F.linear(x, w, b), (3,), (4, 5), (3, 5))
    yield _case("linear weight and bias", lambda b, x, w: F.linear(x, w, b), (3,), (4, 5), (3, 5), sharded=(0, 2))
    yield _case("addmm", lambda b, x, y: torch.addmm(b, x, y, beta=2, alpha=3), (5, 3), (5, 4), (4, 3))
    yield _case("addmm product", lambda x, b, y: torch.addmm(b, x, y, beta=2, alpha=3), (5, 4), (5, 3), (4, 3))
    yield _case("baddbmm", lambda x, b, y: torch.baddbmm(b, x, y), (3, 4, 5), (3, 4, 2), (3, 5, 2))
    yield _case("addmv", lambda x, b, y: torch.addmv(b, x, y), (5, 4), (5,), (4,))
    yield _case("addr", lambda x, y, b: torch.addr(b, x, y), (5,), (3,), (5, 3))
    yield _case("einsum", lambda x, y: torch.einsum("bij,bjk->bik", x, y), (3, 4, 5), (3, 5, 2))
    yield _case("einsum experts", lambda x, w: torch.einsum("nd,edf->enf", x, w).relu(), (5, 3), (2, 3, 4))
    yield _case("einsum trace", lambda x: torch.einsum("bii->b", x), (3, 4, 4))
    yield _case("bilinear", lambda x, y, w, b: F.bilinear(x, y, w, b), (5, 3), (5, 4), (2, 3, 4), (2,))
    yield _case("tensordot", lambda x, y: torch.tensordot(x, y, 1), (3, 4, 5), (5, 2))
    yield _case("kron", lambda x, y: torch.kron(x, y), (2, 3), (2, 2))
    yield _case("cdist", lambda x, y: torch.cdist(x, y), (5, 3), (4, 3))
    yield _case("pdist", lambda x: F.pdist(x), (5, 3))
    yield _case("cosine_similarity", lambda x, y: F.cosine_similarity(x, y), (5, 3), (5, 3))
    yield _case("cross", lambda x, y: torch.linalg.cross(x, y), (5, 3), (5, 3))
    yield _case("inv", lambda x: torch.linalg.inv(x), (4, 4))
    yield _case("det", lambda x: torch.linalg.det(x), (3, 4, 4))
    yield _case("svdvals", lambda x: torch.linalg.svdvals(x), (5, 3))
    yield _case("qr", lambda x: tuple(torch.linalg.qr(x)), (5, 3))
    yield _case("cholesky", lambda x: torch.linalg.cholesky(x @ x.mT * 2 + 1e-1), (3, 3), kinds="c")
    yield _case("solve", lambda x, y: torch.linalg.solve(x, y), (3, 3), (3, 2))
    yield _case("solve_triangular", lambda x, y: torch.linalg.solve_triangular(x.exp(), y, upper=True), (3, 3), (3, 2))
    yield _case("matrix_exp", lambda x: torch.linalg.matrix_exp(x), (3, 4, 4))
    yield _case("fft", lambda x: torch.view_as_real(torch.fft.fft(x)), (5, 4))
    yield _case("conj", lambda x: torch.view_as_real((torch.complex(x, x * 2).conj() * 1j).mH.resolve_conj()), (5, 4))
    yield _case(
        "stft", lambda x: torch.view_as_real(torch.stft(x, 4, 2, window=_window(x), return_complex=True)), (3, 8)
    )
    yield _case("rfft", lambda x: torch.view_as_real(torch.fft.rfft(x, dim=0)), (5, 4))
    yield _case(
        "attention merged",
        lambda q: F.scaled_dot_product_attention(q, q, q).transpose(1, 2).contiguous().view(3, 5, 8),
        (3, 4, 5, 2),
    )
    yield _case(
        "attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        (3, 4, 5, 2),
        (3, 4, 5, 2),
        (3, 4, 5, 2),
        sharded=(0, 1, 2),
    )
    yield _case(
        "attention causal",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (3, 4, 5, 2),
        (3, 4, 5, 2),
        (3, 4, 5, 2),
        sharded=(0, 1, 2),
    )
    yield _case(
        "attention queries",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        (3, 4, 5, 2),
        (3, 4, 5, 2),
        (3, 4, 5, 2),
    )
    yield _case(
        "attention mask",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        (3, 4, 5, 2),
        (3, 4, 5, 2),
        (3, 4, 5, 2),
        (5, 5),
        kinds="f f f c",
        sharded=(0, 1, 2),
    )
    yield _case("multi_head_attention", _attention, (3, 5, 4), (12, 4), (4, 4))


def _attention(x: Any, w: Any, out: Any) -> Any:
    return F.multi_head_attention_forward(
        x, x, x, 4, 2, w, None, None, None, False, 0.0, out, None, need_weights=False
    )[0]  # fmt: skip


def _pointwise() -> Iterator[Case]:
    yield _case("add", lambda x, y: x + y, (5, 3), (5, 3))
    yield _case("add both", lambda x, y: x + y, (5, 3), (5, 3), sharded=(0, 1))
    yield _case("add number", lambda x: x + 1, (5, 3))
    yield _case("add row", lambda x, y: x + y, (5, 3), (3,))
    yield _case("add column", lambda y, x: x + y, (5, 1), (5, 3))
    yield _case("add alpha", lambda x, y: torch.add(x, y, alpha=3), (5, 3), (5, 3))
    yield _case("subtract from", lambda x: 1 - x, (5, 3))
    yield _case("mul", lambda x, y: x * y, (5, 3), (5, 3), sharded=(0, 1))
    yield _case("div", lambda x, y: x / (y + 9), (5, 3), (5, 3), sharded=(0, 1))
    yield _case("div by", lambda x: x / 3, (5, 3))
    yield _case("div into", lambda x: 3 / (x + 9), (5, 3))
    yield _case("floor div", lambda x: x // 0.3, (5, 3), kinds="c")
    yield _case("remainder", lambda x: x % 0.3, (5, 3))
    yield _case("fmod", lambda x: torch.fmod(x, 0.3), (5, 3))
    yield _case("pow", lambda x: x**3, (5, 3))
    yield _case("neg", lambda x: -x, (5, 3))
    yield _case("abs", lambda x: x.abs(), (5, 3))
    yield _case("sign", lambda x: x.sign(), (5, 3))
    yield _case("round", lambda x: x.round(), (5, 3))
    yield _case("exp", lambda x: x.exp(), (5, 3))
    yield _case("sigmoid", lambda x: x.sigmoid(), (5, 3))
    yield _case("clamp", lambda x: x.clamp(-1, 1), (5, 3))
    yield _case("clamp tensor", lambda x, y: x.clamp(max=y), (5, 3), (5, 3))
    yield _case("maximum", lambda x, y: torch.maximum(x, y), (5, 3), (5, 3))
    yield _case("compare", lambda x, y: x > y, (5, 3), (5, 3))
    yield _case("compare number", lambda x: x > 0.1, (5, 3))
    yield _case("eq", lambda x: x == x, (5, 3))
    yield _case("equal", lambda x: torch.full((), float(torch.equal(x, x))), (5, 3), kinds="c")
    yield _case("isnan", lambda x: (x / 0).isnan(), (5, 3), kinds="c")
    yield _case("logical_not", lambda x: x.logical_not(), (5, 3), kinds="c")
    yield _case("lerp", lambda x, y: x.lerp(y, 0.3), (5, 3), (5, 3))
    yield _case("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=2), (5, 3), (5, 3), (5, 3))
    yield _case("addcmul product", lambda y, x, z: torch.addcmul(x, y, z, value=2), (5, 3), (5, 3), (5, 3))
    yield _case("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z, value=2), (5, 3), (5, 3), (5, 3), kinds="f f p")
    yield _case("cast", lambda x: x.double(), (5, 3))
    yield _case("cast integer", lambda x: x.int(), (5, 3))
    yield _case("complex", lambda x: torch.view_as_real(torch.complex(x, x)), (5, 3))
    yield _case("polar", lambda x: torch.view_as_real(torch.polar(x.abs(), x)), (5, 3))
    yield _case("nan_to_num", lambda x: torch.nan_to_num(x / 0), (5, 3), kinds="c")
    yield _case("zeros_like", lambda x: torch.zeros_like(x), (5, 3))
    yield _case("ones_like", lambda x: torch.ones_like(x), (5, 3))
    yield _case("full_like", lambda x: torch.full_like(x, 7), (5, 3))
    yield _case("new_ones", lambda x: x.new_ones(5, 3), (5, 3))
    yield _case("add_ in place", lambda x: x.clone().add_(1), (5, 3))
    yield _case("mul_ in place", lambda x: x.clone().mul_(2), (5, 3))
    yield _case("relu_ in place", lambda x: x.clone().relu_(), (5, 3))
    yield _case("clamp_ in place", lambda x: x.clone().clamp_(-1, 1), (5, 3))
    yield _case("copy_", lambda x, y: torch.zeros_like(y).copy_(x), (5, 3), (5, 3))
    yield _case("copy_ into", lambda x, y: x.clone().copy_(y), (5, 3), (5, 3))
    yield _case("fill_", lambda x: x.clone().fill_(3), (5, 3))
    yield _case("add_ sharded", lambda x, y: torch.ones_like(y).add_(x), (5, 3), (5, 3))
    yield _case("div_ in place", lambda x: x.clone().div_(3), (5, 3))
    yield _case("sub_ in place", lambda x: x.clone().sub_(3), (5, 3))
    yield _case("sub_ sharded", lambda x, y: torch.ones_like(y).sub_(x), (5, 3), (5, 3))
    yield _case("lerp_ in place", lambda x, y: x.clone().lerp_(y, 0.3), (5, 3), (5, 3))
    yield _case("addcmul_ in place", lambda x, y: x.clone().addcmul_(y, y), (5, 3), (5, 3))
    yield _case("addcmul_ products", lambda x, y: torch.ones_like(y).addcmul_(x, x), (5, 3), (5, 3))
    yield _case("masked_fill_ in place", lambda x, m: x.clone().masked_fill_(m, 3.0), (5, 3), (5, 3), kinds="f b")
    yield _case("zero_ in place", lambda x: x.clone().zero_(), (5, 3))
    yield _case("neg_ in place", lambda x: x.clone().neg_(), (5, 3))
    yield _case("unsqueeze_ in place", lambda x: x.clone().unsqueeze_(0) * 1, (5, 3))
    yield _case("transpose_ in place", lambda x: x.clone().transpose_(0, 1) * 1, (5, 3))
    yield _case("squeeze_ in place", lambda x: x.clone().squeeze_(1) * 1, (5, 1, 3))
    for dim in (0, 1):
        yield _case(f"view of column {dim}", lambda x, d=dim: _views(x, d), (5, 5))
    yield _case("view of view", _nested, (5, 4))
    yield _case("view of elements", _flat, (6, 4))
    yield _case("cumsum_ in place", lambda x: x.clone().cumsum_(0), (5, 3))
    for name in (
        "relu",
        "gelu",
        "silu",
        "elu",
        "softplus",
        "leaky_relu",
        "hardtanh",
        "mish",
        "hardswish",
        "logsigmoid",
        "softsign",
        "tanhshrink",
        "selu",
        "relu6",
    ):
        yield _case(name, getattr(F, name), (5, 3))
    for dim in (0, 1):
        yield _case(f"glu {dim}", lambda x, d=dim: F.glu(x, d), (4, 6))
    yield _case("prelu", lambda x, w: F.prelu(x, w), (5, 3), (3,))


GROUPS = {
    "losses": [*_losses()],
    "norms": [*_norms()],
    "convolutions and pools": [*_convs(), *_pools()],
    "reductions": [*_reductions()],
    "indexes and views": [*_indexing()],
    "products": [*_products()],
    "elements": [*_pointwise()],
}
CASES = [case for group in GROUPS.values() for case in group]
