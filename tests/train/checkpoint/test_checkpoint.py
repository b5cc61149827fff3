"""Other ranks continue what some ranks trained; a save that fails leaves the last good checkpoint whole."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from monarch_kernel.errors import CheckpointError
from monarch_kernel.train import checkpoint
from tests.support.ranks import Ranks
from tests.support.waiting import LONG_S, wait_until
from tests.train.checkpoint.sealing import reseal

PRELUDE = """
import gc, os, time, torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from pathlib import Path
from torch.distributed.tensor import DTensor
from monarch_kernel import checkpoint
from monarch_kernel.train.parallel import parallelize

def net(seed=0, width=16):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(32, width), *[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)],
                         nn.Linear(width, 32))

def step_of(model, optimizer, step):
    tokens = torch.randint(0, 32, (12, 4), generator=torch.Generator().manual_seed(step))
    world = dist.get_world_size() if dist.is_initialized() else 1
    mine = tokens.chunk(world)[dist.get_rank() if world > 1 else 0]
    optimizer.zero_grad()
    loss = F.cross_entropy(model(mine).flatten(0, 1), mine.flatten())
    loss.backward()
    optimizer.step()
    if world > 1:
        loss = loss.detach().clone()
        dist.all_reduce(loss)
    return float(loss.detach()) / world

def begin(strategy, seed=0):
    model = net(seed)
    if strategy:
        parallelize(model, mesh, strategy, quiet=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
"""


@pytest.fixture(scope="module")
def two(session: None) -> Iterator[Ranks]:
    ranks = Ranks(2, PRELUDE)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def three(session: None) -> Iterator[Ranks]:
    ranks = Ranks(3, PRELUDE)
    yield ranks
    ranks.close()


SAVES = """
model, optimizer, scheduler = begin({strategy!r})
for step in range(3): step_of(model, optimizer, step); scheduler.step()
checkpoint.save({path!r}, model=model, optimizer=optimizer, scheduler=scheduler, step=3, notes={{'lr': [1e-2]}})
[step_of(model, optimizer, step) for step in range(3, 6)]
"""
LOADS = """
model, optimizer, scheduler = begin({strategy!r}, seed=5)
values = checkpoint.load({path!r}, model=model, optimizer=optimizer, scheduler=scheduler)
assert values == {{'step': 3, 'notes': {{'lr': [1e-2]}}}}, values
assert scheduler.last_epoch == 3
[step_of(model, optimizer, step) for step in range(3, 6)]
"""


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_other_ranks_continue_the_training(two: Ranks, three: Ranks, tmp_path: Path, strategy: str) -> None:
    path = str(tmp_path / "runs" / "step-3")
    losses = two.run(SAVES.format(strategy=strategy, path=path))[0]
    for ranks, theirs in ((two, "fsdp"), (three, "fsdp"), (three, "ddp")):
        found = ranks.run(LOADS.format(strategy=theirs, path=path))
        assert found[0] == pytest.approx(losses, abs=1e-5)
    names: dict[str, Any] = {"mesh": None}
    exec(PRELUDE, names)
    exec(LOADS.format(strategy="", path=path).rpartition("[step_of")[0], names)  # one process, without a group
    alone = [names["step_of"](names["model"], names["optimizer"], step) for step in range(3, 6)]
    assert alone == pytest.approx(losses, abs=1e-5)
    assert sorted(each.name for each in (tmp_path / "runs").iterdir()) == ["step-3"]


def test_a_checkpoint_is_described_and_exported(two: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "step-3"
    two.run(SAVES.format(strategy="fsdp", path=str(path)))
    contents = checkpoint.describe(path)
    assert contents.names == {
        "model": "module",
        "optimizer": "optimizer",
        "scheduler": "state",
        "step": "value",
        "notes": "value",
    }
    assert contents.tensors["model.0.weight"] == ((32, 16), "float32")
    assert contents.ranks == 2
    assert "saved 20" in str(contents)
    assert "  model (module): 9 tensors\n    0.weight float32[32, 16]\n" in str(contents)
    first, *rows = repr(contents).splitlines()
    assert first.startswith(f"{path}: ")
    assert rows == [
        "  model (module): 9 tensors",
        f"  optimizer (optimizer): {sum(name.startswith('optimizer.') for name in contents.tensors)} tensors",
        "  scheduler (state)",
        "  step (value)",
        "  notes (value)",
    ]
    assert contents._repr_html_().count("<tr>") == 1 + len(rows)
    assert checkpoint.latest(tmp_path) == path
    from safetensors.torch import load_file

    file = checkpoint.export(path, tmp_path / "model.safetensors")
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    model = names["net"](7)
    model.load_state_dict(load_file(file))
    other = names["net"](8)
    checkpoint.load(path, model=other)
    for mine, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(mine, theirs)
    with pytest.raises(CheckpointError, match="has no module 'optimizer'; it has model"):
        checkpoint.export(path, tmp_path / "x", "optimizer")


def test_a_checkpoint_that_does_not_fit_changes_nothing(two: Ranks, tmp_path: Path) -> None:
    """F17."""
    two.run(SAVES.format(strategy="fsdp", path=str(tmp_path / "a")))
    said = two.fails(
        "model = net(3); model[4] = nn.Linear(16, 33); model.add_module('extra', nn.Linear(2, 2))\n"
        "model[1] = model[2] = nn.Identity()\n"
        "parallelize(model, mesh, 'fsdp', quiet=True)\nbefore = [p.to_local().clone() for p in model.parameters()]\n"
        f"try: checkpoint.load({str(tmp_path / 'a')!r}, model=model)\n"
        "finally: assert all(map(torch.equal, before, [p.to_local() for p in model.parameters()]))"
    )
    assert "does not fit model; nothing has changed" in said
    assert "  missing in the checkpoint (2):\n    extra.weight\n    extra.bias\n" in said
    assert "  only in the checkpoint (4):\n    1.0.weight float32[16, 16]\n" in said
    assert "  of another shape (2):\n    4.weight [33, 16] here, [32, 16] in the checkpoint\n" in said


BAD = {
    "model=net(), optimizer=torch.optim.SGD(net().parameters())": "optimizer trains parameters of no module among",
    "fn=lambda: 1": "fn is a function, which can't be saved so that it is safe to load",
    "step=rank, other=(1 if rank else print)": "other is a builtin_function_or_method",
    "model=nn.Linear(2, 2, device='meta')": "model is on the meta device and has no values",
}


@pytest.mark.parametrize("things", BAD)
def test_values_that_can_not_be_saved_are_refused_on_all_ranks(two: Ranks, tmp_path: Path, things: str) -> None:
    said = two.fails(f"checkpoint.save({str(tmp_path / 'x')!r}, {things})")
    assert BAD[things] in said
    assert list(tmp_path.iterdir()) == []


def test_places_without_a_checkpoint(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path / "a", model=model, step=1)
    for path, said in (
        (tmp_path / "b", "there is no checkpoint at .*/b; available in .*: a"),
        (tmp_path / "none" / "b", "there is no directory"),
        (tmp_path, "is not a complete checkpoint of monarch_kernel; the newest in it is .*/a"),
    ):
        with pytest.raises(CheckpointError, match=said):
            checkpoint.load(path, model=model)
    with pytest.raises(CheckpointError, match=r"latest\(folder\) returned None"):
        checkpoint.load(checkpoint.latest(tmp_path / "none"), model=model)
    with pytest.raises(CheckpointError, match="has no 'net'; it has model \\(module\\), step \\(value\\)"):
        checkpoint.load(tmp_path / "a", net=model)
    with pytest.raises(TypeError, match="nothing to save: checkpoint.save"):
        checkpoint.save(tmp_path / "a")
    about = tmp_path / "a" / "monarch.json"
    about.write_text(about.read_text().replace('"version": 2', '"version": 3'))
    reseal(tmp_path / "a")
    with pytest.raises(CheckpointError, match="written by a newer monarch_kernel"):
        checkpoint.load(tmp_path / "a", model=model)
    about.write_text("{")
    with pytest.raises(CheckpointError, match="can't be read"):
        checkpoint.describe(tmp_path / "a")


def test_a_corrupt_file_is_reported(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", model=nn.Linear(2, 2))
    for file in (tmp_path / "a").glob("*.distcp"):
        file.write_bytes(b"x" * 100)
    with pytest.raises(
        CheckpointError, match="__0_0.distcp, written by rank 0, is cut short: model.weight, model.bias"
    ):
        checkpoint.load(tmp_path / "a", model=nn.Linear(2, 2))
    reseal(tmp_path / "a")
    with pytest.raises(CheckpointError, match="can't be read: .*; the state of the loaded objects is undefined now"):
        checkpoint.load(tmp_path / "a", model=nn.Linear(2, 2))


def test_a_background_save_has_the_state_at_the_call(two: Ranks, tmp_path: Path) -> None:
    found = two.run(
        "model, optimizer, _ = begin('fsdp')\nstep_of(model, optimizer, 0)\n"
        "before = [p.full_tensor().clone() for p in model.parameters()]\n"
        f"saving = checkpoint.save({str(tmp_path / 'a')!r}, wait=False, model=model, optimizer=optimizer)\n"
        "for step in range(1, 20): step_of(model, optimizer, step)\n"
        f"path = saving.result(60)\nassert saving.done() and 'complete' in repr(saving)\n"
        "other = parallelize(net(4), mesh, 'fsdp', quiet=True)\ncheckpoint.load(path, model=other)\n"
        "all(map(torch.equal, before, [p.full_tensor() for p in other.parameters()]))"
    )
    assert found == (True, True)


def test_the_error_of_a_background_save_is_raised_by_the_next_call(two: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = two.fails(
        f"model = nn.Linear(2, 2)\ncheckpoint.save({str(tmp_path / 'file' / 'a')!r}, wait=False, model=model)\n"
        f"checkpoint.save({str(tmp_path / 'b')!r}, model=model)"
    )
    assert "NotADirectoryError" in said
    two.run(f"checkpoint.save({str(tmp_path / 'b')!r}, model=model)")


def test_an_error_that_one_rank_has_read_is_raised_on_all_by_the_next_call(two: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = two.fails(
        f"saving = checkpoint.save({str(tmp_path / 'file' / 'a')!r}, wait=False, model=nn.Linear(2, 2))\n"
        "if rank == 0:\n    try: saving.result(60)\n    except Exception: pass\n"
        f"checkpoint.load({str(tmp_path / 'b')!r})"
    )
    assert "NotADirectoryError" in said


@pytest.mark.slow
def test_an_error_that_nothing_reads_is_shown_when_the_process_ends(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = (
        "import torch; from monarch_kernel import checkpoint\n"
        f"checkpoint.save({str(tmp_path / 'file' / 'a')!r}, wait=False, model=torch.nn.Linear(2, 2))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "NotADirectoryError" in done.stderr


TELLS = """
import contextlib, io, threading
from monarch_kernel.train.checkpoint import saving as its
def told(path, *unnamed, **things):
    # The error of a save, and its output.
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try: checkpoint.save(path, *unnamed, **things)
        except Exception as error: return type(error).__name__, str(error)
    return "", printed.getvalue()
"""


@pytest.fixture
def own(two: Ranks) -> Iterator[Ranks]:
    """Two other ranks, whose group may be formed again; the host agent exists before."""
    ranks = Ranks(2, PRELUDE + TELLS)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_save_whose_group_is_formed_again_is_abandoned(own: Ranks, tmp_path: Path, late: int) -> None:
    path, next_one = tmp_path / "a", tmp_path / "b"
    own.run(f"checkpoint.save({str(path)!r}, model=net(), step=1)")
    own.run(
        "gate, free = threading.Event(), its._free\n"
        f"its._free = lambda folder: free(folder) if rank != {late} or gate.wait() else None\n"
        f"going = checkpoint.save({str(path)!r}, wait=False, model=net(), step=2)"
    )
    own.store.form(own.mesh).get(LONG_S)
    found = own.run(f"its._free = free\ngate.set()\ntold({str(next_one)!r}, model=net(), step=3)")
    assert [error for error, _ in found] == ["", ""], found
    line = f"the checkpoint {path} was abandoned when the process group was formed again; the previous checkpoint is intact\n"
    assert [said for _, said in found] == [line, ""]
    assert checkpoint.load(next_one)["step"] == 3
    assert checkpoint.load(path)["step"] == 1
    assert own.run(f"told({str(path)!r}, model=net(), step=4)") == (("", ""), ("", ""))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "b"]


def test_a_save_that_is_complete_when_its_group_breaks_is_not_abandoned(own: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "a"
    own.run(
        "gate, finish = threading.Event(), its._Writer._finish\n"
        "its._Writer._finish = lambda self, *args: finish(self, *args) if rank == 0 or gate.wait() else None\n"
        f"going = checkpoint.save({str(path)!r}, wait=False, model=net(), step=1)"
    )
    wait_until(path.exists, "the checkpoint")
    own.store.form(own.mesh).get(LONG_S)
    found = own.run(f"its._Writer._finish = finish\ngate.set()\ntold({str(tmp_path / 'b')!r}, step=2)")
    assert found == (("", ""), ("", ""))
    assert checkpoint.load(path)["step"] == 1


def test_another_failure_is_reported_after_the_group_is_formed_again(own: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "a"
    own.run(
        f"saving = checkpoint.save({str(path)!r}, wait=False, step=1)\n"
        "while not saving.done(): time.sleep(0.001)"  # nothing asks for its error
    )
    own.store.form(own.mesh).get(LONG_S)
    for error, said in own.run(f"told({str(tmp_path / 'b')!r}, step=2)"):
        assert error == "CheckpointError"
        assert f"{path} was not saved: {tmp_path / 'file'} is a file, not a directory" in said


@pytest.mark.slow
def test_a_group_that_fails_and_still_exists_is_an_error_of_the_next_call(own: Ranks, tmp_path: Path) -> None:
    own.run(
        "write = its.write\n"
        "def its_write(*_): raise RuntimeError('Connection closed by peer')\n"
        "its.write = its_write\n"
        f"saving = checkpoint.save({str(tmp_path / 'a')!r}, wait=False, model=net())\n"
        "while not saving.done(): time.sleep(0.001)\n"
        "its.write = write"
    )
    for error, said in own.run(f"told({str(tmp_path / 'b')!r}, step=2)"):
        assert error == "CheckpointError"
        assert (
            f"{tmp_path / 'a'} was not saved: RuntimeError: Connection closed by peer; there is no earlier checkpoint in "
            in said
        )


def test_an_unwritable_path_is_a_checkpoint_error_on_all_ranks(own: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "a"
    for error, said in own.run(f"told({str(path)!r}, step=1)"):
        assert error == "CheckpointError"
        assert f"{path} was not saved: {tmp_path / 'file'} is a file, not a directory (NotADirectoryError); " in said
        assert said.endswith(". Use another path")
    with pytest.raises(CheckpointError, match="was not saved: .* is a file, not a directory") as caught:
        checkpoint.save(path, step=1)
    assert isinstance(caught.value.__cause__, NotADirectoryError)


OTHERS = {
    "'{at}/a', step=1, **({{'m2': net()}} if rank == 1 else {{}})": (
        "[0] checkpoint.save('{at}/a', step=...); [1] checkpoint.save('{at}/a', m2=..., step=...)"
    ),
    "'{at}/' + 'ab'[rank], step=1": "[0] checkpoint.save('{at}/a', step=...); [1] checkpoint.save('{at}/b', step=...)",
    "'{at}/a', **({{'step': 1}} if rank == 0 else {{}})": (
        "[0] checkpoint.save('{at}/a', step=...); [1] checkpoint.save('{at}/a')"
    ),
    "'{at}/a' if rank == 0 else None, step=1": (
        "[0] checkpoint.save('{at}/a', step=...); [1] checkpoint.save(None, step=...)"
    ),
    "'{at}/a', *([net()] if rank == 1 else []), step=1": (
        "[0] checkpoint.save('{at}/a', step=...); [1] checkpoint.save('{at}/a', ..., step=...)"
    ),
    "'{at}/a', wait=rank == 0, step=1": (
        "[0] checkpoint.save('{at}/a', step=...); [1] checkpoint.save('{at}/a', wait=False, step=...)"
    ),
}


@pytest.mark.parametrize(
    "call", [*list(OTHERS)[:2], *(pytest.param(each, marks=pytest.mark.slow) for each in list(OTHERS)[2:])]
)
def test_ranks_that_name_different_things_are_refused(own: Ranks, tmp_path: Path, call: str) -> None:
    for error, said in own.run(f"told({call.format(at=tmp_path)})"):
        assert error == "CheckpointError"
        assert (
            f"the ranks make different calls: {OTHERS[call].format(at=tmp_path)}. Use the same path and names" in said
        )
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_loads_while_another_saves_is_refused(own: Ranks, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", step=1)
    path = str(tmp_path / "a")
    said = own.fails(f"checkpoint.load({path!r}) if rank == 0 else checkpoint.save({path!r}, step=2)")
    assert f"[0] checkpoint.load(...); [1] checkpoint.save({path!r}, step=...)" in said
    assert checkpoint.load(tmp_path / "a") == {"step": 1}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("None", "there is no checkpoint to load"),
        ("7", "takes the path of a directory"),
        ("path, on_resize='x'", "use 'refuse' or 'reseed'"),
        ("path, net()", "takes each object under its name"),
    ],
)
def test_a_wrong_argument_of_one_rank_is_an_error_on_all(own: Ranks, tmp_path: Path, wrong: str, said: str) -> None:
    checkpoint.save(tmp_path / "a", step=1)
    zero, one = own.run(f"""
path = {str(tmp_path / "a")!r}
try: checkpoint.load(path) if rank else checkpoint.load({wrong})
except Exception as error: said = str(error)
said
""")
    assert said in zero
    assert said in one


def test_an_unwritable_path_of_an_export_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a"
    checkpoint.save(path, model=nn.Linear(2, 2))
    with pytest.raises(
        CheckpointError, match=r" is a directory: use the path of a file, such as .*/model\.safetensors"
    ):
        checkpoint.export(path, tmp_path)
    with pytest.raises(
        CheckpointError, match="/none/x can't be written: there is no directory .*/none; create it first"
    ):
        checkpoint.export(path, tmp_path / "none" / "x")
    with pytest.raises(CheckpointError, match="there is no directory .*/monarch.json; create it first"):
        checkpoint.export(path, path / "monarch.json" / "x")
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_only_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "runs" / "step-1", step=1)
    (tmp_path / "thesis.py").touch()
    with pytest.raises(
        CheckpointError, match="runs is a directory that is not a checkpoint, .*: use another path, such as .*/step-1"
    ):
        checkpoint.save(tmp_path / "runs", step=2)
    with pytest.raises(CheckpointError, match=r"thesis\.py is a file"):
        checkpoint.save(tmp_path / "thesis.py", step=2)
    assert checkpoint.load(tmp_path / "runs" / "step-1") == {"step": 1}
    assert (tmp_path / "thesis.py").is_file()


def test_the_state_of_another_optimizer_is_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path / "a", model=model, optimizer=torch.optim.SGD(model.parameters(), momentum=0.9))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(tmp_path / "a", model=model, optimizer=torch.optim.AdamW(model.parameters()))
    assert "does not fit optimizer; nothing has changed" in str(caught.value)
    assert "state.weight.exp_avg" in str(caught.value)
    assert "state.weight.momentum_buffer float32[2, 2]" in str(caught.value)


LARGE = "model = parallelize(nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]), mesh, 'fsdp', quiet=True)\n"


def test_a_rank_that_is_killed_in_a_save_leaves_the_last_good_one(session: None, tmp_path: Path) -> None:
    ranks = Ranks(2, PRELUDE)
    path = tmp_path / "a"
    ranks.run(f"{LARGE}checkpoint.save({str(path)!r}, model=model, step=1)")
    pids = ranks.run("os.getpid()")
    going = ranks.mesh.run(f"while True: checkpoint.save({str(path)!r}, model=model, step=2)")
    wait_until(lambda: any(tmp_path.glob(".a.saving-*/*")), "a save to begin")
    os.kill(pids[1], signal.SIGKILL)
    assert going.exception(LONG_S) is not None
    contents = checkpoint.describe(path)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
    assert checkpoint.load(path, model=model)["step"] in (1, 2)
    assert contents.ranks == 2
    checkpoint.save(path, model=model, step=3)  # by another process
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a"]
    assert checkpoint.load(path)["step"] == 3
    ranks.mesh.stop().get(LONG_S)
    ranks.store.close()


def test_a_crash_between_two_renames_leaves_the_last_checkpoint_findable(tmp_path: Path) -> None:
    for name in ("a", "lr[1]"):
        path = tmp_path / name
        checkpoint.save(path, step=1)
        path.rename(tmp_path / f".{name}.last-0123")
        assert checkpoint.load(path) == {"step": 1}
        checkpoint.save(path, step=2)
        assert checkpoint.load(path) == {"step": 2}
        checkpoint.save(path, step=3)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "lr[1]"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    made = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=40m", "tmpfs", disk], capture_output=True, check=False
    )
    if not made or made.returncode:
        pytest.skip("no file system can be mounted here")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_full_disk_leaves_the_last_good_one(two: Ranks, small_disk: Path) -> None:
    """F22."""
    path = small_disk / "a"
    two.run(f"{LARGE}checkpoint.save({str(path)!r}, model=model, step=1)")  # 32 MiB
    said = two.fails(f"checkpoint.save({str(path)!r}, model=model, step=2)")
    assert f"{path} was not saved: it takes 32 MiB on " in said
    assert "are free there; the previous checkpoint is intact" in said
    assert checkpoint.load(path)["step"] == 1
    assert [each.name for each in small_disk.iterdir()] == ["a"]
    # The disk fills during the save, which can't be foreseen.
    two.run(
        "from monarch_kernel.train.checkpoint import saving\nkept, saving._check_room = saving._check_room, lambda *_: None"
    )
    said = two.fails(f"checkpoint.save({str(path)!r}, model=model, step=2)")
    two.run("saving._check_room = kept")
    assert f"{path} was not saved: on rank " in said
    assert f"are free in {small_disk}" in said
    assert "no space is left on the disk" in said or "as on a full disk" in said
    assert "this rank writes 16 MiB" in said
    assert checkpoint.load(path)["step"] == 1
    assert [each.name for each in small_disk.iterdir()] == ["a"]


def test_an_export_to_a_full_disk_is_reported(small_disk: Path, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", model=nn.Linear(4096, 4096))  # 64 MiB
    (small_disk / "x").write_bytes(b"before")
    with pytest.raises(
        CheckpointError, match=r"/x was not written: .* \(it takes 64 MiB, and 40 MiB were free there\); "
    ):
        checkpoint.export(tmp_path / "a", small_disk / "x")
    assert (small_disk / "x").read_bytes() == b"before"
    assert [each.name for each in small_disk.iterdir()] == ["x"]


@pytest.mark.slow
def test_an_interrupt_leaves_the_last_good_one(session: None, tmp_path: Path) -> None:
    ranks = Ranks(2, PRELUDE)
    path = tmp_path / "a"
    ranks.run(f"{LARGE}checkpoint.save({str(path)!r}, model=model, step=1)")
    going = ranks.mesh.run(f"while True: checkpoint.save({str(path)!r}, model=model, step=2)")
    wait_until(lambda: any(tmp_path.glob(".a.saving-*/*")), "a save to begin")
    going.interrupt(abort=True)
    assert going.exception(LONG_S) is not None
    ranks.store.form(ranks.mesh).get(LONG_S)
    found = ranks.run(f"{LARGE}checkpoint.load({str(path)!r}, model=model)['step']")
    assert found[0] in (1, 2)
    ranks.run(f"checkpoint.save({str(path)!r}, model=model, step=3)")
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    ranks.close()


def test_a_long_save_shows_progress(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from monarch_kernel.train.checkpoint import saving

    monkeypatch.setattr(saving, "_SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(saving, "_EVERY_S", 0.01)
    checkpoint.save(tmp_path / "a", model=nn.Linear(2000, 2000))
    said = capsys.readouterr().err
    assert "saving a: " in said
    assert "of 15 MiB" in said
    assert said.rstrip().endswith(" s")
