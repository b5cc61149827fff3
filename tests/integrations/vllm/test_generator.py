"""vLLM generates what transformers generates, with the weights of ranks that train; `make test-vllm` installs it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import ActorMesh, ProcMesh, endpoint
from monarch_kernel.errors import ActorError
from monarch_kernel.integrations.vllm import Completion, Generator
from tests.integrations.vllm.engines import START_S, WITH_ENGINE, engine_mesh
from tests.support.processes import kill_ranks
from tests.support.ranks import Ranks

pytestmark = WITH_ENGINE

# The default spread of initial weights gives a model whose tokens hardly depend on them.
PRELUDE = """
import torch, torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from monarch_kernel import checkpoint
from monarch_kernel.train.parallel import parallelize

config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=256, initializer_range=0.5, bos_token_id=1, eos_token_id=2)

def make(seed):
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)

def train(seed):
    "Take weights that no rank holds alone."
    global model, step
    model, step = make(seed), seed
    parallelize(model, mesh, "fsdp", quiet=True)

def expected(seed, prompt):
    tokens = make(seed).generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0)
    return tuple(tokens[0, len(prompt):].tolist())
"""
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
SHORT = [5, 6, 7, 8]
UPDATES = 20
LONG = random.Random(0).choices(range(3, 256), k=200)  # fills a block of the prefix cache, which has 128 tokens


@pytest.fixture(scope="module")
def trainer(session: None) -> Iterator[Ranks]:
    ranks = Ranks(2, PRELUDE)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def folder(trainer: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a tiny model, as ranks write one that they have sharded."""
    path = tmp_path_factory.mktemp("tiny")
    trainer.run(f"train(0)\ncheckpoint.save({str(path / 'llama')!r}, format='hf', model=model)")
    return path / "llama"


@pytest.fixture(scope="module")
def mesh(session: None) -> Iterator[ProcMesh]:
    yield from engine_mesh()


@pytest.fixture(scope="module")
def generator(mesh: ProcMesh, folder: Path, trainer: Ranks) -> ActorMesh:
    actor = mesh.spawn(
        "generator",
        Unchecked,
        str(folder),
        trainer=trainer.mesh,
        version="step",
        max_staleness=1,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
    )
    actor.initialized.get(START_S)
    return actor


class Unchecked(Generator):
    """A generator that can leave out its check, as for a model that only vLLM knows."""

    @endpoint
    def set_check(self, is_on: bool) -> None:
        if is_on:
            del self._running.check
        else:
            self._running.check = lambda given, where: None


def generate(generator: Any, prompts: Any, **more: Any) -> list[Completion]:
    found: list[Completion] = generator.generate.call_one(prompts, GREEDY, **more).get(START_S)
    return found


def update(generator: Any, *args: Any) -> int:
    version: int = generator.update.call_one(*args).get(START_S)
    return version


def test_tokens_are_those_of_transformers_before_and_after_each_update(generator: Any, trainer: Ranks) -> None:
    """The generator starts with the weights of version 0; the trainer has new ones before each of 20 updates."""
    expected = [trainer.run(f"expected(0, {prompt})")[0] for prompt in (SHORT, LONG)]
    for version in range(1, UPDATES + 1):
        trainer.run(f"train({version})")
        assert [each.token_ids for each in generate(generator, [SHORT, LONG])] == expected
        assert update(generator) == version
        found = generate(generator, [SHORT, LONG])
        expected = [trainer.run(f"expected({version}, {prompt})")[0] for prompt in (SHORT, LONG)]
        assert [each.token_ids for each in found] == expected
        assert [(each.prompt, each.version, each.finish_reason) for each in found] == [
            (0, version, "length"),
            (1, version, "length"),
        ]


def test_weights_that_do_not_fit_change_nothing(generator: Any, trainer: Ranks) -> None:
    trainer.run("train(21)")
    update(generator)
    before = generate(generator, SHORT)
    trainer.run("wrapped = {'policy': model}")
    trainer.run("other = {**model.state_dict(), 'lm_head.weight': torch.zeros(9, 128), 'value.weight': torch.zeros(1)}")
    with pytest.raises(ActorError, match=r"without the prefix 'policy\.' they would match"):
        update(generator, trainer.mesh, "wrapped")
    with pytest.raises(
        ActorError, match=r"has no 'value\.weight'\n.*lm_head\.weight is \[9, 128\] there, and \[256, 128\]"
    ):
        update(generator, trainer.mesh, "other")
    with pytest.raises(ActorError, match="name 'modell' is not defined"):
        update(generator, trainer.mesh, "modell")
    assert generate(generator, SHORT) == before
    assert generator.version.call_one().get(START_S) == 21


def test_nothing_is_generated_after_an_update_that_failed_halfway_until_one_succeeds(
    generator: Any, trainer: Ranks
) -> None:
    trainer.run(
        "train(21)\nbroken = {**model.state_dict(), 'model.layers.1.self_attn.k_proj.weight': torch.zeros(9, 128)}"
    )
    generator.set_check.call_one(False).get(START_S)
    with pytest.raises(ActorError):
        update(generator, trainer.mesh, "broken")
    generator.set_check.call_one(True).get(START_S)
    with pytest.raises(ActorError, match=r"an update to version 21 has failed halfway.*call update\(\) again"):
        generate(generator, SHORT)
    assert update(generator) == 21
    assert generate(generator, SHORT)[0].token_ids == trainer.run(f"expected(21, {SHORT})")[0]


def test_weights_beyond_the_bound_are_renewed_or_refused(generator: Any, trainer: Ranks) -> None:
    trainer.run("train(22)")
    update(generator)
    trainer.run("train(23)")
    assert generate(generator, SHORT, step=23)[0].version == 22  # one behind is allowed
    trainer.run("train(24)")
    (found,) = generate(generator, SHORT, step=24)
    assert (found.version, found.token_ids) == (24, trainer.run(f"expected(24, {SHORT})")[0])
    with pytest.raises(ActorError, match="version 24, more than 1 behind step 27: call update"):
        generate(generator, SHORT, step=27)


def test_samples_of_a_group_have_log_probabilities(generator: Any) -> None:
    sampling = {"n": 4, "temperature": 1.0, "max_tokens": 5, "logprobs": 0, "ignore_eos": True}
    found = generator.generate.call_one([SHORT, [9, 10]], sampling).get(START_S)
    assert [each.prompt for each in found] == [0] * 4 + [1] * 4
    assert all(len(each.logprobs) == 5 and max(each.logprobs) <= 0 for each in found)
    assert len({each.token_ids for each in found}) > 2


def test_a_rank_of_a_process_group_is_refused(trainer: Ranks, folder: Path) -> None:
    actor = trainer.mesh.spawn("misplaced", Generator, str(folder))
    with pytest.raises(ActorError, match="in a process group of 2 ranks, and vLLM needs one for itself"):
        actor.initialized.get(START_S)


def test_the_engine_is_in_the_process_of_its_rank(generator: Any, mesh: ProcMesh) -> None:
    pid = next(iter(mesh.view().ranks)).pid
    assert pid != os.getpid()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert children == []


def test_a_replacement_has_the_newest_weights(generator: Any, mesh: ProcMesh, trainer: Ranks) -> None:
    """Comes last: it ends the mesh, because a test leaves no process that it has started."""
    trainer.run("train(25)")
    update(generator)
    trainer.run("train(26)")
    kill_ranks(mesh, 0)
    assert mesh.heal().get(START_S) == (0,)
    (found,) = generate(generator, SHORT)
    assert (found.version, found.token_ids) == (26, trainer.run(f"expected(26, {SHORT})")[0])
    mesh.stop().get(START_S)
