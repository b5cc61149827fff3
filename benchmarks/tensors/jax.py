"""JAX in one process with several CPU devices."""

# The peer is optional, so its types may be missing.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.tensors.work import AXES, WIDE, data, main, median_of, mlp, no_such, size_of

COUNT = 500
STEPS = 5
RATE = 0.01


def forward(weights: Any, x: Any) -> Any:
    for number, (w, b) in enumerate(weights):
        x = x @ w.T + b
        x = jnp.maximum(x, 0) if number < 2 else x
    return x


def loss_of(weights: Any, x: Any, y: Any) -> Any:
    logits = jax.nn.log_softmax(forward(weights, x))
    return -jnp.take_along_axis(logits, y[:, None], axis=1).mean()


def step(weights: Any, x: Any, y: Any) -> Any:
    """Train by SGD; returns the new weights and the loss."""
    loss, gradients = jax.value_and_grad(loss_of)(weights, x, y)
    return jax.tree.map(lambda w, g: w - RATE * g, weights, gradients), loss


class Jax:
    """Arrays on the devices of this process."""

    def __init__(self, ranks: int) -> None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", ranks)
        self.devices = numpy.array(jax.devices())
        self.mesh = Mesh(self.devices, ("ranks",))

    def whole(self, value: Any) -> Any:
        """Place an array on each device."""
        return jax.device_put(value, NamedSharding(self.mesh, PartitionSpec()))

    def figure(self, name: str) -> float:
        """Take one figure."""
        if name == "matmul":
            x = jax.device_put(jnp.ones((WIDE, WIDE)), NamedSharding(self.mesh, PartitionSpec("ranks")))
            w = self.whole(jnp.ones((WIDE, WIDE)))
            return 1e3 * median_of(lambda: float((x @ w).sum()), 1)
        if name == "fetch":
            scalar = self.whole(jnp.ones(()))
            return 1e6 * median_of(lambda: [float(scalar + 0) for _ in range(COUNT)], COUNT)
        if name.startswith("step_") or name == "recorded":
            size = (256, 128) if name == "recorded" else size_of(name)
            return self.step(*size, is_recorded=name == "recorded")
        if name == "sharded_sgd":
            return self.sharded()
        x, y, b = (self.whole(jnp.ones(shape)) for shape in ((4, 4), (4, 4), (4,)))
        operations: dict[str, Callable[[], Any]] = {
            "issue_add": lambda: x + y,
            "issue_scalar": lambda: x + 1.5,
            "issue_view": lambda: x.reshape(16),
            "issue_addmm": lambda: b + x @ y,
        }
        if name == "until_add":
            return 1e6 * median_of(lambda: [x + y for _ in range(COUNT)][-1].block_until_ready(), COUNT)
        if name not in operations:
            raise no_such()
        raise NotImplementedError("the program's processor time has that of its devices in it")

    def weights(self, width: int) -> Any:
        """Make the weights of the model."""
        values = [jnp.asarray(value.detach().numpy()) for value in mlp(width).parameters()]
        return list(zip(values[::2], values[1::2], strict=True))

    def step(self, width: int, batch: int, *, is_recorded: bool) -> float:
        """Train, each device the whole batch; the loss of each recorded step is awaited."""
        do = jax.jit(step) if is_recorded else step
        weights = self.whole(self.weights(width))
        x, y = (self.whole(jnp.asarray(value.numpy())) for value in data(batch))

        def run() -> None:
            current = weights
            for _ in range(STEPS):
                current, loss = do(current, x, y)
                if is_recorded:
                    float(loss)
            float(loss)

        return 1e3 * median_of(run, STEPS)

    def sharded(self) -> float:
        """Train the sharded model."""
        mesh = Mesh(self.devices.reshape(tuple(AXES.values())), tuple(AXES))

        def put(value: Any, *spec: Any) -> Any:
            return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))

        (w0, b0), (w1, b1), (w2, b2) = self.weights(512)
        weights = [(put(w0, "tp"), put(b0, "tp")), (put(w1, None, "tp"), put(b1)), (put(w2), put(b2))]
        x, y = (put(jnp.asarray(value.numpy()), "dp") for value in data(256))
        do = jax.jit(step)

        def run() -> None:
            current = weights
            for _ in range(10):
                current, loss = do(current, x, y)
            float(loss)

        return 1e3 * median_of(run, 10)

    def stop(self) -> None:
        """End nothing."""


if __name__ == "__main__":
    main(Jax)
