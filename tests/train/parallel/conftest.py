"""Ranks and models for the tests of this folder, which share them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks

PRELUDE = """
import copy, gc, torch, torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from monarch_kernel.train.parallel import Needs, clip_grad_norm_, parallelize, plan_for, plan_of

class Block(nn.Module):
    def __init__(self, width, extra=None):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.extra = extra
    def forward(self, x):
        h = self.norm(x) if self.extra is None else self.extra(self.norm(x))
        return x + self.down(F.gelu(self.up(h)))

class Net(nn.Module):
    def __init__(self, extra=lambda width: None, width=16, blocks=3, tied=False):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList([Block(width, extra(width)) for _ in range(blocks)])
        self.head = nn.Linear(width, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def batch(step, size=8):
    return torch.randint(0, 50, (size, 6), generator=torch.Generator().manual_seed(step))

def loss_of(model, tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())

def train(model, parts=1, part=0, steps=4, make=None, each=lambda model: None, optimizer=None):
    make = make or (lambda params: torch.optim.AdamW(params, lr=1e-2))
    optimizer = optimizer or make([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step).chunk(parts)[part])
        loss.backward()
        each(model)
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if parts > 1:
        dist.all_reduce(losses)
    return losses / (dist.get_world_size() if parts > 1 else 1)

def full(model):
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}

def same(model, reference, atol=2e-5):
    mine, theirs = full(model), full(reference)
    assert mine.keys() == theirs.keys(), mine.keys() ^ theirs.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], atol=atol, rtol=1e-4, msg=lambda text: f"{name}: {text}")

def trains_as_one(make, example=batch(0, 4), **options):
    # Compare losses and parameters with those of one process with the whole batch.
    torch.manual_seed(1)
    model = make()
    reference = copy.deepcopy(model)
    train_options = options.pop("training", {})
    parallelize(model, example=example, quiet=True, **options) if "mesh" in options else parallelize(
        model, mesh, example=example, quiet=True, **options)
    losses = train(model, world_size, rank, **train_options)
    torch.testing.assert_close(losses, train(reference, **train_options), atol=2e-5, rtol=1e-4)
    same(model, reference)
    return plan_of(model)
"""


@pytest.fixture(scope="package")
def two(session: None) -> Iterator[Ranks]:
    """Two ranks, along ``dp``."""
    ranks = Ranks(2, PRELUDE)
    yield ranks
    ranks.close()


@pytest.fixture(scope="package")
def four(session: None) -> Iterator[Ranks]:
    """Four ranks, along ``dp``."""
    ranks = Ranks(4, PRELUDE)
    yield ranks
    ranks.close()
