"""An engine of vLLM in this process: it generates, and loads weights."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from typing import Any

from monarch_kernel.integrations.vllm.values import (
    NOT_INSTALLED,
    Completion,
    check_weights,
    device_problem,
    prompts_of,
    unsupported,
)

__all__ = ["Engine"]

_SETTINGS = {
    # The engine runs in this process, so that it can load tensors that are here.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # each start prints 50 lines at INFO, and 20 at WARNING
}


class Engine:
    """An engine of vLLM in this process.

    Args:
        model: the model as vLLM takes it: a folder or a name.
        engine_args: more arguments of ``vllm.LLM``.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: it can't use this rank's device or process group.
        ValueError: an argument has no meaning for a generator.
    """

    def __init__(self, model: str, engine_args: Mapping[str, Any]) -> None:
        import torch

        group = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if problem := unsupported(engine_args, group):
            raise (RuntimeError if group > 1 else ValueError)(problem)
        os.environ.update(_SETTINGS)
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        try:
            import vllm
        except ModuleNotFoundError as error:
            if error.name != "vllm":
                raise
            raise ImportError(NOT_INSTALLED.format(python=sys.executable)) from None
        from vllm.platforms import current_platform

        from monarch_kernel.integrations.vllm.transfer import BACKEND, register

        if problem := device_problem(current_platform.device_type, torch.cuda.is_available(), _package()):
            raise RuntimeError(problem)
        register()
        self._llm = vllm.LLM(model, weight_transfer_config={"backend": BACKEND}, **engine_args)
        self._sampling: Any = vllm.SamplingParams
        self._has_tokenizer = not self._llm.model_config.skip_tokenizer_init
        self._shapes: tuple[dict[str, tuple[int, ...]], set[str], str] | None = None

    def generate(self, prompts: Any, sampling: Any, weights_version: int) -> list[Completion]:
        """Generate completions of all prompts, in their order."""
        if isinstance(sampling, Mapping):
            sampling = self._sampling(**sampling)
        if sampling is not None and not self._has_tokenizer:
            sampling.detokenize = False
        outputs = self._llm.generate(prompts_of(prompts), sampling, use_tqdm=False)
        return [
            Completion(
                number,
                tuple(output.prompt_token_ids or ()),
                tuple(each.token_ids),
                each.text or "",
                weights_version,
                _logprobs(each),
                each.finish_reason,
            )
            for number, output in enumerate(outputs)
            for each in output.outputs
        ]

    def check(self, given: Mapping[str, tuple[int, ...]], where: str) -> None:
        """Check that tensors have the names and shapes of the model's checkpoint, as far as transformers knows the model.

        Args:
            given: name -> shape.
            where: what has them, for the message.

        Raises:
            MoveError: they do not match.
        """
        if self._shapes is None:
            self._shapes = _checkpoint_of(self._llm.model_config.hf_config)
        expected, optional, architecture = self._shapes
        if expected:
            check_weights(given, expected, optional, architecture, where)

    def load(self, weights: Iterable[tuple[str, Any]], weights_version: int) -> None:
        """Load weights, and forget what has been computed with the old ones."""
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": {"weights": weights}})
        self._llm.finish_weight_update(str(weights_version))
        self._llm.reset_prefix_cache()

    def close(self) -> None:
        """End the engine."""
        self._llm.llm_engine.engine_core.shutdown()


def _checkpoint_of(config: Any) -> tuple[dict[str, tuple[int, ...]], set[str], str]:
    """Return name -> shape of the weights in a checkpoint, the names that repeat another one, and the model's class.

    All are empty for a model that transformers does not have.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError):  # an architecture that only vLLM has
        return {}, set(), ""
    shapes: dict[str, tuple[int, ...]] = {}
    seen: dict[int, str] = {}
    repeated = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        shapes[name] = tuple(tensor.shape)
        if seen.setdefault(id(tensor), name) != name:
            repeated.add(name)
    return shapes, repeated, type(model).__name__


def _logprobs(output: Any) -> tuple[float, ...] | None:
    """Return the log probability of each token that was chosen, if there are any."""
    if output.logprobs is None:
        return None
    return tuple(float(each[token].logprob) for token, each in zip(output.token_ids, output.logprobs))


def _package() -> str:
    """Return the name of the package that has installed vLLM, and its version."""
    names = packages_distributions().get("vllm", ["vllm"])
    try:
        return f"{names[0]} {version(names[0])}"
    except PackageNotFoundError:
        return names[0]
