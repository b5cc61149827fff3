"""Random hangs of a mesh of four ranks: cells in which some ranks never enter what the others wait in.

`draw` makes a cell of a seed, together with what is true of each rank while it hangs. `hang_texts` compares this with what the
product says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from monarch_kernel.base.text import format_ranks
from tests.failures.hang_calls import LIBRARIES

__all__ = ["KINDS", "REASONS", "At", "Finished", "Hang", "N", "Stalled", "Waits", "draw"]

N = 4
"""Ranks of the mesh."""

WARN_AFTER_S = 1.0
"""The age from which the cell reports a wait, in seconds; the report of an interrupt describes waits of this age, too."""


@dataclass(frozen=True)
class Waits:
    """A rank waits in a call.

    Attributes:
        operations: names for the call, any of which is right.
        line: line of the cell.
    """

    operations: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class At:
    """A rank runs a line of the cell that is no call of torch.distributed."""

    line: int


@dataclass(frozen=True)
class Finished:
    """A rank has finished the cell."""


@dataclass(frozen=True)
class Stalled:
    """A wait that the product must describe.

    Attributes:
        operations: names for the call, any of which is right.
        waiting: the ranks in it.
        missing: the ranks that they wait for.
        group: members of the process group, if it is not the default one.
        words: texts that the description must contain, such as a tag.
    """

    operations: tuple[str, ...]
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    group: tuple[int, ...] = ()
    words: tuple[str, ...] = ()


@dataclass
class Hang:
    """A cell that hangs.

    Attributes:
        seed: what it was made of.
        kind: what the ranks wait in.
        where: the kind of process group.
        reason: why ranks are missing.
        code: the cell.
        truth: rank -> where it is while the cell hangs.
        stalls: the waits.
        is_local: whether the cell runs in the notebook and calls an actor.
    """

    seed: int
    kind: str
    where: str
    reason: str
    code: str
    truth: dict[int, Waits | At | Finished]
    stalls: list[Stalled]
    is_local: bool = False

    @property
    def title(self) -> str:
        missing = sorted({rank for stall in self.stalls for rank in stall.missing})
        return f"seed {self.seed}: {self.kind}, {self.where} group, {missing} missing: {self.reason}"


@dataclass
class _Cell:
    """Lines of a cell, some of which have a name."""

    lines: list[str]
    names: dict[str, int] = field(default_factory=dict)

    def add(self, text: str, name: str = "") -> None:
        self.lines.append(text)
        if name:
            self.names[name] = len(self.lines)

    @property
    def code(self) -> str:
        return "\n".join(self.lines) + "\n"


COLLECTIVES = {
    "all_reduce": "dist.all_reduce(x, group=g)",
    "broadcast": "dist.broadcast(x, SOURCE, group=g)",
    "all_gather": "dist.all_gather([torch.zeros(4) for _ in range(dist.get_world_size(g))], x, group=g)",
    "reduce_scatter": "dist.reduce_scatter_tensor(torch.zeros(1), torch.ones(dist.get_world_size(g)), group=g)",
    "barrier": "dist.barrier(group=g)",
    "monitored_barrier": "dist.monitored_barrier(group=g)",
    "all_gather_object": "dist.all_gather_object([None] * dist.get_world_size(g), {'rank': rank}, group=g)",
    "broadcast_object_list": "dist.broadcast_object_list([rank], SOURCE, group=g)",
    "all_to_all": "dist.all_to_all_single(torch.zeros(12), torch.ones(12), group=g)",
    "all_gather_into_tensor": "dist.all_gather_into_tensor(torch.zeros(dist.get_world_size(g)), torch.ones(1), group=g)",
    "scatter": "dist.scatter(x, PARTS, SOURCE, group=g)",
    "gather_object": "dist.gather_object(rank, LIST, SOURCE, group=g)",
    "scatter_object_list": "dist.scatter_object_list([None], OBJECTS, SOURCE, group=g)",
    "async": "dist.all_reduce(x, group=g, async_op=True).wait()",
    "functional": "functional.all_reduce(x, 'sum', g or dist.group.WORLD).sum().item()",
}
FROM_SOURCE = ("broadcast", "broadcast_object_list", "scatter", "scatter_object_list")
"""Collectives in which only the source can keep the others waiting."""

MAKING = {
    "new_group": "made = dist.new_group(list(range(4)))",
    "init_device_mesh": "made = dist.init_device_mesh('cpu', (2, 2), mesh_dim_names=('a', 'b'))",
}
OTHERS = ("store", "file store", "ddp", "ddp init", "fsdp", "fsdp backward", "hsdp", "dtensor", "init_process_group")
"""Kinds that use the default group only."""

REASONS = (
    "sleeps in a function",
    "finished",
    "waits elsewhere",
    "loops",
    "swallowed an error",
    "waits for a queue",
    "runs a program",
)
KINDS = (
    *COLLECTIVES,
    *MAKING,
    "recv",
    "tags",
    "batch_isend_irecv",
    *OTHERS,
    *LIBRARIES,
    "group of some",
    "recv_object_list",
    "irecv",
    "actor",
    "live.loop",
    "uneven steps",
    "pipeline",
    "pipeline step",
    "recv from any rank",
)


def draw(seed: int, kind: str = "") -> Hang:
    """Make a hang.

    Args:
        seed: seed of all random choices.
        kind: one of `KINDS`; a random one if empty.
    """
    dice = random.Random(seed)
    drawn = dice.choice(KINDS)
    kind = kind or drawn
    maker: dict[str, Callable[[random.Random, str], Hang]] = {
        "recv": _message,
        "recv from any rank": _from_any,
        "recv_object_list": _other_message,
        "irecv": _other_message,
        "tags": _tags,
        "group of some": _some,
        "batch_isend_irecv": _ring,
        "actor": _actor,
        "live.loop": _uneven,
        "uneven steps": _uneven,
        "pipeline": _pipeline,
        "pipeline step": _pipeline,
    }
    hang = maker.get(kind, _collective)(dice, kind)
    hang.seed = seed
    return hang


def _begin(**options: str) -> _Cell:
    given = "".join(f" --{name} {value}" for name, value in options.items())
    cell = _Cell([f"%%remote t --warn-after {WARN_AFTER_S:g}{given}"])
    cell.add("import time, torch, torch.distributed as dist")
    cell.add("x = torch.ones(4) * rank")
    return cell


def _functions(cell: _Cell, indent: str = "") -> None:
    """Define where missing ranks are."""
    cell.add(f"{indent}def load_batch():")
    cell.add(f"{indent}    time.sleep(600)", "sleeps in a function")
    cell.add(f"{indent}def spin():")
    cell.add(f"{indent}    while True: pass", "loops")
    cell.add(f"{indent}def next_batch():")
    cell.add(f"{indent}    __import__('queue').Queue().get()", "waits for a queue")
    cell.add(f"{indent}def convert():")
    cell.add(f"{indent}    __import__('subprocess').run(['sleep', '600'])", "runs a program")
    cell.add(f"{indent}def parse():")
    cell.add(f"{indent}    try: int('bad row')")
    cell.add(f"{indent}    except ValueError: return None")


_WHAT = {
    "sleeps in a function": "load_batch()",
    "finished": "pass",
    "waits elsewhere": "dist.all_reduce(x, group=other)",
    "loops": "spin()",
    "swallowed an error": "parse()",
    "waits for a queue": "next_batch()",
    "runs a program": "convert()",
}


def _of_reason(reason: str, cell: _Cell) -> Waits | At | Finished:
    """Where a rank is that is missing for a reason."""
    if reason in ("finished", "swallowed an error"):
        return Finished()
    if reason == "waits elsewhere":
        return Waits(("all_reduce",), cell.names["missing"])
    return At(cell.names[reason])


def _elsewhere(reason: str, missing: Sequence[int]) -> list[Stalled]:
    if reason != "waits elsewhere":
        return []
    everyone = tuple(range(N))
    others = tuple(rank for rank in everyone if rank not in missing)
    return [Stalled(("all_reduce",), tuple(missing), others, everyone)]


def _collective(dice: random.Random, kind: str) -> Hang:
    reason = dice.choice(REASONS)
    where = dice.choice(("default", "user", "mesh", "other axis"))
    if kind in MAKING or kind in OTHERS or kind in LIBRARIES:
        where = "default"
    if kind == "init_process_group" and reason == "waits elsewhere":
        reason = "loops"  # the other group goes with the default one
    cell = _begin()
    groups: list[tuple[int, ...]] = [tuple(range(N))]
    cell.add("other = dist.new_group(list(range(4)))")
    if where == "default":
        cell.add("g = None")
    elif where == "user":
        members = tuple(sorted(dice.sample(range(N), dice.choice((2, 3, 4)))))
        groups = [members]
        cell.add(f"g = dist.new_group({list(members)})")
    else:
        groups = [(0, 1), (2, 3)] if where == "mesh" else [(0, 2), (1, 3)]
        cell.add("device_mesh = dist.init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))")
        cell.add(f"g = device_mesh.get_group('{'tp' if where == 'mesh' else 'dp'}')")
    is_of_mesh = len(groups) > 1
    if kind in FROM_SOURCE:
        broken = [dice.choice(groups)]
        missing = [broken[0][0]] if is_of_mesh else [dice.choice(broken[0])]
    else:
        broken = dice.sample(groups, dice.choice((1, 2))) if is_of_mesh else groups
        missing = []
        for members in broken:
            missing += dice.sample(members, dice.randrange(1, len(members)))
    missing.sort()
    everyone = sorted(rank for members in groups for rank in members)
    first = {rank: members[0] for members in groups for rank in members}
    source = f"[{', '.join(str(first[rank]) for rank in everyone)}][rank]" if is_of_mesh else str(missing[0])
    _functions(cell)
    steps = dice.randrange(3)
    call = _call_of(kind, cell).replace("SOURCE", source)
    size = "dist.get_world_size(g)"
    for name, value in (("PARTS", f"[x] * {size}"), ("LIST", f"[None] * {size}"), ("OBJECTS", f"[1] * {size}")):
        call = call.replace(name, f"{value} if rank == {source} else None")
    indent = ""
    if where == "user":
        cell.add(f"if rank in {list(groups[0])}:")
        indent = "    "
    if kind not in MAKING and kind not in ("store", "file store", "init_process_group"):
        cell.add(f"{indent}for step in range({steps}):")
        cell.add(f"{indent}    {call}")
    cell.add(f"{indent}if rank in {missing}:")
    cell.add(f"{indent}    {_WHAT[reason]}", "missing")
    cell.add(f"{indent}else:")
    cell.add(f"{indent}    {call}", "" if "waits" in cell.names else "waits")
    operations, words = _names_of(kind, steps)
    truth: dict[int, Waits | At | Finished] = {rank: Finished() for rank in range(N)}
    stalls = []
    for members in broken:
        gone = tuple(rank for rank in members if rank in missing)
        waiting = tuple(rank for rank in members if rank not in missing)
        truth.update({rank: Waits(operations, cell.names["waits"]) for rank in waiting})
        truth.update({rank: _of_reason(reason, cell) for rank in gone})
        needed = _needed(missing) if kind == "init_device_mesh" else gone
        stalls.append(Stalled(operations, waiting, needed, members if where != "default" else (), words))
    assert set(everyone) >= set(missing)
    return Hang(0, kind, where, reason, cell.code, truth, stalls + _elsewhere(reason, missing))


def _needed(missing: Sequence[int]) -> tuple[int, ...]:
    """The missing ranks with which waiting ranks make a group for a 2x2 mesh: first along the first axis, then the second."""
    return tuple(
        rank for rank in missing if rank ^ 2 not in missing or (rank ^ 1 not in missing and rank ^ 1 ^ 2 not in missing)
    )


def _call_of(kind: str, cell: _Cell) -> str:
    """The call that ranks wait in, after lines that it needs."""
    if kind in MAKING:
        return MAKING[kind]
    if (library := LIBRARIES.get(kind)) is not None:
        for number, line in enumerate(library.setup, 1):
            cell.add(line, "waits" if number == library.where else "")
        return library.call
    if kind == "store":
        cell.add("server = dist.TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False) if rank == 0 else None")
        cell.add("port = [server.port if rank == 0 else 0]")
        cell.add("dist.broadcast_object_list(port, 0)")
        cell.add("store = server or dist.TCPStore('127.0.0.1', port[0], None, False)")
        return "store.wait(['vocabulary'])"
    if kind == "file store":
        cell.add("path = [__import__('tempfile').mkdtemp()]; dist.broadcast_object_list(path, 0)")
        cell.add("store = dist.FileStore(path[0] + '/keys', 4)")
        return "store.get('vocabulary')"
    if kind == "init_process_group":
        return "dist.destroy_process_group(); dist.init_process_group('gloo')"
    if kind == "ddp init":
        cell.add("linear = torch.nn.Linear(4, 2)")
        return "torch.nn.parallel.DistributedDataParallel(linear)"
    if kind == "dtensor":
        cell.add("from torch.distributed.tensor import Shard, distribute_tensor")
        cell.add("shards = distribute_tensor(torch.ones(8), dist.init_device_mesh('cpu', (4,)), [Shard(0)])")
        return "shards.full_tensor()"
    if kind == "functional":
        cell.add("from torch.distributed import _functional_collectives as functional")
    if kind in COLLECTIVES:
        return COLLECTIVES[kind]
    if kind == "ddp":
        cell.add("model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))")
        return "model(x).sum().backward()"
    assert kind in ("fsdp", "fsdp backward", "hsdp")
    cell.add("from torch.distributed.fsdp import fully_shard")
    cell.add("model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))")
    cell.add("device_mesh = dist.init_device_mesh('cpu', (4,))")
    if kind == "hsdp":
        cell.add("device_mesh = dist.init_device_mesh('cpu', (1, 4), mesh_dim_names=('replicate', 'shard'))")
    cell.add("for layer in model: fully_shard(layer, mesh=device_mesh)")
    cell.add("fully_shard(model, mesh=device_mesh)")
    if kind == "fsdp backward":
        cell.add("loss = model(x).sum()")
        return "loss.backward(); loss = model(x).sum()"
    return "model(x)"


def _names_of(kind: str, steps: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the call in texts, and what else must be there."""
    if (library := LIBRARIES.get(kind)) is not None:
        return library.operations, library.words
    if kind == "store":
        return ("wait",), ("vocabulary",)
    if kind == "ddp" and steps == 1:  # the second forward pass agrees on new buckets, by a broadcast
        return ("DistributedDataParallel", "all_reduce"), ()  # which a rank leaves that sends nothing to a missing one
    if kind == "ddp":
        return ("all_reduce",), ("weight",)
    if kind in ("fsdp", "fsdp backward", "hsdp"):
        return ("all_gather",), ("FSDP",)
    if kind == "file store":
        return ("wait",), ("vocabulary",)
    if kind == "ddp init":
        return ("DistributedDataParallel",), ()
    if kind == "dtensor":
        return ("all_gather", "full_tensor"), ()
    if kind in ("async", "functional"):
        return ("all_reduce",), ()
    if kind == "all_gather_into_tensor":
        return ("all_gather",), ()
    if kind == "init_device_mesh":
        return ("init_device_mesh", "new_group"), ()
    return (kind,), ()


def _message(dice: random.Random, kind: str) -> Hang:
    reason = dice.choice(REASONS)
    receiver, sender = dice.sample(range(N), 2)
    tag = dice.randrange(4)
    is_send = dice.random() < 0.5
    cell = _begin()
    cell.add("other = dist.new_group(list(range(4)))")
    _functions(cell)
    cell.add(f"if rank == {sender}:")
    cell.add(f"    {_WHAT[reason]}", "missing")
    cell.add(f"elif rank == {receiver}:")
    cell.add(f"    dist.{'send' if is_send else 'recv'}(x, {sender}, tag={tag})", "waits")
    truth: dict[int, Waits | At | Finished] = {rank: Finished() for rank in range(N)}
    operation = ("send",) if is_send else ("recv",)
    truth[receiver] = Waits(operation, cell.names["waits"])
    truth[sender] = _of_reason(reason, cell)
    words = (f"{'to' if is_send else 'from'} [{sender}]", *((f"with tag {tag}",) if tag else ()))
    stalls = [Stalled(operation, (receiver,), (sender,), words=words), *_elsewhere(reason, (sender,))]
    return Hang(0, operation[0], "default", reason, cell.code, truth, stalls)


def _from_any(dice: random.Random, kind: str) -> Hang:
    """Some ranks, or all, receive from any rank, and no rank sends."""
    reason = dice.choice(REASONS)
    receivers = tuple(sorted(dice.sample(range(N), dice.randrange(1, N + 1))))
    others = tuple(rank for rank in range(N) if rank not in receivers)
    tag = dice.choice((0, 3))
    cell = _begin()
    cell.add("other = dist.new_group(list(range(4)))")
    _functions(cell)
    cell.add(f"if rank in {list(receivers)}:")
    cell.add(f"    dist.{dice.choice(('recv(x', 'irecv(x'))}, tag={tag})", "waits")
    cell.lines[-1] += ".wait()" * ("irecv" in cell.lines[-1])
    cell.add("else:")
    cell.add(f"    {_WHAT[reason]}", "missing")
    truth: dict[int, Waits | At | Finished] = {rank: _of_reason(reason, cell) for rank in others}
    truth.update({rank: Waits(("recv",), cell.names["waits"]) for rank in receivers})
    words = (f"recv from any rank{' with tag 3' * (tag > 0)}", *(("no rank sends",) if not others else ()))
    stalls = [Stalled(("recv",), receivers, others, words=words)]
    return Hang(0, kind, "default", reason, cell.code, truth, stalls + (_elsewhere(reason, others) if others else []))


def _other_message(dice: random.Random, kind: str) -> Hang:
    reason = dice.choice(REASONS)
    receiver, sender = dice.sample(range(N), 2)
    cell = _begin()
    cell.add("other = dist.new_group(list(range(4)))")
    _functions(cell)
    cell.add(f"if rank == {sender}:")
    cell.add(f"    {_WHAT[reason]}", "missing")
    cell.add(f"elif rank == {receiver}:")
    call = f"dist.irecv(x, {sender}).wait()" if kind == "irecv" else f"dist.recv_object_list([None], {sender})"
    cell.add(f"    {call}", "waits")
    operations = ("recv", "recv_object_list")
    truth: dict[int, Waits | At | Finished] = {rank: Finished() for rank in range(N)}
    truth[receiver] = Waits(operations, cell.names["waits"])
    truth[sender] = _of_reason(reason, cell)
    stalls = [
        Stalled(operations, (receiver,), (sender,), words=(f"recv from [{sender}]",)),
        *_elsewhere(reason, (sender,)),
    ]
    return Hang(0, kind, "default", reason, cell.code, truth, stalls)


def _some(dice: random.Random, kind: str) -> Hang:
    """A group of some ranks, which only some of them make."""
    reason = dice.choice(REASONS)
    members = sorted(dice.sample(range(N), dice.choice((2, 3))))
    missing = sorted(dice.sample(members, dice.randrange(1, len(members))))
    cell = _begin()
    cell.add("other = dist.new_group(list(range(4)))")
    _functions(cell)
    cell.add(f"if rank in {missing}:")
    cell.add(f"    {_WHAT[reason]}", "missing")
    cell.add(f"elif rank in {members}:")
    cell.add(f"    made = dist.new_group({members})", "waits")
    waiting = tuple(rank for rank in members if rank not in missing)
    truth: dict[int, Waits | At | Finished] = {rank: Finished() for rank in range(N)}
    truth.update({rank: Waits(("new_group",), cell.names["waits"]) for rank in waiting})
    truth.update({rank: _of_reason(reason, cell) for rank in missing})
    words = (f" of {format_ranks(members)}", " (groups made: ")
    stalls = [Stalled(("new_group",), waiting, tuple(missing), words=words), *_elsewhere(reason, missing)]
    return Hang(0, kind, "user", reason, cell.code, truth, stalls)


def _tags(dice: random.Random, kind: str) -> Hang:
    receiver, sender = dice.sample(range(N), 2)
    cell = _begin()
    cell.add(f"if rank == {sender}: dist.send(x, {receiver}, tag=1)", "sends")
    cell.add(f"if rank == {receiver}: dist.recv(x, {sender}, tag=2)", "receives")
    truth: dict[int, Waits | At | Finished] = {rank: Finished() for rank in range(N)}
    truth[receiver] = Waits(("recv",), cell.names["receives"])
    truth[sender] = Waits(("send",), cell.names["sends"])
    words = (f"recv from [{sender}] with tag 2", f"send to [{receiver}] with tag 1")
    stalls = [Stalled(("recv", "send"), tuple(sorted((receiver, sender))), (), words=words)]
    return Hang(0, kind, "default", "another tag", cell.code, truth, stalls)


def _pipeline(dice: random.Random, kind: str) -> Hang:
    """A pipeline of four stages, of which one never runs, or not again after some steps."""
    reason = dice.choice([each for each in REASONS if each != "waits elsewhere"])
    missing = dice.randrange(N)
    schedule = "ScheduleGPipe" if kind == "pipeline" else dice.choice(("ScheduleGPipe", "Schedule1F1B"))
    cell = _begin()
    cell.add(f"from torch.distributed.pipelining import PipelineStage, {schedule}")
    cell.add("stage = PipelineStage(torch.nn.Linear(4, 4), rank, 4, torch.device('cpu'))")
    cell.add(f"schedule = {schedule}(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)")
    cell.add("batch = torch.ones(4, 4)")
    _functions(cell)
    step = "schedule.step(*(batch,) if rank == 0 else (), **dict(target=batch) if rank == 3 else {})"
    if kind == "pipeline step":
        cell.add(f"for _ in range({dice.randrange(1, 4)}): {step}")
    cell.add(f"if rank == {missing}:")
    cell.add(f"    {_WHAT[reason]}", "missing")
    cell.add("else:")
    cell.add(f"    {step}", "waits")
    operations = ("recv", "send", "recv_object_list", "send_object_list", "batch_isend_irecv")
    truth: dict[int, Waits | At | Finished] = {rank: Waits(operations, cell.names["waits"]) for rank in range(N)}
    truth[missing] = _of_reason(reason, cell)
    beside = missing + 1 if missing + 1 < N else missing - 1
    return Hang(0, kind, "default", reason, cell.code, truth, [Stalled(operations, (beside,), (missing,))])


def _ring(dice: random.Random, kind: str) -> Hang:
    reason = dice.choice(REASONS)
    absent = dice.randrange(N)
    before, after = (absent - 1) % N, (absent + 1) % N
    cell = _begin()
    cell.add("other = dist.new_group(list(range(4)))")
    _functions(cell)
    cell.add("ops = [")
    cell.add("    dist.P2POp(dist.isend, x, (rank + 1) % 4),")
    cell.add("    dist.P2POp(dist.irecv, torch.zeros(4), (rank - 1) % 4),")
    cell.add("]")
    cell.add(f"if rank == {absent}:")
    cell.add(f"    {_WHAT[reason]}", "missing")
    cell.add("else:")
    cell.add("    for work in dist.batch_isend_irecv(ops): work.wait()", "waits")
    truth: dict[int, Waits | At | Finished] = {rank: Finished() for rank in range(N)}
    truth[absent] = _of_reason(reason, cell)
    truth[before] = Waits(("send",), cell.names["waits"])
    truth[after] = Waits(("recv",), cell.names["waits"])
    stalls = [
        Stalled(("send",), (before,), (absent,), words=(f"to [{absent}]",)),
        Stalled(("recv",), (after,), (absent,), words=(f"from [{absent}]",)),
        *_elsewhere(reason, (absent,)),
    ]
    return Hang(0, kind, "default", reason, cell.code, truth, stalls)


def _actor(dice: random.Random, kind: str) -> Hang:
    """A call of an actor that waits in a collective; its class and the call are in a local cell."""
    reason = dice.choice(("sleeps in a loop", "loops", "finished", "swallowed an error"))
    missing = sorted(dice.sample(range(N), dice.randrange(1, N)))
    cell = _Cell(["import time, torch, torch.distributed as dist"])
    cell.add("from monarch_kernel.actor import Actor, current_rank, endpoint")
    _functions(cell)
    cell.add("def poll():")
    cell.add("    while True:")
    cell.add("        time.sleep(0.01)", "sleeps in a loop")
    cell.add("class Trainer(Actor):")
    cell.add("    @endpoint")
    cell.add("    def step(self, missing):")
    cell.add("        if dist.get_rank() in missing:")
    cell.add(f"            {'poll()' if reason == 'sleeps in a loop' else _WHAT[reason]}", "missing")
    cell.add("        else:")
    cell.add("            dist.all_reduce(torch.ones(4))", "waits")
    cell.add("trainer = t.spawn('trainer', Trainer)")
    cell.add(f"trainer.step.call({missing}).get(warn_after_s={WARN_AFTER_S:g})")
    waiting = tuple(rank for rank in range(N) if rank not in missing)
    truth: dict[int, Waits | At | Finished] = {rank: Waits(("all_reduce",), cell.names["waits"]) for rank in waiting}
    truth.update({rank: _of_reason(reason, cell) for rank in missing})
    stalls = [Stalled(("all_reduce",), waiting, tuple(missing))]
    return Hang(0, kind, "default", reason, cell.code, truth, stalls, is_local=True)


def _uneven(dice: random.Random, kind: str) -> Hang:
    """A loop with fewer steps on some ranks."""
    missing = sorted(dice.sample(range(N), dice.randrange(1, N)))
    fewer = dice.randrange(1, 5)
    more = fewer + dice.randrange(1, 3)
    steps = f"{fewer} if rank in {missing} else {more}"
    cell = _begin()
    cell.add(f"for step in {'live.loop' if kind == 'live.loop' else 'range'}({steps}):")
    cell.add("    dist.all_reduce(x)", "waits")
    waiting = tuple(rank for rank in range(N) if rank not in missing)
    truth: dict[int, Waits | At | Finished] = {rank: Waits(("all_reduce",), cell.names["waits"]) for rank in waiting}
    truth.update({rank: Finished() for rank in missing})
    words = (f"after {fewer} step{'s' * (fewer > 1)}", f"in step {fewer}") if kind == "live.loop" else ()
    stalls = [Stalled(("all_reduce",), waiting, tuple(missing), words=words)]
    return Hang(0, kind, "default", "fewer steps", cell.code, truth, stalls)
