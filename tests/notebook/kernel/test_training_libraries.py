"""DeepSpeed, accelerate, transformers and TRL run unmodified in cells of four ranks; ``make test-field`` has these packages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.waiting import LONG_S

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Cell, Notebook

pytestmark = [
    pytest.mark.slow,  # ranks import the libraries, and DeepSpeed compiles a C++ extension once
    pytest.mark.timeout(1200),
]

ZERO = """%%remote t
import deepspeed, torch
from torch import nn

data = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))

def train(stage):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        config={"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": stage}},
    )
    inputs = data[16 * rank : 16 * (rank + 1)]
    losses = []
    for _ in range(5):
        loss = (engine(inputs).squeeze() - inputs.sum(1)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
"""
COMPILES_S = 900.0
"""The C++ compiler takes 100 s of processor time for the extension, once on a machine."""
# What the stages share out is summed in another order.
TOLERANCE = 1e-4

TUNES = """%%remote t
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

torch.manual_seed(0)
words = "the cat sat on a mat and saw dog run".split()
vocabulary = {{word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, pad_token_id=0, eos_token_id=1, bos_token_id=None))
data = Dataset.from_dict({{"text": [" ".join(words[i % 5 : i % 5 + 5]) for i in range(64)]}})
arguments = SFTConfig(
    {folder!r}, max_steps=10, per_device_train_batch_size=2, learning_rate=0.01, logging_steps=5, use_cpu=True, bf16=False,
    report_to=[], save_strategy="no")
trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
trainer.train();
"""
TUNED = """
import hashlib
state = b"".join(value.detach().numpy().tobytes() for value in trainer.model.state_dict().values())
losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
trainer.state.global_step, trainer.args.world_size, losses, hashlib.sha256(state).hexdigest()
"""
MAX_LINES = 15

# The same data in the same steps: four ranks take a quarter of each batch.
TRAINS = """%%remote {mesh}
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2))
rows = [{{"input_ids": row, "labels": row}} for row in torch.randint(0, 64, (64, 16))]
arguments = TrainingArguments({folder!r}, max_steps=4, per_device_train_batch_size=16 // world_size, optim="sgd",
    learning_rate=0.5, logging_steps=1, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True)
trainer = Trainer(model, arguments, train_dataset=rows)
trainer.train();
losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
"""
STEPS = """%%remote {mesh}
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 8)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(8, 1)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(x, x.sum(1)), 16 // world_size))
losses = []
for inputs, targets in loader:
    loss = (model(inputs).squeeze(1) - targets).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach()).mean().item())
model = accelerator.unwrap_model(model)
"""
TRAINED = "world_size, losses, [value.double().sum().item() for value in model.parameters()]"


def printed(cell: Cell) -> list[str]:
    """The lines below a cell: its streams, and the last state of each block of progress bars."""
    blocks: dict[str, str] = {}
    for message in cell.of_type("display_data", "update_display_data"):
        content = message["content"]
        if "-bars-" in (id := content.get("transient", {}).get("display_id", "")):
            blocks[id] = content["data"]["text/plain"]
    return [line for text in (cell.stdout, cell.stderr, *blocks.values()) for line in text.splitlines() if line]


def test_deepspeed_has_equal_losses_with_each_stage_of_zero(four: Notebook) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is in the environment of make test-field")
    four.ok(ZERO, LONG_S * 5)
    by_stage: list[Any] = []
    for stage in range(4):
        cell = four.run(f"%%remote t --out found\ntrain({stage})", COMPILES_S)
        assert cell.ok, cell.error
        by_stage.append(four.value("list(found.values())"))
    plain = by_stage[0]
    assert len(plain) == 4
    assert all(losses[-1] < losses[0] for losses in plain)
    for found in by_stage[1:]:
        for rank, losses in enumerate(found):
            assert losses == pytest.approx(plain[rank], rel=TOLERANCE)


@pytest.mark.parametrize(("package", "code"), [("transformers", TRAINS), ("accelerate", STEPS)])
def test_four_ranks_train_twice_as_one_process_does(four: Notebook, tmp_path: Path, package: str, code: str) -> None:
    pytest.importorskip(package, reason=f"{package} is in the environment of make test-field")
    four.ok("%mesh up one -n 1 --device cpu")
    try:
        found: dict[str, Any] = {}
        for mesh in ("one", "t", "t"):
            cell = four.run(code.format(mesh=mesh, folder=str(tmp_path)), LONG_S * 5)
            assert cell.ok, cell.error
            four.ok(f"%%remote {mesh} --out found\n{TRAINED}")
            by_rank: Any = four.value("list(found.values())")
            assert all(each == by_rank[0] for each in by_rank)
            assert found.setdefault(mesh, by_rank[0]) == by_rank[0]
        assert (found["one"][0], found["t"][0]) == (1, 4)
        losses, weights = found["one"][1:]
        assert losses[-1] < losses[0]
        assert found["t"][1] == pytest.approx(losses, rel=TOLERANCE)
        assert found["t"][2] == pytest.approx(weights, rel=TOLERANCE, abs=TOLERANCE)
    finally:
        four.ok("%mesh down one")


def test_sfttrainer_of_trl_trains_twice_and_its_cell_has_few_lines(four: Notebook, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="trl is in the environment of make test-field")
    for _ in range(2):
        cell = four.run(TUNES.format(folder=str(tmp_path)), LONG_S * 5)
        assert cell.ok, cell.error
        lines = printed(cell)
        assert any("train_loss" in line for line in lines)
        assert len(lines) <= MAX_LINES, "\n".join(lines)
        four.ok("%%remote t --out found\n" + TUNED)
        found: Any = four.value("list(found.values())")
        steps, ranks, losses, _ = found[0]
        assert (steps, ranks) == (10, 4)
        assert losses[-1] < losses[0]
        assert len({state for *_, state in found}) == 1
