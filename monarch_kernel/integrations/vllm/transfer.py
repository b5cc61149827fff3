"""vLLM's side of an update: a weight transfer engine that loads tensors which are already in this process."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["BACKEND", "register"]

BACKEND = "monarch"
"""The name of the engine in vLLM's registry."""


@functools.cache
def register() -> None:
    """Register the engine with vLLM in this process, once. Only this imports vLLM."""
    from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

    @dataclass
    class Start(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is optional, so it has no types here
        """There is nothing to connect."""

    @dataclass
    class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
        """Names and tensors, as in a checkpoint."""

        weights: Iterable[tuple[str, Any]] = field(default_factory=tuple)

    class Engine(WeightTransferEngine):  # type: ignore[misc]
        """Loads tensors by vLLM's layerwise reload, which also repacks and quantizes them as at the start."""

        init_info_cls = Start
        update_info_cls = Update

        def init_transfer_engine(self, init_info: Any) -> None:
            pass

        def start_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: Any) -> None:
            try:
                self.model.load_weights(update_info.weights)
            except BaseException:
                self._drop_partial_layers()
                raise

        def _drop_partial_layers(self) -> None:
            """Forget what was loaded of layers that are not complete, or the next update would count and apply it."""
            from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

            for layer in self.model.modules():
                info = get_layerwise_info(layer)
                if info.can_load():
                    info.loaded_weights.clear()
                    info.load_numel = 0
            self.finish_weight_update()

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            pass

    WeightTransferEngineFactory.register_engine(BACKEND, Engine)
