"""A program that trains on a mesh of two ranks, and prints its results as JSON; `test_program.py` runs it."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from monarch_kernel.actor import shutdown_context, this_host
from monarch_kernel.integrations.lightning import MonarchStrategy

PACKAGE = sys.argv[1]
HERE = Path(sys.argv[2])
L: Any = importlib.import_module(PACKAGE)
PARTS = "lightning.pytorch" if PACKAGE == "lightning" else PACKAGE
callbacks: Any = importlib.import_module(f"{PARTS}.callbacks")
loggers: Any = importlib.import_module(f"{PARTS}.loggers")

torch.manual_seed(0)
X = torch.randn(64, 4)
Y = X.sum(1, keepdim=True)
# All samples are one global batch, so that it does not matter which rank has which samples.
QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": HERE}
PLAIN = {**QUIET, "logger": False, "enable_checkpointing": False}


class Net(L.LightningModule):  # type: ignore[misc]
    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(4, 8)
        self.second = torch.nn.Linear(8, 1)
        self.lr = lr

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))

    def loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Any, i: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, i: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, i: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, i: int, dataloader_idx: int = 0) -> dict[str, Any]:
        return {"y": self(batch[0]), "rank": torch.full((len(batch[0]),), self.global_rank)}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Sharded(Net):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        for layer in (self.first, self.second):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


class Words(Net):
    def predict_step(self, batch: Any, i: int, dataloader_idx: int = 0) -> str:
        return f"rank {self.global_rank} batch {i}"


class Notes(L.Callback):  # type: ignore[misc]
    """Records losses; has an attribute that can't be sent to the notebook."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.trainer: Any = None

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        self.trainer = trainer
        self.lock = threading.Lock()


class Data(L.LightningDataModule):  # type: ignore[misc]
    def __init__(self, batch: int = 32) -> None:
        super().__init__()
        self.batch = batch

    def train_dataloader(self) -> Any:
        return loader(self.batch)

    def val_dataloader(self) -> Any:
        return loader(self.batch)

    test_dataloader = predict_dataloader = val_dataloader


def loader(batch: int, samples: int = 64, **options: Any) -> Any:
    return DataLoader(TensorDataset(X[:samples], Y[:samples]), batch_size=batch, **options)


def weights(module: Any) -> list[float]:
    return [float(x) for each in module.parameters() for x in each.detach().flatten()]


def momenta(trainer: Any) -> list[float]:
    (optimizer,) = trainer.optimizers
    return [float(x) for state in optimizer.state.values() for x in state["momentum_buffer"].flatten()]


def main() -> dict[str, Any]:
    mesh = this_host().spawn_procs({"gpus": 2}, device="cpu", name="t")
    found: dict[str, Any] = {}

    alone, net = Net(), Net()
    reference = L.Trainer(max_epochs=3, devices=1, **PLAIN)
    reference.fit(alone, Data(64))
    notes = Notes()
    checkpoint = callbacks.ModelCheckpoint(monitor="val_loss", save_top_k=1)
    logger = loggers.CSVLogger(HERE, name="csv")
    trainer = L.Trainer(
        strategy=MonarchStrategy(mesh),
        max_epochs=3,
        callbacks=[notes, checkpoint],
        logger=logger,
        log_every_n_steps=1,
        **QUIET,
    )
    trainer.fit(net, Data())
    found["weights"] = [weights(net), weights(alone)]
    found["metrics"] = [
        {name: float(value) for name, value in each.callback_metrics.items()} for each in (trainer, reference)
    ]
    found["logged"] = sorted(trainer.logged_metrics)
    found["progress"] = [
        (each.current_epoch, each.global_step, str(each.state.status)) for each in (trainer, reference)
    ]
    found["momenta"] = [momenta(trainer), momenta(reference)]
    found["lr"] = [each.lr_scheduler_configs[0].scheduler.get_last_lr() for each in (trainer, reference)]
    found["same parameters"] = trainer.optimizers[0].param_groups[0]["params"][0] is net.first.weight
    found["losses"] = list(notes.losses)
    found["callback"] = [notes.trainer is trainer, hasattr(notes, "lock"), trainer.callbacks[0] is notes]
    found["best"] = [Path(checkpoint.best_model_path).is_file(), float(checkpoint.best_model_score)]
    found["csv"] = (Path(logger.log_dir) / "metrics.csv").read_text()
    trainer.save_checkpoint(HERE / "home.ckpt")

    trainer.fit_loop.max_epochs = reference.fit_loop.max_epochs = 5
    trainer.fit(net, Data())
    reference.fit(alone, Data(64))
    found["again"] = [weights(net), weights(alone)]
    found["progress again"] = [(each.current_epoch, each.global_step) for each in (trainer, reference)]
    found["losses again"] = list(notes.losses)

    resumed, resumer = Net(), L.Trainer(strategy=MonarchStrategy(mesh), max_epochs=5, **PLAIN)
    resumer.fit(resumed, Data(), ckpt_path=HERE / "home.ckpt")
    ahead = L.Trainer(max_epochs=5, devices=1, **PLAIN)
    straight = Net()
    ahead.fit(straight, Data(64))
    found["resumed"] = [weights(resumed), weights(straight), resumer.global_step]

    found["validated"] = [each.validate(net, Data(32), verbose=False) for each in (trainer, reference)]
    found["tested"] = [each.test(net, Data(32), verbose=False) for each in (trainer, reference)]
    found["best tested"] = trainer.test(net, Data(32), ckpt_path="best", verbose=False)

    with torch.no_grad():
        expected = net(X[:61])
    predicted = trainer.predict(net, loader(7, 61))
    found["predicted"] = torch.allclose(torch.cat([each["y"] for each in predicted]), expected)
    found["predicted by"] = torch.cat([each["rank"] for each in predicted]).tolist()
    found["predicted batches"] = [len(each["y"]) for each in predicted]
    found["predicted words"] = trainer.predict(Words(), loader(8, 40))
    found["predicted two"] = [len(each) for each in trainer.predict(net, [loader(8), loader(8, 16)])]
    found["predicted nothing"] = trainer.predict(net, loader(8), return_predictions=False)

    stopping = callbacks.EarlyStopping("val_loss", patience=2)
    still = L.Trainer(strategy=MonarchStrategy(mesh), max_epochs=50, callbacks=[stopping], **PLAIN)
    still.fit(Net(lr=0.0), Data())
    found["stopped"] = [stopping.stopped_epoch, still.current_epoch, still.should_stop]

    sharded = Sharded()
    fsdp = L.Trainer(strategy=MonarchStrategy(mesh, "fsdp"), max_epochs=3, **PLAIN)
    fsdp.fit(sharded, Data())
    found["sharded"] = [weights(sharded), type(sharded).__name__]

    workers = Net()
    L.Trainer(strategy=MonarchStrategy(mesh), max_epochs=3, **PLAIN).fit(workers, loader(32, num_workers=1))
    found["workers"] = weights(workers)
    return found


if __name__ == "__main__":
    try:
        print(json.dumps(main()))
    finally:
        shutdown_context().get()
