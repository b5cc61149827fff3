"""vLLM on a mesh: an actor that generates with a trainer's current weights.

Theory of operation
===================

`Generator` is an actor that runs one engine of vLLM in its own process (`engine.py`), on the thread of the actor. An update has
three parts:

1. `ProcMesh.fetch_state` reads the trainer's weights into memory of this process, straight from the ranks that hold them. Names
   and shapes are checked before anything is read, by the model that transformers makes of the same configuration.
2. The source ends the leases, and says if it has written to the weights meanwhile. Up to here nothing has changed.
3. A weight transfer engine (`transfer.py`) gives the tensors to vLLM's layerwise reload, which repacks and quantizes them as it
   does at the start. Then the prefix cache is emptied, because its entries were computed with the old weights.

An engine that replaces one that died runs the constructor again, which takes the current weights of the trainer.

`values.py` is pure. Importing this package does not import vLLM: that takes many seconds, and only the ranks need it.
"""

from __future__ import annotations

from monarch_kernel.integrations.vllm.generator import Generator
from monarch_kernel.integrations.vllm.values import Completion

__all__ = ["Completion", "Generator"]
