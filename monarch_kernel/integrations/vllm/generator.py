"""The actor that generates with vLLM."""

from __future__ import annotations

from typing import Any

from monarch_kernel.actor import Actor, ProcMesh, context, endpoint
from monarch_kernel.integrations.vllm.engine import Engine
from monarch_kernel.integrations.vllm.values import Completion, is_too_old, next_version

__all__ = ["Generator"]


class Generator(Actor):
    """An engine of vLLM in each rank of a mesh, with the weights of a trainer.

    ``generators.spawn("generator", Generator, "org/model", trainer=trainers)`` starts one engine in each rank. Their endpoints
    handle one call at a time, so an update waits until the generation that runs has ended, and what is generated has one
    version of the weights.

    Args:
        model: the model as vLLM takes it: a folder or a name.
        trainer: the mesh that has the weights. With it the engine takes the trainer's weights when it starts, also where it
            replaces one that died, and `update` needs no arguments.
        weights: the variable of the trainer's ranks that holds the model.
        version: a variable of the trainer's ranks that holds the version of these weights, such as the step; without it
            versions count the updates.
        max_staleness: how many versions the weights may be behind the ``step`` that is passed to `generate`; None is no bound.
        **engine_args: more arguments of ``vllm.LLM``, such as ``max_model_len=2048``.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: it can't use the device or the process group of the rank.
        ValueError: an argument has no meaning for a generator.
    """

    def __init__(
        self,
        model: str,
        *,
        trainer: ProcMesh | None = None,
        weights: str = "model",
        version: str | None = None,
        max_staleness: int | None = None,
        **engine_args: Any,
    ) -> None:
        self._engine: Engine | None = None
        self._trainer = trainer
        self._weights = weights
        self._version_name = version
        self._max_staleness = max_staleness
        self._version = 0
        self._damage = ""
        self._engine = Engine(model, engine_args)
        if trainer is not None:
            self._take(trainer, weights, version)

    @endpoint
    def generate(self, prompts: Any, sampling: Any = None, step: int | None = None) -> list[Completion]:
        """Generate completions, in the order of the prompts.

        Args:
            prompts: texts, or prompts as lists of token ids; also a single one.
            sampling: ``vllm.SamplingParams``, or a dict of its arguments; by default those of the model.
            step: the trainer's version. If the weights here are further behind than ``max_staleness``, they are updated
                first.

        Raises:
            RuntimeError: the weights are too old, also after an update, or an update has failed halfway.
        """
        if is_too_old(self._version, step, self._max_staleness):
            if self._trainer is not None:
                self._take(self._trainer, self._weights, self._version_name)
            if is_too_old(self._version, step, self._max_staleness):
                raise RuntimeError(
                    f"the generator's weights have version {self._version}, more than {self._max_staleness} behind step "
                    f"{step}: call update() first"
                )
        if self._damage:
            raise RuntimeError(f"{self._damage}; call update() again before generate()")
        return self._running.generate(prompts, sampling, self._version)

    @endpoint
    def update(
        self, trainer: ProcMesh | None = None, weights: str | None = None, version: str | int | None = None
    ) -> int:
        """Take the current weights of a trainer, from rank to rank, and return their version.

        All weights are read, and their names and shapes checked, before the first one is replaced. After an error until then
        the generator has its old weights. After an error of vLLM's loader the weights are undefined, and `generate` refuses
        until an update succeeds. The ranks of the trainer can shard the model in any way.

        Args:
            trainer: the mesh that has the weights; by default that of the constructor.
            weights: the variable there that holds the model; by default that of the constructor.
            version: the version of the weights, or the variable there that holds it; by default that of the constructor.

        Raises:
            MoveError: names or shapes do not match, or the trainer wrote to the weights meanwhile.
            RemoteError: the trainer has no such variable.
            SupervisionError: a rank of the trainer has died.
        """
        trainer = self._trainer if trainer is None else trainer
        if trainer is None:
            raise ValueError("update() needs a trainer: pass the mesh that has the weights, here or to the Generator")
        return self._take(trainer, weights or self._weights, self._version_name if version is None else version)

    @endpoint
    def version(self) -> int:
        """Return the version of the weights."""
        return self._version

    def _take(self, trainer: ProcMesh, weights: str, version: str | int | None) -> int:
        names = [weights, version] if isinstance(version, str) else [weights]
        engine, start = self._running, f"{weights}."

        def check(tensors: Any) -> None:
            given = {path.removeprefix(start): shape for path, (_, shape) in tensors.items() if path.startswith(start)}
            engine.check(given, f"{weights!r} on {trainer.name}")

        found = trainer.fetch_state(names, check=check, turn=context().actor_instance.rank.rank)
        number = found.pop(version) if isinstance(version, str) else version
        after = next_version(self._version, number)
        state = [(path.removeprefix(start), tensor) for path, tensor in found.items()]
        self._damage = f"an update to version {after} has failed halfway, so the weights are undefined"
        engine.load(state, after)
        self._damage = ""
        self._version = after
        return after

    @property
    def _running(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the generator's engine has not started")
        return self._engine

    def __cleanup__(self, exc: BaseException | None) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.close()
