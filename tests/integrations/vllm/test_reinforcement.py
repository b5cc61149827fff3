"""GRPO with ranks that train under FSDP and an engine of vLLM that generates; `make test-vllm` installs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from monarch_kernel.actor import ActorMesh, ProcMesh
from monarch_kernel.integrations.vllm import Completion, Generator
from tests.integrations.vllm.engines import START_S, WITH_ENGINE, engine_mesh
from tests.support.ranks import Ranks

pytestmark = WITH_ENGINE

# Each rank learns from half of the groups. The reward is the share of token 7 in a sample.
PRELUDE = """
import torch, torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from monarch_kernel.train.parallel import parallelize

config = LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=128, initializer_range=0.1, bos_token_id=1, eos_token_id=2)

def make():
    torch.manual_seed(0)
    return LlamaForCausalLM(config)

def begin(first):
    global model, optimizer, step
    model, step = make(), first
    parallelize(model, mesh, "fsdp", quiet=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

def learn(samples, group):
    "One step of GRPO; returns the loss and the mean reward."
    global step
    half = len(samples) // dist.get_world_size()
    samples = samples[rank * half : (rank + 1) * half]
    rewards = torch.tensor([sum(token == 7 for token in each.token_ids) / len(each.token_ids) for each in samples])
    groups = rewards.view(-1, group)
    gain = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    tokens = torch.tensor([each.prompt_token_ids + each.token_ids for each in samples])
    start = len(samples[0].prompt_token_ids)
    logprobs = model(input_ids=tokens[:, :-1]).logits[:, start - 1 :].log_softmax(-1)
    chosen = logprobs.gather(-1, tokens[:, start:, None]).squeeze(-1)
    optimizer.zero_grad()
    loss = -(gain[:, None] * chosen).mean()
    loss.backward()
    optimizer.step()
    step += 1
    return loss.item(), rewards.mean().item()
"""
GROUP = 8
PROMPTS = [[5, 6, 7], [8, 9, 10], [3, 11, 12], [20, 21, 22]]
STEPS = 16


@pytest.fixture(scope="module")
def trainer(session: None) -> Iterator[Ranks]:
    ranks = Ranks(2, PRELUDE)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def mesh(session: None) -> Iterator[ProcMesh]:
    yield from engine_mesh()


@pytest.fixture(scope="module")
def generator(mesh: ProcMesh, trainer: Ranks, tmp_path_factory: pytest.TempPathFactory) -> ActorMesh:
    folder = tmp_path_factory.mktemp("tiny")
    trainer.run(f"if rank == 0: make().save_pretrained({str(folder)!r})\ndist.barrier()\nbegin(0)")
    actor = mesh.spawn(
        "generator",
        Generator,
        str(folder),
        trainer=trainer.mesh,
        version="step",
        max_staleness=0,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
    )
    actor.initialized.get(START_S)
    return actor


class Run:
    """One training run from the same weights, in which the samples of each step have their own seed.

    Args:
        generator: generates.
        trainer: learns.
        first: the version of the weights at the start; versions never go down, so each run has other ones.

    Attributes:
        losses: the losses of all steps, rank by rank.
        rewards: the mean rewards of all steps.
        ages: for each step, how many versions behind the weights were that have generated its samples.
    """

    def __init__(self, generator: Any, trainer: Ranks, first: int) -> None:
        self._generator, self._trainer, self._first = generator, trainer, first
        self.losses: list[tuple[float, ...]] = []
        self.rewards: list[float] = []
        self.ages: list[set[int]] = []
        trainer.run(f"begin({first})")
        self.update()

    def update(self) -> None:
        self._generator.update.call_one().get(START_S)

    def generate(self, step: int, *, is_bound: bool = False) -> Any:
        sampling = {"n": GROUP, "temperature": 1.0, "max_tokens": 8, "ignore_eos": True, "seed": step}
        return self._generator.generate.call_one(PROMPTS, sampling, step=self._first + step if is_bound else None)

    def learn(self, samples: list[Completion]) -> Any:
        now = self._first + len(self.ages)
        self.ages.append({now - each.version for each in samples})
        self._trainer.mesh["samples"] = samples
        return self._trainer.mesh.run(f"learn(samples, {GROUP})")

    def note(self, learned: Any) -> None:
        values = learned.get(START_S).values()
        self.losses.append(tuple(loss for loss, _ in values))
        self.rewards.append(sum(reward for _, reward in values) / len(values))


def synchronous(run: Run) -> Run:
    """Generate, learn and update, one after the other."""
    for step in range(STEPS):
        run.note(run.learn(run.generate(step).get(START_S)))
        run.update()
    return run


def overlapped(run: Run, *, is_bound: bool) -> Run:
    """Ask for the samples of the next step while the ranks learn from those of this one."""
    asked = run.generate(0, is_bound=is_bound)
    for step in range(STEPS):
        learned = run.learn(asked.get(START_S))
        if step + 1 < STEPS:
            asked = run.generate(step + 1, is_bound=is_bound)
        run.note(learned)
    return run


@pytest.fixture(scope="module")
def reference(generator: ActorMesh, trainer: Ranks) -> Run:
    return synchronous(Run(generator, trainer, 0))


def test_the_reward_of_a_toy_task_rises(reference: Run) -> None:
    assert reference.ages == [{0}] * STEPS
    assert reference.rewards[0] < 0.1
    assert min(reference.rewards[-3:]) > 0.8, reference.rewards


def test_bound_0_gives_the_losses_of_a_synchronous_loop(reference: Run, generator: ActorMesh, trainer: Ranks) -> None:
    bound = overlapped(Run(generator, trainer, 100), is_bound=True)
    assert bound.ages == reference.ages
    assert bound.losses == reference.losses
    assert bound.rewards == reference.rewards


def test_without_a_bound_the_losses_are_others(reference: Run, generator: ActorMesh, trainer: Ranks) -> None:
    """Otherwise the test of bound 0 could not fail."""
    free = overlapped(Run(generator, trainer, 200), is_bound=False)
    assert free.ages == [{step} for step in range(STEPS)]
    assert free.losses[0] == reference.losses[0]
    assert free.losses != reference.losses
