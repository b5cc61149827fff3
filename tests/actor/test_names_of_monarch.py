"""Names and signatures that scripts for PyTorch Monarch use, on our own classes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import sys
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch

import monarch_kernel.actor as api
from monarch_kernel.actor import (
    Actor,
    ActorError,
    Channel,
    Extent,
    Point,
    ProcMesh,
    SupervisionError,
    ValueMesh,
    as_endpoint,
    concurrent_endpoint,
    context,
    current_rank,
    current_size,
    endpoint,
    send,
    this_host,
    this_proc,
)
from monarch_kernel.actor.spawning import BootstrapCommand, Start, check_binds, default_bootstrap_cmd, starts
from monarch_kernel.errors import MeshFailure
from monarch_kernel.rdma import RDMAAction, RDMABuffer
from tests.support.waiting import LONG_S, wait_until


class Raises(Actor):
    @endpoint
    def fail(self) -> None:
        raise api.SupervisionError("the trainers are gone")


class Subject(Actor):
    """Looks at itself, and ends itself."""

    @endpoint(instrument=False)
    async def about(self) -> tuple[Any, ...]:
        instance = context().actor_instance
        self.logger.debug("looked at")
        return (instance.class_name, instance.proc_id, instance.creator, self.logger.name, json.dumps(current_size()))

    @endpoint
    async def spawn(self, procs: ProcMesh) -> Any:
        child: Any = procs.spawn("child", Subject)
        return await child.creator.call_one()

    @endpoint
    async def creator(self) -> Any:
        return context().actor_instance.creator, repr(context().actor_instance)

    @concurrent_endpoint(instrument=False)
    async def rank(self) -> int:
        return current_rank().rank

    @endpoint
    async def instance(self) -> Any:
        return context().actor_instance

    @endpoint
    async def retire(self) -> int:
        context().actor_instance.stop("it is old")
        return 1

    @endpoint
    async def give_up(self) -> None:
        context().actor_instance.abort("enough is enough")

    @endpoint
    async def fail(self) -> None:
        raise ValueError("no answer")

    @endpoint
    async def reply(self, port: Any) -> None:
        port.send("sent")


class SyncSubject(Actor):
    """The same on a thread."""

    def __cleanup__(self, error: BaseException | None) -> None:
        if os.environ.get("TOUCH"):
            Path(os.environ["TOUCH"]).touch()

    @endpoint
    def retire(self) -> int:
        context().actor_instance.stop("it is old")
        return 1

    @endpoint
    def give_up(self) -> None:
        context().actor_instance.abort("enough is enough")

    @endpoint
    def start_another(self) -> Any:
        return this_host().spawn_procs({"gpus": 1}).spawn("another", SyncSubject)

    @endpoint
    def where(self) -> tuple[str | None, list[int], str | None]:
        return os.environ.get("FOO"), sorted(os.sched_getaffinity(0)), os.environ.get("BY_WRAPPER")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> list[MeshFailure]:
    """Collect the failures that no owner has handled."""
    found: list[MeshFailure] = []
    monkeypatch.setattr(api, "unhandled_fault_hook", found.append)
    return found


def test_an_extent_is_made_of_names_and_sizes() -> None:
    extent = Extent(["hosts", "gpus"], [2, 4])
    assert extent == Extent({"hosts": 2, "gpus": 4})
    assert (extent.labels, extent.sizes) == (["hosts", "gpus"], [2, 4])
    assert (extent.labels, extent.sizes) == (("hosts", "gpus"), (2, 4))
    assert isinstance(extent.labels, list)
    assert (str(extent), f"{extent}") == ("{hosts: 2, gpus: 4}", "{'hosts': 2, 'gpus': 4}")
    assert pickle.loads(pickle.dumps(extent.labels)) == ["hosts", "gpus"]
    with pytest.raises(ValueError, match="1 axis was given with 2 sizes"):
        Extent(["hosts"], [2, 4])
    assert (extent.region.extent, list(extent.region.ranks)) == (extent, list(range(8)))  # type: ignore[attr-defined]
    point = Point(5, extent)
    assert (point.size("gpus"), point["hosts"]) == (4, 1)
    with pytest.raises(KeyError, match="'x'"):
        point.size("x")


def test_values_by_rank_and_sizes_of_axes() -> None:
    mesh = ValueMesh.from_indexed({"a": 2, "b": 2}, [(3, "d"), (0, "a"), (2, "c"), (1, "b")])
    assert [mesh.get(rank) for rank in range(4)] == ["a", "b", "c", "d"]
    assert mesh.slice(a=1).get(0) == "c"
    assert (mesh.size(dim="a"), mesh.size("b"), mesh.size(["a", "b"]), mesh.size(dim=("a",)), mesh.size()) == (
        2,
        2,
        4,
        2,
        4,
    )
    for rank in (-1, 4):
        with pytest.raises(IndexError):
            mesh.get(rank)
    with pytest.raises(ValueError, match="one value for each rank"):
        ValueMesh.from_indexed({"a": 2}, [(0, 1)])
    with pytest.raises(KeyError):
        mesh.size(dim="c")
    with pytest.raises(TypeError, match="not both"):
        mesh.size("a", dim="b")


def test_an_actor_error_is_made_of_an_exception() -> None:
    error = ActorError(ValueError("x"), "it failed")
    assert isinstance(error.exception, ValueError)
    assert (error.message, error.ranks) == ("it failed", (0,))
    assert "it failed" in str(error)
    assert "ValueError: x" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert "an actor failed" in str(ActorError(KeyError("y")))
    named = ActorError(exception=KeyError("y"), message="it failed again")
    assert (type(named.exception), named.message) == (KeyError, "it failed again")
    assert "KeyError: 'y'" in named.exception_formatted


def test_a_supervision_error_is_made_of_a_text(procs: ProcMesh) -> None:
    error = api.SupervisionError("the trainers are gone")
    assert (str(error), error.ranks, error.failures) == ("the trainers are gone", (), {})
    assert repr(error) == "<SupervisionError: the trainers are gone>"
    assert error.exception is error
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    with pytest.raises(ActorError, match="SupervisionError: the trainers are gone") as raised:
        cast(Any, procs.slice(r=0).spawn("raises", Raises)).fail.call_one().get(LONG_S)
    assert isinstance(raised.value.exception, api.SupervisionError)


def test_a_mesh_of_actors_is_annotated_with_its_class() -> None:
    assert get_args(api.ActorMesh[Raises]) == (Raises,)


def test_errors_of_shapes_are_those_of_both_packages() -> None:
    mesh = ValueMesh.from_indexed(shape={"a": 2}, pairs=[(0, "x"), (1, "y")])
    for wrong in (lambda: mesh.rename(b="c"), lambda: mesh.split(b=("c", "d"), c=1)):
        for error in (TypeError, ValueError):
            with pytest.raises(error, match="unknown axis 'b'"):
                wrong()
    for error in (IndexError, ValueError):
        with pytest.raises(error, match="selects nothing"):
            mesh.slice(a=slice(2, 3))


def test_an_instance_describes_itself(procs: ProcMesh) -> None:
    subject: Any = procs.spawn("subject", Subject)
    name, where, creator, log, size = subject.about.call().get(LONG_S).item(r=1)
    assert name.endswith("test_names_of_monarch.Subject")
    assert (where, creator, json.loads(size)) == ("t[1]", 0, {"r": 2})
    assert log.endswith(".Subject")
    instance = subject.slice(r=1).instance.call_one().get(LONG_S)
    assert (instance.name, instance.class_name) == ("subject", None)
    with pytest.raises(RuntimeError, match="no actor of this process"):
        context().actor_instance.stop()
    assert isinstance(Actor().logger, logging.Logger)
    assert Actor().logger.level == logging.DEBUG
    chosen = logging.getLogger(f"{Subject.__module__}.{Subject.__qualname__}")
    chosen.setLevel(logging.ERROR)
    assert Subject().logger.level == logging.ERROR
    chosen.setLevel(logging.NOTSET)


def test_an_instance_describes_what_has_spawned_it(procs: ProcMesh) -> None:
    subject: Any = procs.spawn("subject", Subject)
    creator, text = subject.slice(r=1).spawn.call_one(procs.slice(r=0)).get(LONG_S)
    kind = f"{Subject.__module__}.Subject"
    assert (creator.name, creator.class_name, creator.rank) == ("subject", kind, Point(1, Extent({"r": 2})))
    assert (creator.creator.name, creator.creator.class_name, creator.creator.creator) == ("client", None, None)
    assert creator.creator == 0
    assert creator.creator  # Monarch's code walks up with `while creator:`
    assert repr(creator) == f"<client>.<{kind} subject{{'r': 1/2}}>"
    assert text == f"{creator!r}.<{kind} child>"
    assert repr(context().actor_instance) == "<client>"


class Badge(Actor):
    """Has endpoints with names that meshes of actors have here, and not in Monarch."""

    @endpoint
    def name(self) -> str:
        return "the endpoint"

    @endpoint
    def announce(self) -> int:
        return 1

    @endpoint
    def fail(self) -> None:
        raise ValueError("no answer")


def test_endpoints_may_have_names_that_only_our_meshes_have(procs: ProcMesh) -> None:
    badge: Any = procs.spawn("badge", Badge)
    for part in (badge, badge.slice(r=slice(0, 1)), pickle.loads(pickle.dumps(badge))):
        assert set(part.name.call().get(LONG_S).values()) == {"the endpoint"}
        assert set(part.announce.call().get(LONG_S).values()) == {1}
        assert "badge" in repr(part)
        with pytest.raises(ActorError, match=r"badge\.fail"):
            part.fail.call().get(LONG_S)
    assert cast(Any, procs.spawn("subject", Subject)).name == "subject"
    badge.stop("enough").get(LONG_S)


@pytest.mark.parametrize("kind", [Subject, SyncSubject])
def test_an_actor_ends_itself(procs: ProcMesh, faults: list[MeshFailure], kind: Any) -> None:
    subject: Any = procs.slice(r=0).spawn("subject", kind)
    assert subject.retire.call_one().get(LONG_S) == 1
    with pytest.raises(SupervisionError, match="it is old"):
        subject.retire.call_one().get(LONG_S)
    assert not faults
    other: Any = procs.slice(r=0).spawn("other", kind)
    with pytest.raises(SupervisionError, match="enough is enough"):
        other.give_up.call_one().get(LONG_S)
    wait_until(lambda: faults, "the owner to get the failure")
    assert "enough is enough" in faults[0].report()


def test_a_mesh_is_shown_as_a_table(procs: ProcMesh) -> None:
    assert procs.to_table() == "r=0       r=1\n0.gpu[0]  0.gpu[1]"
    assert procs.split(r=("dp", "tp"), dp=2).to_table() == "dp  tp=0\n0   0.gpu[0]\n1   0.gpu[1]"
    assert procs.slice(r=1).to_table() == "process\n0.gpu[1]"
    assert this_proc().to_table() == "process\n0.gpu[0]"


def test_names_of_arguments_are_those_of_monarch(procs: ProcMesh) -> None:
    subject: Any = procs.spawn(name="subject", Class=Subject)
    assert len(subject.rank.call().get(LONG_S)) == 2
    marked: Any = endpoint(method=lambda self: 1)
    assert marked.function(None) == 1
    assert as_endpoint(not_an_endpoint=subject.rank) is not None
    with pytest.raises(NotImplementedError, match="spawn_procs"):
        ProcMesh.from_host_mesh(this_host(), None)
    subject.stop().get(LONG_S)


def test_answers_come_with_their_rank(procs: ProcMesh) -> None:
    subject: Any = procs.spawn("subject", Subject)
    port, receiver = Channel.open_ranked()
    send(subject.rank, (), {}, port=port)
    assert sorted(receiver.recv().get(LONG_S) for _ in range(2)) == [(0, 0), (1, 1)]
    subject.reply.broadcast(port)
    assert sorted(receiver.recv().get(LONG_S) for _ in range(2)) == [(0, "sent"), (1, "sent")]
    port, receiver = Channel.open(once=True)
    subject.slice(r=1).reply.broadcast(port)
    assert receiver.recv().get(LONG_S) == "sent"
    port, receiver = Channel.open()
    send(subject.rank, (), {}, port=port)
    ranked = receiver.ranked()
    assert {ranked.recv().get(LONG_S), ranked.recv().get(LONG_S)} == {(0, 0), (1, 1)}
    send(subject.slice(r=1).fail, (), {}, port=port)
    with pytest.raises(ValueError, match="no answer"):
        ranked.recv().get(LONG_S)
    assert ranked.ranked() is ranked


def test_processes_start_with_the_given_interpreter_environment_and_cpus(procs: ProcMesh, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexport BY_WRAPPER=$$\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    cpu = min(os.sched_getaffinity(0))

    async def use() -> tuple[Any, ...]:
        hosts = this_host().with_python_executable(python_executable=str(python))

        def command(point: Point) -> BootstrapCommand:
            return default_bootstrap_cmd().with_env({"FOO": f"bar{point['gpus']}"})

        async with hosts.spawn_procs(
            {"gpus": 2}, None, None, bootstrap_command=command, proc_bind=[{"cpus": str(cpu)}] * 2
        ) as mesh:
            assert mesh.host_mesh.extent == hosts.extent
            assert mesh.slice(gpus=0).host_mesh is mesh.host_mesh
            await mesh.logging_option(stream_to_client=True, aggregate_window_sec=1, level=10)
            subject: Any = mesh.spawn("subject", SyncSubject)
            another = await subject.slice(gpus=0).start_another.call_one()
            return (await subject.where.call()).values(), (await another.where.call_one())[2], mesh

    places, inner, mesh = asyncio.run(use())
    assert [place[:2] for place in places] == [("bar0", [cpu]), ("bar1", [cpu])]
    assert len({inner, *(place[2] for place in places)} - {None}) == 3  # a separate wrapper for each
    assert set(mesh.deaths()) == {0, 1}
    for begin in (lambda: procs.logging_option(True, 3), procs.sync_workspace, this_host().sync_workspace):
        assert (asyncio.run(begin()), begin().get()) == (None, None)  # type: ignore[func-returns-value]
    with pytest.raises(ValueError, match="aggregate_window_sec=None"):
        procs.logging_option(aggregate_window_sec=3)
    with pytest.raises(ValueError, match="from 0 to 255"):
        procs.logging_option(level=256)


def test_an_interpreter_that_does_not_exist_is_named(procs: ProcMesh) -> None:
    mesh = this_host().with_python_executable("/no/such/python").spawn_procs({"gpus": 1})
    with pytest.raises(SupervisionError, match="/no/such/python can't be run"):
        mesh.initialized.get(LONG_S)
    mesh.stop(grace_s=0).get(LONG_S)


def test_commands_add_and_remove_variables() -> None:
    extent = Extent({"gpus": 2})
    command = BootstrapCommand("/opt/python", env={"A": "1", "B": "2"}).with_env({"A": None, "C": None})
    assert command.env == {"A": None, "B": "2", "C": None}
    assert command.with_env({"A": "3"}).env == {"A": "3", "B": "2", "C": None}
    assert starts(command, {"C": "4"}, "", extent) == [Start({"B": "2", "C": "4"}, ("A",), "/opt/python")] * 2
    by_point = starts(lambda point: default_bootstrap_cmd().with_env({"R": str(point["gpus"])}), None, "/my", extent)
    assert [(start.env, start.python) for start in by_point] == [({"R": "0"}, "/my"), ({"R": "1"}, "/my")]
    assert starts(None, None, "", extent) == [Start({}, (), "")] * 2
    with pytest.raises(ValueError, match="with_python_executable"):
        BootstrapCommand("/bin/true", None, ["-x"])
    with pytest.raises(TypeError, match="'A' to 1"):
        BootstrapCommand(env={"A": 1})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="default_bootstrap_cmd"):
        starts(lambda point: "python", None, "", extent)  # type: ignore[arg-type, return-value]


def test_bindings_are_checked() -> None:
    check_binds([{"cpus": "0-3,8"}, {"physcpubind": "1"}], 2)
    for binds, error, text in [
        ([{"cpus": "0"}], ValueError, "1 entry, but each host has 2 processes"),
        ([{"cpus": "a"}, {}], ValueError, "list of numbers"),
        ([{"membind": "0"}, {}], ValueError, "numactl"),
        (["0", "1"], TypeError, "a dict"),
    ]:
        with pytest.raises(error, match=text):
            check_binds(binds, 2)  # type: ignore[arg-type]


def test_buffers_have_a_size_a_timeout_and_remote_names(procs: ProcMesh) -> None:
    memory = torch.arange(8, dtype=torch.uint8)
    buffer = RDMABuffer(data=memory)
    assert (buffer.size(), buffer.backend, buffer.owner) == (8, "tcp", "process 0")
    into = torch.zeros(8, dtype=torch.uint8)
    assert buffer.read_into(into, timeout=LONG_S).get(LONG_S).nbytes == 8
    RDMAAction().read_remote(into, buffer).write_remote(buffer, torch.ones_like(into)).submit(timeout=LONG_S).get(
        LONG_S
    )
    assert memory.tolist() == [1] * 8
