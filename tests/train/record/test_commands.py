"""``python -m monarch_kernel record`` shows, compares and exports records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from monarch_kernel.cli import main
from tests.features.record.runs import write_run


def test_show_prints_text_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    assert main(["record", "show", str(tmp_path / "run")]) == 0
    assert "cell [2] on t[0-1]: ok" in capsys.readouterr().out
    assert main(["record", "show", str(tmp_path / "run"), "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert [cell["number"] for cell in tables["cells"]] == [1, 2]
    assert tables["knobs"][-1] == {"loop": 1, "step": 2, "name": "lr", "value": 0.5, "is_default": False}


def test_diff_says_by_its_code_whether_records_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, options in {"a": {}, "b": {}, "c": {"batch_of": 1}}.items():
        write_run(tmp_path / name, **options)  # type: ignore[arg-type]
    assert main(["record", "diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "no difference" in capsys.readouterr().out
    assert main(["record", "diff", str(tmp_path / "a"), str(tmp_path / "c")]) == 1
    assert "first difference: cell [2], step 1: batch differs on rank 1 (loader)" in capsys.readouterr().out


def test_export_writes_by_the_ending_of_the_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    for name in ("train.py", "run.ipynb"):
        assert main(["record", "export", str(tmp_path / "run"), str(tmp_path / name)]) == 0
        assert capsys.readouterr().out == f"wrote {tmp_path / name}\n"
        assert (tmp_path / name).stat().st_size > 100
    assert main(["record", "export", str(tmp_path / "run"), str(tmp_path / "run.csv")]) == 1
    assert "must end in .py (for torchrun), .ipynb or .parquet" in capsys.readouterr().err
    assert main(["record", "export", str(tmp_path / "run"), str(tmp_path / "ro-crate-metadata.json")]) == 1
    assert "is written into it" in capsys.readouterr().err
    target = tmp_path / "run" / "ro-crate-metadata.json"
    assert main(["record", "export", str(tmp_path / "run"), str(target), "--license", "https://example.org/x"]) == 0
    assert capsys.readouterr().out == f"wrote {target}\n"
    assert "https://example.org/x" in target.read_text()


def test_what_is_wrong_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "show", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("monarch_kernel: error: ")
    assert "holds no record" in error
    write_run(tmp_path / "run")
    assert main(["record", "replay", str(tmp_path / "run"), "--mesh", "u"]) == 1
    assert "no cell ran on u; meshes: t" in capsys.readouterr().err
