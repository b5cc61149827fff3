"""A record has checkpoints, snapshots, and the files that data sets read."""

from __future__ import annotations

from pathlib import Path

from monarch_kernel.train.record import open as open_record
from tests.notebook.kernel.conftest import Notebook
from tests.support.waiting import wait_until

CODE = """%%remote t
import numpy, torch
from torch.utils.data import DataLoader, Dataset
from monarch_kernel import checkpoint

class Rows(Dataset):
    def __init__(self, path):
        self.rows = numpy.memmap(path, dtype=numpy.float32, mode="r").reshape(-1, 4)
    def __getitem__(self, at):
        return torch.from_numpy(self.rows[at].copy())
    def __len__(self):
        return len(self.rows)

model = torch.nn.Linear(4, 1)
live.snapshot(model=model, every=2)
for step, x in zip(live.loop(6), DataLoader(Rows({path!r}), batch_size=2)):
    live.log(loss=model(x).sum())
    if step == 3:
        checkpoint.save({to!r}, model=model, step=step)
values = checkpoint.load({to!r}, model=model)
"""


def test_checkpoints_snapshots_and_data_files_are_recorded(notebook: Notebook, tmp_path: Path) -> None:
    path, to = tmp_path / "rows.bin", tmp_path / "step-3"
    path.write_bytes(bytes(4 * 4 * 12))
    notebook.ok(f"%mesh record {tmp_path / 'run'}")
    notebook.ok(CODE.format(path=str(path), to=str(to)))

    def has_files() -> bool:
        notebook.ok("%mesh record")  # commits
        with open_record(tmp_path / "run") as record:
            return bool(record.data_files)

    wait_until(has_files, "a rank to read the file")  # in a thread, which the loop does not wait for
    notebook.ok("%mesh record close")
    with open_record(tmp_path / "run") as record:
        events = {event.kind: event for event in record.events}
        assert events["checkpoint"].text.startswith(f"{to}, checksum ")
        assert (events["checkpoint"].rank, events["checkpoint"].loop, events["checkpoint"].step) == (0, 1, 3)
        assert events["loaded"].text.startswith(f"{to}, checksum ")
        assert events["loaded"].text.endswith(": model")
        assert (events["loaded"].loop, events["loaded"].step) == (None, None)
        assert events["snapshot"].text == "every 2 steps, the last 2 are kept: model"
        assert sorted(event.kind for event in record.events) == ["checkpoint", "loaded", "snapshot"]
        assert [(each.path, each.nbytes) for each in record.data_files] == [(str(path), 192)]
        assert record.sources[0][1].startswith("Rows, 12 rows, SequentialSampler")
        assert not record.damage
