"""A plan as the configuration of other tools: what accelerate and DeepSpeed need to spread a model in the same way."""

from __future__ import annotations

from typing import Any

from monarch_kernel.errors import PlanError
from monarch_kernel.train.planning.plan import Plan

__all__ = ["accelerate_config", "deepspeed_config"]

_SHOWN = 60
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}


def accelerate_config(plan: Plan, model: Any) -> dict[str, Any]:
    """Return what ``accelerate launch --config_file`` reads, as YAML or JSON.

    Args:
        plan: the plan.
        model: the model, whose classes the configuration names.

    Raises:
        TypeError: ``plan`` is no plan, or ``model`` is no module.
        PlanError: accelerate has no such strategy, or the plan was made for another model.
    """
    _check_plan("accelerate_config", plan)
    _check_model(plan, model)
    _refuse_tensor_parallel(plan, "accelerate")
    n_ranks = _size(plan, tuple(plan.axes))
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": {"none": "NO", "ddp": "MULTI_GPU"}.get(plan.strategy, "FSDP"),
        "mixed_precision": _PRECISIONS.get(plan.precision, "no"),
        "num_machines": 1,
        "num_processes": n_ranks,
    }
    if plan.strategy in ("fsdp", "hsdp"):
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if plan.units else "NO_WRAP",
            "fsdp_activation_checkpointing": bool(plan.checkpoint),
            "fsdp_reshard_after_forward": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        if plan.units:
            config["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] = ",".join(_classes(plan, model))
    if plan.strategy == "hsdp":
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": _size(plan, plan.copy_axes),
            "parallelism_config_dp_shard_size": _size(plan, plan.shard_axes),
        }
    return config


def deepspeed_config(plan: Plan, batch: int | str = "auto") -> dict[str, Any]:
    """Return what ``deepspeed.initialize(config=...)`` takes, and the Trainer of transformers as ``deepspeed=...``.

    Args:
        plan: the plan.
        batch: samples of a rank in a step; ``"auto"``: the Trainer of transformers fills it in.

    Raises:
        TypeError: ``plan`` is no plan, or ``batch`` is neither a number nor ``"auto"``.
        ValueError: ``batch`` is below 1.
        PlanError: DeepSpeed has no such strategy.
    """
    _check_plan("deepspeed_config", plan)
    if batch != "auto":
        meaning = 'the number of samples of a rank in a step, such as 8, or "auto"'
        what = f"deepspeed_config(plan, batch={batch!r}): batch is {meaning}"
        if not isinstance(batch, int) or isinstance(batch, bool):
            raise TypeError(what)
        if batch < 1:
            raise ValueError(what)
    _refuse_tensor_parallel(plan, "DeepSpeed")
    if plan.strategy == "hsdp":
        raise PlanError(
            f"the plan shards along {', '.join(plan.shard_axes)} and copies along {', '.join(plan.copy_axes)}, and DeepSpeed "
            'has removed its setting for that (MiCS): use parallelize, or the strategy "fsdp", which is ZeRO 3 over all ranks'
        )
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": "auto" if batch == "auto" else 1,
        "zero_optimization": {"stage": 3 if plan.strategy == "fsdp" else 0},
        "bf16": {"enabled": plan.precision == "bfloat16"},
        "fp16": {"enabled": plan.precision == "float16"},
    }


def _check_plan(function: str, plan: Any) -> None:
    if not isinstance(plan, Plan):
        short = repr(plan)[:_SHOWN]
        raise TypeError(
            f"{function}() takes a plan, not {short} (of type {type(plan).__name__}): make one with plan_for(model, "
            '{"dp": 8}, "auto", example=batch), or take that of a model that parallelize has returned: plan_of(model)'
        )


def _check_model(plan: Plan, model: Any) -> None:
    """Check that a model has the modules that a plan wraps."""
    if not hasattr(model, "named_modules"):
        raise TypeError(
            "accelerate_config(plan, model) takes the model that the plan was made for, a torch.nn.Module, not a "
            f"{type(model).__name__}"
        )
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    if missing := [name for name in plan.units if name not in modules]:
        raise PlanError(
            f"the plan wraps {missing[0]}, which this {type(model).__name__} does not have, so it was made for another model: "
            "make one for this model with plan_for(model, ...)"
        )


def _refuse_tensor_parallel(plan: Plan, tool: str) -> None:
    if plan.tensor:
        raise PlanError(
            f"the plan splits matrices along {plan.tensor_axis}, and {tool} has no setting for single layers: use parallelize, "
            "or a plan without tensor="
        )


def _size(plan: Plan, names: tuple[str, ...]) -> int:
    size = 1
    for name in names:
        size *= plan.axes[name]
    return size


def _classes(plan: Plan, model: Any) -> list[str]:
    """The classes of the units that are wrapped; ``fully_shard`` makes subclasses of those of the user."""
    found: dict[str, None] = {}
    for name in plan.units:
        kinds = type(model.get_submodule(name)).__mro__
        found[next(kind.__name__ for kind in kinds if not kind.__module__.startswith("torch.distributed."))] = None
    return list(found)
