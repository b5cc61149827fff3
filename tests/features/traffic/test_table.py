"""Tables of traffic are short however many ranks there are, and differences are exact."""

from __future__ import annotations

from monarch_kernel.features.traffic.table import CollectiveRow, End, Traffic, TrafficRow

MIB = 1 << 20
PROGRAM = End("", 0, 0)


def rank(number: int, mesh: str = "t", *, is_dead: bool = False) -> End:
    return End(mesh, number, number + (1 if mesh == "t" else 101), is_dead)


def row(source: End, target: End, nbytes: int, **fields: object) -> TrafficRow:
    return TrafficRow(source, target, "memory", nbytes, 2, 0.5)._replace(**fields)


def test_each_pair_has_a_row_in_aligned_columns() -> None:
    rows = (
        row(rank(0), rank(1, is_dead=True), 3 * MIB, is_last_known=True),
        row(PROGRAM, rank(0), 5, path="socket", seconds=0.0),
    )
    assert str(Traffic("t", rows)).split("\n") == [
        "traffic of t: 3.0 MiB in 4 operations between 2 pairs",
        "from     to           path      bytes  operations    busy  mean rate",
        "t[0]     t[1] (dead)  memory  3.0 MiB           2  500 ms  6.0 MiB/s",
        "program  t[0]         socket      5 B           2",
        "some counts are the last known ones of ranks that are dead or do not answer",
    ]
    assert str(Traffic("t")) == "traffic of t: nothing yet"


def test_many_ranks_are_combined_by_mesh_and_the_busiest_are_named() -> None:
    rows = [row(rank(i), rank((i + 1) % 64), MIB * (i + 1)) for i in range(64)]
    rows += [row(rank(i, "gen"), PROGRAM, MIB) for i in range(30)]
    rows.sort(key=lambda each: -each.nbytes)
    lines = str(Traffic("t", tuple(rows))).split("\n")
    assert lines[:4] == [
        "traffic of t: 2.1 GiB in 188 operations between 94 pairs",
        "from       to       path    pairs    bytes  operations  busy  mean rate",
        "t[0-63]    t[0-63]  memory     64  2.0 GiB         128  32 s   65 MiB/s",
        "gen[0-29]  program  memory     30   30 MiB          60  15 s  2.0 MiB/s",
    ]
    assert lines[4:6] == ["most of it:", "t[63] to t[0] by memory: 64 MiB"]
    assert len(lines) == 13


def test_the_difference_of_two_tables() -> None:
    earlier = Traffic("t", (row(rank(0), rank(1), 100), row(rank(1), rank(0), 50)), (collective(1),), unread=1)
    later = Traffic(
        "t",
        (row(rank(0), rank(1), 350, operations=5, seconds=0.75), row(rank(1), rank(0), 50), row(PROGRAM, rank(1), 7)),
        (collective(3), collective(1, "barrier", 0)),
        unread=4,
    )
    between = later - earlier
    assert between.rows == (row(rank(0), rank(1), 250, operations=3, seconds=0.25), row(PROGRAM, rank(1), 7))
    assert between.collectives == (collective(2), collective(1, "barrier", 0))
    assert (between.nbytes, between.operations, between.unread) == (257, 5, 3)
    assert (later - later).rows == ()
    died = later - Traffic("t", (row(rank(0), rank(1, is_dead=True), 350, operations=5, seconds=0.75),))
    assert [each.nbytes for each in died.rows] == [50, 7]


def collective(operations: int, operation: str = "all_reduce", nbytes: int = 4000, number: int = 0) -> CollectiveRow:
    return CollectiveRow(rank(number), "", operation, nbytes * operations, operations, 0.0)


def test_collectives_have_a_row_for_each_kind() -> None:
    rows = (collective(2), collective(1, number=1), collective(1, "barrier", 0), collective(1, "barrier", 0, number=1))
    assert str(Traffic("t", (), rows, unread=1)).split("\n")[2:] == [
        "collectives of t",
        "collective  ranks        bytes a rank   times",
        "all_reduce  [0-1]  3.9 KiB to 7.8 KiB  1 to 2",
        "barrier     [0-1]                 0 B       1",
        "1 collective more, which torch has counted: bytes unknown",
    ]


def timed(path: str, number: int = 0) -> CollectiveRow:
    nbytes = 3 * MIB
    return CollectiveRow(
        rank(number), "", "all_reduce", nbytes, 1, 0.5, False, path, 4, 5 * MIB, 5 * MIB, nbytes, 0.5 + number
    )


def test_collectives_are_not_nothing() -> None:
    assert str(Traffic("t", (), (collective(1),))).startswith("traffic of t: no values or buffers\n")


def test_the_least_wait_is_that_of_a_rank_that_has_waited() -> None:
    rows = (collective(1), collective(1, number=1)._replace(seconds=0.5), collective(1, number=2)._replace(seconds=0.9))
    assert "500 ms to 900 ms" in str(Traffic("t", (), rows))


def test_collectives_have_bandwidths_by_data_path() -> None:
    rows = (timed("gloo"), timed("gloo", 1), timed("nccl")._replace(timed_nbytes=0, timed_s=0.0))
    assert str(Traffic("t", (), rows)).split("\n")[2:] == [
        "collectives of t",
        "collective  path  ranks  bytes a rank  times  waited      algbw      busbw",
        "all_reduce  gloo  [0-1]       3.0 MiB      1  500 ms  3.0 MiB/s  4.5 MiB/s",
        "all_reduce  nccl  [0]         3.0 MiB      1  500 ms",
    ]
    assert rows[0].algorithm_bytes_per_s == 6 * MIB
    assert rows[0].bus_bytes_per_s == 9 * MIB
    assert rows[2].bus_bytes_per_s == 0


def test_the_difference_of_two_tables_has_the_bandwidths_of_the_time_between() -> None:
    later = timed("gloo")._replace(nbytes=4 * MIB, operations=3, timed_nbytes=5 * MIB, timed_s=0.75, nbytes_in=7 * MIB)
    (between,) = (Traffic("t", (), (later,)) - Traffic("t", (), (timed("gloo"),))).collectives
    assert (between.nbytes, between.nbytes_in, between.nbytes_out) == (MIB, 2 * MIB, 0)
    assert between.algorithm_bytes_per_s == 8 * MIB


def test_the_speeds_of_links_are_below_the_last_table() -> None:
    links = {0: (("eth0", 3.125e9),), 1: (("eth0", 3.125e9),)}
    line = "links of [0-1], each way: eth0 2.9 GiB/s"
    assert str(Traffic("t", (row(rank(0), rank(1), MIB),), links=links)).split("\n")[-1] == line
    text = str(Traffic("t", (row(rank(0), rank(1), MIB),), (timed("gloo"),), links=links))
    assert text.split("\n")[-1] == line
    assert text.count("links of") == 1


def test_html_has_the_same_tables_and_is_escaped() -> None:
    html = Traffic("<t>", (row(rank(0, "t"), PROGRAM, 3 * MIB),), (collective(1),))._repr_html_()
    assert html.count("<table") == 2
    assert "&lt;t&gt;" in html
    assert "<t>" not in html
    assert "3.0 MiB" in html
