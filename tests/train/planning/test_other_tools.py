"""Plans as configurations of accelerate and DeepSpeed."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from monarch_kernel.errors import PlanError
from monarch_kernel.train import parallel
from monarch_kernel.train.parallel import Plan, deepspeed_config, plan_for
from monarch_kernel.train.planning.other_tools import accelerate_config


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *[Block() for _ in range(4)])


def plan(strategy: Any, axes: dict[str, int], **options: Any) -> Plan:
    return plan_for(model(), axes, strategy, example=torch.zeros(2, 8), memory_nbytes=1 << 30, **options)


def test_fsdp_names_the_classes_that_it_wraps_and_ddp_none() -> None:
    config = accelerate_config(plan("fsdp", {"dp": 4}, precision="bfloat16", units=("1", "2", "3", "4")), model())
    assert (config["distributed_type"], config["num_processes"], config["mixed_precision"]) == ("FSDP", 4, "bf16")
    assert config["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "Block"
    assert config["fsdp_config"]["fsdp_version"] == 2
    ddp = accelerate_config(plan("auto", {"dp": 2}), model())
    assert (ddp["distributed_type"], "fsdp_config" in ddp) == ("MULTI_GPU", False)


def test_copies_of_shards_have_both_sizes() -> None:
    found = plan("hsdp", {"hosts": 2, "gpus": 4})
    assert accelerate_config(found, model())["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 4,
    }
    with pytest.raises(PlanError, match="the plan shards along gpus and copies along hosts, and DeepSpeed has removed"):
        deepspeed_config(found)


def test_deepspeed_gets_the_stage_of_zero_and_the_precision() -> None:
    assert deepspeed_config(plan("fsdp", {"dp": 4}, precision="bfloat16"), 8) == {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
    }
    assert deepspeed_config(plan("ddp", {"dp": 4}))["zero_optimization"] == {"stage": 0}


@pytest.mark.parametrize(("ranks", "has_gpu", "warns"), [(2, False, True), (2, True, False), (1, False, False)])
def test_a_machine_without_gpus_is_warned_of(
    ranks: int, has_gpu: bool, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There accelerate starts processes of which each trains alone, and does not say so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    found = plan("auto", {"dp": ranks})
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        assert parallel.accelerate_config(found, model()) == accelerate_config(found, model())
    assert [each.filename for each in shown] == [__file__] * warns
    assert all("ACCELERATE_USE_CPU=true accelerate launch" in str(each.message) for each in shown)


@pytest.mark.parametrize("batch", [0, -4])
def test_a_batch_below_one_is_refused(batch: int) -> None:
    with pytest.raises(ValueError, match=rf'batch={batch}\): batch is the number of samples .* such as 8, or "auto"$'):
        deepspeed_config(plan("ddp", {"dp": 4}), batch)


@pytest.mark.parametrize("batch", ["x", "8", 2.5, True, None])
def test_a_batch_that_is_no_number_is_refused(batch: Any) -> None:
    with pytest.raises(TypeError, match=rf"batch={re.escape(repr(batch))}\): batch is the number of samples"):
        deepspeed_config(plan("ddp", {"dp": 4}), batch)


@pytest.mark.parametrize("given", ["auto", None, {"dp": 4}])
def test_what_is_no_plan_is_refused_with_the_way_to_make_one(given: Any) -> None:
    advice = rf"takes a plan, not {re.escape(repr(given))} \(of type \w+\): make one with plan_for\(model"
    with pytest.raises(TypeError, match=rf"^accelerate_config\(\) {advice}"):
        accelerate_config(given, model())
    with pytest.raises(TypeError, match=rf"^deepspeed_config\(\) {advice}"):
        deepspeed_config(given)


def test_a_plan_for_another_model_is_refused() -> None:
    found = plan("fsdp", {"dp": 4}, units=("1", "2", "3", "4"))
    with pytest.raises(PlanError, match="the plan wraps 4, which this Sequential does not have, .* plan_for"):
        accelerate_config(found, model()[:4])
    with pytest.raises(TypeError, match="the model that the plan was made for, a torch.nn.Module, not a str"):
        accelerate_config(found, "gpt2")


@pytest.mark.parametrize("tool", ["accelerate", "DeepSpeed"])
def test_split_matrices_are_refused(tool: str) -> None:
    split = plan("tp", {"tp": 2}, tensor={"*.up": "colwise", "*.down": "rowwise"})
    with pytest.raises(PlanError, match=f"the plan splits matrices along tp, and {tool} has no setting"):
        accelerate_config(split, model()) if tool == "accelerate" else deepspeed_config(split)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_accelerate_reads_the_configuration(strategy: str, tmp_path: Path) -> None:
    reading = pytest.importorskip(
        "accelerate.commands.config.config_args", reason="accelerate is in the environment of make test-field"
    )
    config = accelerate_config(plan(strategy, {"hosts": 2, "gpus": 2}), model())
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = reading.load_config_from_file(str(tmp_path / "config.json"))
    assert read.num_processes == 4
    assert read.distributed_type.value == config["distributed_type"]
    assert read.parallelism_config == config.get("parallelism_config", {})


@pytest.mark.slow  # it imports DeepSpeed
@pytest.mark.parametrize(("strategy", "stage"), [("ddp", 0), ("fsdp", 3)])
def test_deepspeed_reads_the_configuration(strategy: str, stage: int) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is in the environment of make test-field")
    from deepspeed.runtime.config import DeepSpeedConfig

    read = DeepSpeedConfig(deepspeed_config(plan(strategy, {"hosts": 2, "gpus": 2}, precision="bfloat16"), 8))
    assert (read.zero_optimization_stage, read.bfloat16_config.enabled) == (stage, True)
    assert read.train_micro_batch_size_per_gpu == 8
