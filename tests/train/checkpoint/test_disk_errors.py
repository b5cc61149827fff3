"""The first line about a file that can't be written or read says which and why, whatever chain of errors it comes in."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from monarch_kernel.train.checkpoint.disk_errors import why


def nested(inner: BaseException) -> BaseException:
    """The error within others, as torch and zipfile raise it."""
    try:
        try:
            try:
                raise inner
            except BaseException as error:
                raise ValueError("Can't close the ZIP file while there is an open writing handle on it") from error
        except ValueError:
            raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")  # noqa: B904  as torch does
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (errno.ENOSPC, "no space is left on the disk in {folder} (OSError)"),
        (errno.EDQUOT, "the quota of the disk is exceeded in {folder} (OSError)"),
        (errno.EACCES, "there is no permission in {folder} (PermissionError)"),
        (errno.EPERM, "there is no permission in {folder} (PermissionError)"),
        (errno.EROFS, "the file system is read-only in {folder} (OSError)"),
        (errno.ENOENT, "{folder}/gone/x does not exist (FileNotFoundError)"),
        (errno.ENAMETOOLONG, "a name in the path is too long (OSError)"),
        (errno.EMFILE, "too many files are open (OSError)"),
        (errno.EIO, "the disk or the network file system fails in {folder} (OSError: Input/output error)"),
    ],
)
def test_the_failure_of_the_system_is_named_first(tmp_path: Path, code: int, says: str) -> None:
    error = OSError(code, os.strerror(code), str(tmp_path / "gone" / "x"))
    for one in (error, nested(error)):
        assert why(one).text == says.format(folder=tmp_path)
        assert why(one).remedy


def test_a_file_in_place_of_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as caught:
        (tmp_path / "file" / "a").mkdir(parents=True)
    assert why(caught.value).text == f"{tmp_path / 'file'} is a file, not a directory (NotADirectoryError)"


def test_a_file_of_torch_that_ends_early_means_a_full_disk() -> None:
    error = RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")
    assert why(error).text == "a file could not be written to its end, as on a full disk"


def test_another_error_has_its_class_and_its_first_line() -> None:
    assert why(KeyError("w")) == ("KeyError: 'w'", "")
    assert why(ValueError()) == ("ValueError", "")
    assert why(RuntimeError("\nfirst\nsecond")).text == "RuntimeError: first"
    assert len(why(RuntimeError("x" * 10_000)).text) < 600


def test_a_circle_of_errors_ends() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert why(one).text == "ValueError: one"
