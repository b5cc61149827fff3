"""A frame is stored once and read by many as if each had a copy, and its block is reused when all are done."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import threading

import numpy as np
import pytest

from monarch_kernel.net.memory import mappings as mappings_module
from monarch_kernel.net.memory import shared_blocks as blocks_module
from monarch_kernel.net.memory.layout import memory_of
from monarch_kernel.net.memory.limits import Room
from monarch_kernel.net.memory.mappings import Mappings
from monarch_kernel.net.memory.shared_blocks import Blocks, Reference
from tests.support.descriptors import open_descriptors

mappings = Mappings()  # one per process, as it registers fork functions


@pytest.fixture
def blocks() -> Blocks:
    mappings.forget("sender")
    return Blocks()


def open_block(reference: Reference) -> memoryview:
    return mappings.open(reference, "sender")


def mapped_as(block: memoryview) -> str:
    """Return how a block is mapped here, in Linux's notation: permissions, and whether it is shared or private."""
    address = memory_of(block).address
    with open("/proc/self/maps") as lines:
        for line in lines:
            where, how, *_ = line.split()
            begin, end = (int(each, 16) for each in where.split("-"))
            if begin <= address < end:
                return how
    return "not at all"


def frame_of(byte: int, nbytes: int = 1 << 20) -> memoryview:
    return memoryview(bytes([byte]) * nbytes)


def refer(blocks: Blocks, view: memoryview, reader: str = "reader") -> Reference:
    reference = blocks.refer(view, reader)
    assert reference is not None
    return reference


def test_a_block_holds_the_content_of_the_frame(blocks: Blocks) -> None:
    source = bytearray(frame_of(1))
    view = blocks.store([memoryview(source)])
    source[:] = frame_of(2)
    assert view == frame_of(1)
    assert open_block(refer(blocks, view)) == frame_of(1)


def test_readers_do_not_see_what_others_write(blocks: Blocks) -> None:
    view = blocks.store([frame_of(1)])
    one, two = open_block(refer(blocks, view)), open_block(refer(blocks, view))
    one[5] = two[6] = 9
    assert (one[5], two[5], view[5]) == (9, 1, 1)
    assert (one[6], two[6], view[6]) == (1, 9, 1)


def test_a_block_is_reused_when_it_is_unused(blocks: Blocks) -> None:
    view = blocks.store([frame_of(1)])
    reference = refer(blocks, view)
    refer(blocks, view, "other")
    del view
    read = open_block(reference)
    array = np.frombuffer(read, "u1")
    del read
    blocks.forget("other")
    second = blocks.store([frame_of(2)])
    assert len(blocks) == 2  # the array is in the first one
    assert (array == 1).all()
    del array, second
    gc.collect()
    third, fourth = blocks.store([frame_of(3)]), blocks.store([frame_of(4, (1 << 20) - 5)])
    assert len(blocks) == 2
    assert (third[0], fourth[0], len(fourth)) == (3, 4, (1 << 20) - 5)


def test_much_larger_blocks_are_not_reused(blocks: Blocks) -> None:
    blocks.store([frame_of(1, 4 << 20)])
    small = blocks.store([frame_of(2, 1 << 20)])
    assert len(blocks) == 2
    assert small == frame_of(2)


def test_few_unused_blocks_are_kept(blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_idle_most", 3 << 20)
    before = open_descriptors()
    held = [blocks.store([frame_of(i)]) for i in range(8)]
    assert len(open_descriptors() - before) == 8 * 2  # the mapping has one, too
    del held
    blocks.store([frame_of(1, 4 << 20)])
    assert len(blocks) == 4
    assert len(open_descriptors() - before) == 4 * 2


def test_a_block_that_a_child_may_still_read_is_not_reused(blocks: Blocks) -> None:
    view = blocks.store([frame_of(1)])
    read = open_block(refer(blocks, view))
    begin, end = os.pipe()
    pid = os.fork()
    if pid == 0:  # like a worker of a data loader
        os.read(begin, 1)
        os._exit(0 if bytes(read[:4096]) == bytes([1]) * 4096 else 1)
    del view, read
    blocks.store([frame_of(2)])
    os.write(end, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(blocks) == 1  # the first one was closed
    os.close(begin)
    os.close(end)


def test_values_that_are_larger_than_the_memory_are_refused_with_figures(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_module, "room", lambda: Room(1 << 30, "free memory"))
    blocks.check(990 << 20)
    with pytest.raises(MemoryError, match=r"^1.00 GiB are needed, and there are 1.00 GiB of free memory, some"):
        blocks.check(1020 << 20)
    del [blocks.store([frame_of(1, 32 << 20)])][0]
    blocks.check(1020 << 20)  # the blocks that are kept for the next value count as free


def test_unused_blocks_make_room_for_a_new_value(blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks.store([frame_of(1, 16 << 20)])
    blocks.store([frame_of(1, 4 << 20)])
    monkeypatch.setattr(blocks_module, "room", lambda: Room(1 << 20, "free memory"))
    view = blocks.store([memoryview(bytes(64 << 20))])
    assert len(blocks) == 1
    assert view.nbytes == 64 << 20


def test_a_failure_to_make_a_file_is_an_error_with_the_reason(blocks: Blocks) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 29, limits[1]))
    try:
        with pytest.raises(
            MemoryError, match=r"1.00 GiB are needed, and a file .* may have at most 0.50 GiB \(ulimit -f\)"
        ):
            blocks._take(1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_sender_that_has_ended_raises_an_os_error(blocks: Blocks) -> None:
    reference = refer(blocks, blocks.store([frame_of(1)]))
    with pytest.raises(OSError, match="sender has ended"):
        open_block(
            Reference(reference.pid, 0, *tuple(getattr(reference, name) for name in ("inode", "nbytes", "turn")))
        )
    with pytest.raises(FileNotFoundError):
        open_block(Reference(1 << 22, reference.fd, reference.inode, reference.nbytes, reference.turn))


def test_frames_without_a_block_are_sent_themselves(blocks: Blocks) -> None:
    assert blocks.refer(frame_of(1), "reader") is None
    view = blocks.store([frame_of(1)])
    references = [blocks.refer(view, "reader") for _ in range(5000)]
    assert None in references  # more readers than a block has bytes for
    assert references[0] is not None


def test_threads_store_and_read_at_the_same_time(blocks: Blocks) -> None:
    wrong: list[int] = []

    def work(byte: int) -> None:
        for i in range(200):
            view = blocks.store([frame_of(byte, (256 << 10) + i)])
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


def test_the_only_reader_writes_without_a_copy(blocks: Blocks) -> None:
    view = blocks.store([frame_of(1)])
    reference = refer(blocks, view)
    del view  # the sender releases it before the message arrives
    read = open_block(reference)
    assert mapped_as(read) == "rw-s"
    read[7] = 9
    assert (read[6], read[7]) == (1, 9)


@pytest.mark.parametrize("kept", ["the sender keeps it", "there is another reader", "one is done before the other"])
def test_a_reader_that_may_not_be_the_only_one_writes_to_a_copy(blocks: Blocks, kept: str) -> None:
    view = blocks.store([frame_of(1)])
    reference = refer(blocks, view)
    others = [view] if kept == "the sender keeps it" else [open_block(refer(blocks, view, "other"))]
    del view
    read = open_block(reference)
    assert mapped_as(read) == "rw-p"
    read[7] = 9
    if kept == "one is done before the other":
        others = [open_block(Reference(*reference))]  # as the block assumes
    assert others[0][7] == 1


def test_a_frame_that_is_sent_again_is_unchanged(blocks: Blocks) -> None:
    view = blocks.store([frame_of(1)])  # like a spawn, which is kept for a replacement of the process
    first = open_block(refer(blocks, view))
    first[0] = 9
    del first
    assert open_block(refer(blocks, view, "its next incarnation")) == frame_of(1)


def test_a_mapping_is_reused_and_shows_the_new_content(blocks: Blocks) -> None:
    for byte in range(1, 6):
        view = blocks.store([frame_of(byte)])
        reference = refer(blocks, view)
        if byte % 2:
            del view
        read = open_block(reference)
        assert read == frame_of(byte)
        if byte > 2:
            read[:100] = bytes(100)  # pages of a private mapping become copies, which must not appear again
        del read
        view = None
    assert len(blocks) == 1


def test_reused_pages_cause_no_faults(blocks: Blocks) -> None:
    def read_one(is_sole: bool) -> int:
        view = blocks.store([frame_of(1, 16 << 20)])
        reference = refer(blocks, view)
        if is_sole:
            del view
        read = open_block(reference)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        np.frombuffer(read, "u1").max()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    for is_sole in (True, False):
        first, again = read_one(is_sole), read_one(is_sole)
        assert again < first / 4


def test_memory_is_freed_while_readers_keep_their_mappings(blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    view = blocks.store([frame_of(1, 8 << 20)])
    reference = refer(blocks, view)
    del view
    open_block(reference)  # ends its use at once
    monkeypatch.setattr(blocks, "_idle_most", 0)
    fd = os.dup(reference.fd)
    assert os.fstat(fd).st_blocks * 512 >= 8 << 20
    blocks.store([frame_of(1)])
    assert os.fstat(fd).st_blocks == 0
    os.close(fd)


def test_a_fork_makes_shared_mappings_private(blocks: Blocks) -> None:
    view = blocks.store([frame_of(1)])
    reference = refer(blocks, view)
    del view
    read = open_block(reference)
    begin, end = os.pipe()
    back, forth = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(begin, 1)
        is_unseen = read[0] == 1
        read[1] = 9
        os.write(forth, b"x")
        os.read(begin, 1)
        os._exit(0 if is_unseen else 1)
    read[0] = 9
    os.write(end, b"x")
    os.read(back, 1)
    assert read[1] == 1
    os.write(end, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for fd in (begin, end, back, forth):
        os.close(fd)


def test_the_parent_keeps_a_block_that_a_child_releases(blocks: Blocks) -> None:
    view = blocks.store([frame_of(1)])
    kept = blocks.store([frame_of(2)])
    reference = refer(blocks, kept)
    read = open_block(refer(blocks, view))
    del view
    pid = os.fork()
    if pid == 0:
        del read, kept
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    blocks.store([frame_of(3)])
    assert read == frame_of(1)
    other = open_block(reference)
    other[0] = 9
    assert kept[0] == 2


@pytest.mark.parametrize("wrong", [{"nbytes": 2 << 20}, {"turn": 0}, {"turn": mmap.PAGESIZE}, {"nbytes": -1}])
def test_an_invalid_reference_is_refused(blocks: Blocks, wrong: dict[str, int]) -> None:
    view = blocks.store([frame_of(1)])
    with pytest.raises(OSError, match="points outside its file"):
        open_block(refer(blocks, view)._replace(**wrong))


@pytest.mark.parametrize("last", ["reader", "sender"])
def test_a_block_too_large_to_keep_is_emptied_by_its_last_user(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    for module in (blocks_module, mappings_module):
        monkeypatch.setattr(module, "idle_most", lambda: 1 << 20)
    view: memoryview | None = blocks.store([frame_of(1, 8 << 20)])
    assert view is not None
    reference = refer(blocks, view)
    read: memoryview | None = open_block(reference)
    if last == "reader":
        view = None
        assert read == frame_of(1, 8 << 20)
        read = None
    else:
        read = None
        assert view == frame_of(1, 8 << 20)
        view = None
    assert os.fstat(reference.fd).st_blocks * 512 <= mmap.PAGESIZE
    assert blocks.store([frame_of(2, 8 << 20)]) == frame_of(2, 8 << 20)


def memory_nbytes() -> int:
    """Return the shared memory that this process has mapped."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssShmem:"))


def test_unused_blocks_that_a_dead_process_has_read_are_closed(blocks: Blocks) -> None:
    before = memory_nbytes()
    views = [blocks.store([frame_of(i, 8 << 20)]) for i in range(4)]
    for i, view in enumerate(views):
        refer(blocks, view, "dies" if i < 3 else "lives")
    kept = views[2]
    del view, views[:]
    blocks.forget("dies")
    assert len(blocks) == 2  # one is still used here, and one has another reader
    assert kept == frame_of(2, 8 << 20)
    blocks.forget("lives")
    del kept
    assert memory_nbytes() - before < 8 << 20  # the block that was in use is empty


def test_a_block_of_a_dead_sender_is_unmapped_when_its_content_is_unused(blocks: Blocks) -> None:
    view = blocks.store([frame_of(1, 8 << 20)])
    read = open_block(refer(blocks, view))
    del view
    assert read == frame_of(1, 8 << 20)
    before = open_descriptors()
    mappings.forget("sender")
    assert read == frame_of(1, 8 << 20)
    del read
    assert len(before) - len(open_descriptors()) == 1
    assert not mappings._idle
