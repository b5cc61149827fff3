"""A frame is stored once, read by many as if each had a copy, and its block is used again when all are done."""

from __future__ import annotations

import gc
import os
import threading

import numpy as np
import pytest

from monarch_kernel.data import blocks as blocks_module
from monarch_kernel.data.blocks import Blocks, Reference, open_block


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


def frame_of(byte: int, nbytes: int = 1 << 20) -> memoryview:
    return memoryview(bytes([byte]) * nbytes)


def refer(blocks: Blocks, view: memoryview, reader: str = "reader") -> Reference:
    reference = blocks.refer(view, reader)
    assert reference is not None
    return reference


def test_a_block_holds_what_the_frame_was(blocks: Blocks) -> None:
    source = bytearray(frame_of(1))
    view = blocks.store(memoryview(source))
    source[:] = frame_of(2)
    assert view == frame_of(1)
    assert open_block(refer(blocks, view)) == frame_of(1)


def test_readers_do_not_see_what_others_write(blocks: Blocks) -> None:
    view = blocks.store(frame_of(1))
    one, two = open_block(refer(blocks, view)), open_block(refer(blocks, view))
    one[5] = two[6] = 9
    assert (one[5], two[5], view[5]) == (9, 1, 1)
    assert (one[6], two[6], view[6]) == (1, 9, 1)


def test_a_block_is_used_again_when_nobody_uses_it(blocks: Blocks) -> None:
    view = blocks.store(frame_of(1))
    reference = refer(blocks, view)
    refer(blocks, view, "other")
    del view
    read = open_block(reference)
    array = np.frombuffer(read, "u1")
    del read
    blocks.forget("other")
    second = blocks.store(frame_of(2))
    assert len(blocks) == 2  # the array is in the first one
    assert (array == 1).all()
    del array, second
    gc.collect()
    third, fourth = blocks.store(frame_of(3)), blocks.store(frame_of(4, (1 << 20) - 5))
    assert len(blocks) == 2
    assert (third[0], fourth[0], len(fourth)) == (3, 4, (1 << 20) - 5)


def test_blocks_that_are_much_too_large_are_not_taken(blocks: Blocks) -> None:
    blocks.store(frame_of(1, 4 << 20))
    small = blocks.store(frame_of(2, 1 << 20))
    assert len(blocks) == 2
    assert small == frame_of(2)


def test_of_blocks_that_nobody_uses_few_are_kept(blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_idle_most", 3 << 20)
    held = [blocks.store(frame_of(i)) for i in range(8)]
    files = len(os.listdir("/proc/self/fd"))
    del held
    blocks.store(frame_of(1, 4 << 20))
    assert len(blocks) == 4
    assert len(os.listdir("/proc/self/fd")) == files - 4 * 2  # and the mapping has one, too


def test_what_a_child_may_still_read_is_not_used_again(blocks: Blocks) -> None:
    view = blocks.store(frame_of(1))
    read = open_block(refer(blocks, view))
    begin, end = os.pipe()
    pid = os.fork()
    if pid == 0:  # as a worker of a data loader
        os.read(begin, 1)
        os._exit(0 if bytes(read[:4096]) == bytes([1]) * 4096 else 1)
    del view, read
    blocks.store(frame_of(2))
    os.write(end, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(blocks) == 1  # the first one was let go
    os.close(begin)
    os.close(end)


def test_a_frame_that_is_larger_than_the_memory_is_refused_with_figures(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_module, "_available_nbytes", lambda: 50 << 20)
    with pytest.raises(MemoryError, match=r"0.1 GiB are to be sent, and 0.0 GiB of memory are free"):
        blocks.store(frame_of(1, 64 << 20))
    assert len(blocks) == 0


def test_a_sender_that_is_gone_is_an_error_of_the_system(blocks: Blocks) -> None:
    reference = refer(blocks, blocks.store(frame_of(1)))
    with pytest.raises(OSError, match="sender has ended"):
        open_block(
            Reference(reference.pid, 0, *tuple(getattr(reference, name) for name in ("inode", "nbytes", "turn")))
        )
    with pytest.raises(FileNotFoundError):
        open_block(Reference(1 << 22, reference.fd, reference.inode, reference.nbytes, reference.turn))


def test_frames_without_a_block_travel_themselves(blocks: Blocks) -> None:
    assert blocks.refer(frame_of(1), "reader") is None
    view = blocks.store(frame_of(1))
    references = [blocks.refer(view, "reader") for _ in range(5000)]
    assert None in references  # more readers than a block can tell apart
    assert references[0] is not None


def test_threads_store_and_read_at_the_same_time(blocks: Blocks) -> None:
    wrong: list[int] = []

    def work(byte: int) -> None:
        for i in range(200):
            view = blocks.store(frame_of(byte, (256 << 10) + i))
            read = open_block(refer(blocks, view, f"reader {byte}"))
            del view
            if bytes(read) != bytes(frame_of(byte, (256 << 10) + i)):
                wrong.append(byte)

    threads = [threading.Thread(target=work, args=[byte]) for byte in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(blocks) <= 12
