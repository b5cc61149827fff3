"""Trainers in a notebook: a real kernel, a mesh of two ranks, and the output that the user sees."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.notebook.kernel.conftest import Cell, Notebook
from tests.support.timing import Bar

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

STOPS_S = 2.0

DEFINITIONS = """
import time
import torch
import lightning as L
from torch.utils.data import DataLoader, TensorDataset

class Net(L.LightningModule):
    def __init__(self, fails_on=None, slow_s=0.0):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.fails_on, self.slow_s = fails_on, slow_s

    def training_step(self, batch, i):
        x, y = batch
        if self.fails_on == self.global_rank and i == 2:
            x = x.T
        time.sleep(self.slow_s)
        loss = (self.layer(x) - y).square().mean()
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

class Notified(L.Callback):
    def on_exception(self, trainer, module, error):
        print(f"\\nnotified of {type(error).__name__}")

x = torch.randn(64, 4)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
plain = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False)
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    notebook = Notebook()
    try:
        notebook.ok(DEFINITIONS, 90)
        nobody = notebook.run('L.Trainer(strategy="monarch")')
        assert "no mesh is up; bring one up with: %mesh up NAME -n 4" in nobody.error
        notebook.ok("%mesh up t -n 2 --device cpu")
        notebook.ok(
            "L.Trainer(strategy='monarch', max_epochs=1, **plain).fit(Net(), data)", 120
        )  # ranks import lightning
        yield notebook
    finally:
        notebook.close()


def fit(options: str = "", net: str = "Net()") -> str:
    return f'trainer = L.Trainer(strategy="monarch", {options} **plain); net = {net}; trainer.fit(net, data)'


def epochs_shown(cell: Cell) -> list[str]:
    """All texts that the progress bar has shown, in order."""
    return [
        m["content"]["data"]["text/plain"]
        for m in cell.of_type("display_data", "update_display_data")
        if "Epoch" in m["content"]["data"].get("text/plain", "")
    ]


def running(notebook: Notebook, code: str) -> Cell:
    """Start a cell with an endless training."""
    cell = notebook.send(code)
    return cell.wait_for(lambda cell: len(epochs_shown(cell)) > 2)


def test_the_name_refers_to_the_mesh_that_is_up(notebook: Notebook) -> None:
    cell = notebook.ok(f"{fit('max_epochs=2,')}\nprint(trainer.world_size, trainer.current_epoch, trainer.global_step)")
    assert "2 2 8" in cell.stdout
    assert notebook.value("float(trainer.callback_metrics['loss']) > 0") is True


def test_the_user_sees_one_bar(notebook: Notebook) -> None:
    cell = notebook.ok(fit("max_epochs=3,", "Net(slow_s=0.1)"))
    shown = epochs_shown(cell)
    assert 3 < len(shown) < 40
    assert all(text.startswith("[0] Epoch") and text.count("\n") == 0 for text in shown)
    assert "Epoch 2: 100%" in shown[-1]
    assert "loss=" in shown[-1]
    assert len(cell.stdout.splitlines()) < 4
    assert (
        len({m["content"]["transient"]["display_id"] for m in cell.of_type("display_data") if "Epoch" in str(m)}) == 1
    )


def test_the_mesh_is_not_pickled_with_the_trainer(notebook: Notebook) -> None:
    notebook.ok(fit("max_epochs=1,"))
    notebook.ok("import cloudpickle; data_of_trainer = cloudpickle.dumps(trainer)")
    assert notebook.value("b'ProcMesh' in data_of_trainer, len(data_of_trainer) < 100_000") == (False, True)


def test_a_failure_on_one_rank_is_shown_with_its_rank_and_line(notebook: Notebook) -> None:
    cell = notebook.run(fit("max_epochs=3, callbacks=[Notified()],", "Net(fails_on=1)"))
    assert cell.ename == "RemoteError"
    assert "[1] RuntimeError: mat1 and mat2 shapes cannot be multiplied" in cell.error
    assert "loss = (self.layer(x) - y).square().mean()" in cell.error
    assert "x: Tensor[4, 8] float32 cpu" in cell.error
    assert "lightning/pytorch" not in cell.error
    assert "notified of RuntimeError" in cell.lines()[1]
    assert "notified of LaunchFailed" not in cell.stdout
    assert notebook.value("str(trainer.state.status)") == "TrainerStatus.INTERRUPTED"
    assert notebook.value("len(trainer.callbacks) > 0") is True
    notebook.ok(fit("max_epochs=1,"))


def test_an_interrupt_stops_all_ranks_and_they_stay_usable(notebook: Notebook, bar: Bar) -> None:
    cell = running(notebook, fit("max_epochs=1000, callbacks=[Notified()],", "Net(slow_s=0.05)"))
    with bar.below(STOPS_S, "the interrupt"):
        notebook.interrupt()
        cell.wait()
    assert cell.ename == "RemoteInterrupt"
    assert "interrupted on [0-1]; their state is kept" in cell.error
    assert all("notified of KeyboardInterrupt" in cell.lines()[rank] for rank in (0, 1))
    assert (
        notebook.ok("%remote t dist.get_world_size() if (dist := __import__('torch').distributed) else 0").plain
        == "[0-1] 2"
    )
    notebook.ok(fit("max_epochs=1,"))
    # The kernel itself can still be interrupted: by default Lightning makes it ignore the signal from now on.
    cell = notebook.send("print('sleeps', flush=True); time.sleep(60)")
    cell.wait_for(lambda cell: "sleeps" in cell.stdout)
    notebook.wait_blocked()
    notebook.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"


def test_an_interrupt_can_be_caught_as_a_keyboard_interrupt(notebook: Notebook) -> None:
    code = fit("max_epochs=1000,", "Net(slow_s=0.05)")
    cell = running(notebook, f"try:\n    {code}\nexcept KeyboardInterrupt:\n    print('caught')")
    notebook.interrupt()
    assert "caught" in cell.wait().stdout


def test_the_trainer_fits_again_after_a_dead_rank_is_healed(notebook: Notebook) -> None:
    notebook.ok("%mesh up d -n 2 --device cpu")
    try:
        notebook.ok(fit("max_epochs=1,"), 60)
        assert notebook.run("%%remote d[1]\nimport os, signal; os.kill(os.getpid(), signal.SIGKILL)").error
        refused = notebook.run("trainer.fit(net, data)")
        assert "because [1] is gone, and it needs all ranks\n" in refused.error
        assert "%mesh heal d puts a new process in place of [1]" in refused.error
        notebook.ok("%mesh heal d")
        fitted = notebook.ok("trainer.fit(net, data); print(trainer.state.status.value)", 60)
        assert fitted.stdout.endswith("finished\n")
    finally:
        notebook.ok("%mesh down d")


def test_an_attribute_that_cannot_be_sent_is_named(notebook: Notebook) -> None:
    notebook.ok("import threading; odd = Net(); odd.things = {'door': threading.Lock()}")
    cell = notebook.run("L.Trainer(strategy='monarch', **plain).fit(odd, data)")
    assert cell.ename == "PayloadError"
    assert "model.things['door'] (a lock) can't be sent to the ranks" in cell.error
    notebook.ok("data.dataset.file = open('/dev/null', 'w')")
    try:
        cell = notebook.run("L.Trainer(strategy='monarch', **plain).fit(Net(), data)")
        assert "train_dataloaders.dataset.file (a TextIOWrapper) can't be sent to the ranks" in cell.error
    finally:
        notebook.ok("del data.dataset.file")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("devices=4", "Trainer(devices=4), but mesh 't' has 2 ranks on one host"),
        ("devices=1", "Trainer(devices=1), but mesh 't' has 2 ranks on one host"),
        ("devices='4'", "Trainer(devices='4'), but mesh 't' has 2 ranks on one host"),
        ("num_nodes=2", "Trainer(num_nodes=2), but mesh 't' has 2 ranks on one host"),
    ],
)
@pytest.mark.parametrize("strategy", ["'monarch'", "MonarchStrategy(t)"])
def test_arguments_that_contradict_the_mesh_are_refused(
    notebook: Notebook, given: str, said: str, strategy: str
) -> None:
    notebook.ok("from monarch_kernel.integrations.lightning import MonarchStrategy")
    cell = notebook.run(f"L.Trainer(strategy={strategy}, {given}, accelerator='cpu')")
    assert cell.ename == "ValueError"
    assert said in cell.error


def test_arguments_that_fit_the_mesh_are_accepted(notebook: Notebook) -> None:
    notebook.ok("for devices in (2, '2', 'auto'): L.Trainer(strategy='monarch', devices=devices, num_nodes=1, **plain)")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("MonarchStrategy(t[0])", "takes a whole mesh"),
        ("MonarchStrategy('t')", "takes a mesh"),
        ("MonarchStrategy(t, 'deepspeed')", "there are: ddp, fsdp"),
        ("MonarchStrategy(t, package='fabric')", "there are: lightning, pytorch_lightning"),
    ],
)
def test_invalid_arguments_of_the_strategy_are_refused(notebook: Notebook, call: str, said: str) -> None:
    cell = notebook.run(f"from monarch_kernel.integrations.lightning import MonarchStrategy\n{call}")
    assert cell.ename in ("ValueError", "TypeError")
    assert said in cell.error


def test_unmodified_lightning_runs_in_remote_cells(notebook: Notebook) -> None:
    notebook.ok(f"%%remote t\n{DEFINITIONS}")
    twice = """
for _ in range(2):
    trainer = L.Trainer(strategy="ddp", devices=2, num_nodes=1, max_epochs=1, enable_progress_bar=False, **plain)
    trainer.fit(Net(), data)
"""
    notebook.ok(f"%%remote t\n{twice}")
    after = "import torch.distributed as dist\none = torch.ones(1)\ndist.all_reduce(one)\nprint(trainer.world_size, one.item())"
    assert "[0-1] 2 2.0" in notebook.ok(f"%%remote t\n{after}").stdout


def test_unmodified_lightning_is_interrupted(notebook: Notebook, bar: Bar) -> None:
    notebook.ok(f"%%remote t\n{DEFINITIONS}")
    code = 'L.Trainer(strategy="ddp", devices=2, max_epochs=1000, **plain).fit(Net(slow_s=0.05), data)'
    cell = running(notebook, f"%%remote t\n{code}")
    with bar.below(STOPS_S, "the interrupt"):
        notebook.interrupt()
        cell.wait()
    assert cell.ename == "RemoteInterrupt"
    assert notebook.ok("%remote t 1 + 1").plain == "[0-1] 2"
    notebook.ok(fit("max_epochs=1,"))


def test_a_mesh_that_is_down_raises_an_error(notebook: Notebook) -> None:
    notebook.ok("%mesh up other -n 1 --device cpu")
    notebook.ok("trainer = L.Trainer(strategy=MonarchStrategy(other), **plain)")
    notebook.ok("%mesh down other")
    cell = notebook.run("trainer.fit(Net(), data)")
    assert cell.ename == "MeshDownError"
    assert "mesh 'other' is down; available: t" in cell.error


def test_hosts_of_the_mesh_are_nodes_of_lightning(notebook: Notebook) -> None:
    notebook.ok("%mesh up hosts --on local --hosts 2 -n 1")
    given = "max_epochs=1, num_nodes=2, devices=1,"
    cell = notebook.ok(
        f"{fit(given)}\nprint(trainer.world_size, trainer.num_nodes, trainer.num_devices, trainer.global_step)", 90
    )
    assert "2 2 1 4" in cell.stdout
    cell = notebook.run(fit("devices=2,"))
    assert "Trainer(devices=2), but mesh 'hosts' has 2 ranks, 1 on each of 2 hosts" in cell.error
    notebook.ok("%mesh down hosts")


def test_a_rank_that_dies_is_named_and_can_be_replaced(notebook: Notebook) -> None:
    notebook.ok("%mesh up mortal -n 2 --device cpu")
    victim = notebook.pids("mortal")[1]
    cell = running(notebook, fit("max_epochs=1000,", "Net(slow_s=0.05)"))
    os.kill(victim, signal.SIGKILL)
    cell.wait()
    assert cell.ename == "SupervisionError"
    assert "[1] RankDied: killed by SIGKILL" in cell.error
    notebook.ok("%mesh heal mortal")
    assert (
        "1 True"
        in notebook.ok(
            f"{fit('max_epochs=1,')}\nprint(trainer.current_epoch, trainer.strategy._mesh is mortal)", 90
        ).stdout
    )
    notebook.ok("%mesh down mortal")
