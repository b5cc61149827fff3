"""transformers loads what ranks have saved in its format; ``make test-field`` has that package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import Ranks

transformers: Any = pytest.importorskip("transformers", reason="transformers is in the environment of make test-field")

pytestmark = pytest.mark.slow  # ranks import transformers, which takes seconds

PRELUDE = """
import torch, torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig
from monarch_kernel import checkpoint
from monarch_kernel.train.parallel import parallelize

def llama(tied):
    torch.manual_seed(0)  # dtype= keeps the frequencies of the positions in float32, as from_pretrained does; .to() would not
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.5,
        tie_word_embeddings=tied), dtype=torch.bfloat16)
"""


@pytest.fixture(autouse=True)
def no_bars() -> Iterator[None]:
    """The library shows its progress with tqdm, and tqdm starts a thread that watches the bars and stays."""
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


@pytest.fixture(scope="module")
def ranks(session: None) -> Iterator[Ranks]:
    ranks = Ranks(2, PRELUDE)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_model_that_ranks_have_trained_is_loaded_with_the_same_logits(
    ranks: Ranks, tmp_path: Path, tied: bool
) -> None:
    logits = ranks.run(
        f"""
model = llama({tied})
parallelize(model, mesh, "fsdp", quiet=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens = torch.arange(16).reshape(2, 8)
model(input_ids=tokens, labels=tokens).loss.backward()
optimizer.step()
checkpoint.save({str(tmp_path / "llama")!r}, format="hf", model=model)
with torch.no_grad():
    logits = model(input_ids=tokens).logits.float()
logits.tolist()
"""
    )
    assert logits[0] == logits[1]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype="auto")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.bfloat16
    with torch.no_grad():
        again = model(input_ids=torch.arange(16).reshape(2, 8)).logits.float()
    torch.testing.assert_close(again, torch.tensor(logits[0]), atol=2e-2, rtol=0)
