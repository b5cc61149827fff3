"""Observation of processes: what they do, write, send and fail at."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from monarch_kernel.actor.proc_handle import ProcHandle
from monarch_kernel.base.events import MeshView, StopEvent, WaitView
from monarch_kernel.base.mesh import ValueMesh
from monarch_kernel.errors import Failure, RemoteError, format_ranks
from monarch_kernel.features.debugging import dap_controller  # noqa: F401 - so that sessions have it
from monarch_kernel.features.debugging.controller import DebugPrompts
from monarch_kernel.features.live.controller import LoopControl
from monarch_kernel.features.live.handle import LiveLoop
from monarch_kernel.features.live.tensorboard import TensorBoardJournal
from monarch_kernel.features.profiling.handle import Profile, check_numbers, profile
from monarch_kernel.features.profiling.late_ranks import LateRanks
from monarch_kernel.features.profiling.lateness import Lateness
from monarch_kernel.features.traffic.controller import TrafficControl
from monarch_kernel.features.traffic.table import Traffic
from monarch_kernel.features.watch.messages import GetProgress
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import (
    Complete,
    GetStacks,
    Inspect,
    ListErrors,
    PostMortem,
)
from monarch_kernel.runtime.diagnostics.dumped_stacks import doing_of
from monarch_kernel.runtime.diagnostics.stacks import Doing
from monarch_kernel.runtime.host.logs import LogRecord
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.gather import gather, read_value

__all__ = ["ProcObserver"]


class ProcObserver(ProcHandle):
    """The methods of `ProcMesh` that show the state of its processes."""

    def doing(self, *, brief: bool = False) -> Future[dict[int, Doing | Failure]]:
        """Return what every rank does now, by flat rank. A rank that is not up has a `Failure`.

        This takes milliseconds, whatever the ranks run. A rank whose native code holds the GIL answers when that ends;
        ``cancel()`` ends the future earlier, with a `Failure` for each such rank.

        Args:
            brief: whether ranks may leave out collectives of groups that have started more since the last look, which takes
                them less time.
        """

        def finish(answers: Sequence[Answer]) -> dict[int, Doing | Failure]:
            read = [answer if isinstance(answer, Failure) else read_value(answer) for answer in answers]
            return dict(zip(self.ranks, read, strict=True))

        return self.runtime.ask(self.procs, lambda id: pack(GetStacks(id, brief)), finish)

    def silent_stacks(self, ranks: Sequence[int], timeout_s: float) -> dict[int, Doing]:
        """Return what ranks do that do not answer, because native code holds the GIL or they are stopped, as their agents say.

        Args:
            ranks: flat ranks.
            timeout_s: how long to wait for the agents, in seconds.
        """
        pool, procs, until = self.runtime.host_pool, dict(zip(self.ranks, self.procs)), time.monotonic() + timeout_s
        asked = {rank: pool.read_stacks(pool.host_of(procs[rank]), procs[rank]) for rank in ranks if rank in procs}
        found = {}
        for rank, stacks in asked.items():
            if stacks.wait(max(0.0, until - time.monotonic())) and (doing := doing_of(stacks.get(0), rank)) is not None:
                found[rank] = doing
        return found

    def process_states(self, ranks: Sequence[int]) -> dict[int, Future[str]]:
        """Ask the agents of some ranks whether the processes are stopped, for `doing_of`; an empty text says that they run."""
        pool, procs = self.runtime.host_pool, dict(zip(self.ranks, self.procs))
        return {
            rank: pool.read_stacks(pool.host_of(procs[rank]), procs[rank], only_state=True)
            for rank in ranks
            if rank in procs
        }

    def places(self, procs: Sequence[int]) -> list[tuple[str, int]]:
        """Return the mesh and the flat rank of processes of any mesh; an empty name for the program itself."""
        return self.runtime.queries.places(procs)

    def progress(self) -> Future[dict[int, int | Failure]]:
        """Return how many collectives every rank has started, by flat rank. It takes a rank microseconds; see `doing`."""

        def finish(answers: Sequence[Answer]) -> dict[int, int | Failure]:
            read = [answer if isinstance(answer, Failure) else read_value(answer) for answer in answers]
            return dict(zip(self.ranks, read, strict=True))

        return self.runtime.ask(self.procs, lambda id: pack(GetProgress(id)), finish)

    def post_mortem(self, request: int) -> Future[ValueMesh[None]]:
        """Open the debugger where a request failed. The future resolves when the user leaves it. Listeners get its prompts."""
        finish = gather(self._region, f"debugging {self.name}", RemoteError, read_value, self.spawned_extent)
        return self.runtime.request(
            self.procs, lambda id: pack(PostMortem(id, request)), "a post-mortem", finish, quiet=True
        )

    def stops(self) -> list[StopEvent]:
        """List the code that is stopped in the debugger on these ranks, in the order of the ranks."""
        return DebugPrompts(self.runtime).stops(self.procs)

    def incarnations(self) -> tuple[int, ...]:
        """Return for each rank the number of processes that it had before the current one, or before the last one."""
        return self.runtime.queries.incarnations(self.procs)

    @property
    def loops(self) -> list[LiveLoop]:
        """The running loops (`live.loop`) of the ranks, and the last finished ones, in the order in which they started."""
        return [LiveLoop(self.runtime, key) for key in LoopControl(self.runtime).keys(self.procs)]

    @property
    def loop(self) -> LiveLoop:
        """The loop that the ranks have started last.

        Raises:
            LookupError: no rank has started a loop.
        """
        if not (loops := self.loops):
            raise LookupError(f"no rank of {self.name} has started a loop: `for step in live.loop(...)`")
        return loops[-1]

    def tensorboard(self, folder: str | os.PathLike[str] | None) -> Path | None:
        """Write the logs of loops for TensorBoard from now on, each loop to a separate folder: ``loop_0`` ...

        Values of ``live.log`` are written for each step, as means over ranks; knobs and speed once a second. A loop that
        resumes automatically after a death goes on in its folder.

        Args:
            folder: the folder on this machine that holds the folders of the loops; created if it does not exist. None stops the
                writing.

        Returns:
            The absolute path of the folder.

        Raises:
            ModuleNotFoundError: the package ``tensorboard`` is not installed here.
            OSError: the folder can't be written to.
            ValueError: this is a slice of a mesh.
        """
        if not self.is_whole:
            raise ValueError(
                f"TensorBoard needs the loops of a whole mesh: call {self.name}.tensorboard() without an index"
            )
        journal = None if folder is None else TensorBoardJournal(folder, self.name)
        LoopControl(self.runtime).write(self.name, journal)
        return None if journal is None else journal.folder

    def throughput(self) -> list[tuple[float, float]]:
        """Return (received, sent) bytes per second of all ranks together, for each of the last seconds, oldest first."""
        return TrafficControl(self.runtime).throughput(self.procs)

    def last_failures(self) -> dict[int, Failure]:
        """Return flat rank -> its last failure, or how it died, for ranks where nothing has succeeded since."""
        found = zip(self.ranks, self.runtime.queries.failures(self.procs))
        return {rank: failure for rank, failure in found if failure is not None}

    def names(self) -> dict[int, dict[str, str]]:
        """Return flat rank -> name that cells have defined there -> its kind. This sends no request to the ranks."""
        return dict(zip(self.ranks, self.runtime.queries.names(self.procs)))

    def look(self, rank: int, make: Callable[[int], Complete | Inspect | ListErrors]) -> Future[Any]:
        """Ask one rank about its namespace, or about the errors it keeps. It answers at once, whatever it runs.

        Args:
            rank: the flat rank in the mesh as it was spawned.
            make: makes the message for a request id.
        """

        def read(answers: Sequence[Answer]) -> Any:
            return None if isinstance(answers[0], Failure) else read_value(answers[0])

        return self.runtime.ask((self._base[rank],), lambda id: pack(make(id)), read)

    def logs(self) -> dict[int, list[LogRecord]]:
        """Return flat rank -> the end of its log: some megabytes for ranks on this machine, one for ranks on other hosts.

        Dead ranks are included until they are stopped, or their host is lost.
        """
        if self._session is None:
            raise RuntimeError(f"only the process that made mesh {self.name!r} can read its logs: read them there")
        return dict(zip(self.ranks, self._session.logs(self.procs)))

    def traffic(self, *, timeout_s: float = 5.0) -> Traffic:
        """Return a table of all data that these ranks have sent and received since they started.

        It includes every transfer that ended before the call. The traffic between two calls is ``later - earlier``.

        Args:
            timeout_s: how long to wait for the ranks, in seconds. They answer within milliseconds, unless native code holds the
                GIL. For ranks that do not answer, the table has their last report, from a quarter of a second ago or earlier.
        """
        name = self.name if self.is_whole else f"{self.name}{format_ranks(self.ranks)}"
        return TrafficControl(self.runtime).table(self.procs, name, timeout_s)

    def profile(
        self, steps: int = 5, *, seconds: float = 10.0, memory: bool = False, to: str | os.PathLike[str] | None = None
    ) -> Profile:
        """Record what these ranks do now, and return where the time of a step goes, and which rank the others wait for.

        A step is one of a live loop, else one of an optimizer of torch. Code without steps is recorded for the whole time.

        Args:
            steps: the number of steps; the first ones that all ranks do from now on.
            seconds: the most that this may take.
            memory: whether to record allocations, too: in the trace, and for GPUs in a snapshot.
            to: the file to which the trace of all ranks is written, such as ``trace.json`` or ``trace.json.gz``.

        Raises:
            OSError: the file can't be written.
            RuntimeError: the ranks run nothing, or no rank has recorded anything.
            ValueError: a number is out of its range.
        """
        folder = None if to is None else Path(to).expanduser().parent
        if folder is not None and not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder}")
        check_numbers(steps, seconds)
        name = self.name if self.is_whole else f"{self.name}{format_ranks(self.ranks)}"
        view = self.runtime.run_on_io_thread(self.view)  # what was just started is running there
        if not any(rank.state == "running" for rank in view.ranks if rank.rank in self.ranks):
            raise RuntimeError(
                f"{name} runs nothing: start a cell with %%remote --background, or a call, and profile it while it runs"
            )
        procs = dict(zip(self.ranks, self.procs))
        found = profile(self.runtime, name, procs, steps=steps, seconds=seconds, memory=memory)
        if to is not None:
            found.save(to)
        return found

    def lateness(self, last_s: float = math.inf) -> dict[int, Lateness]:
        """Return flat rank -> how late it has arrived at the collectives of the last seconds; empty if that is not known.

        Args:
            last_s: how many seconds; without it, all that are known: about five.
        """
        since_s = time.time() - last_s
        found = self.runtime.extension(LateRanks).late_since(since_s, tuple(self._base), time.monotonic())
        return {rank: late for rank, late in found.items() if rank in self.ranks}

    def show_waits(self, source: object, waits: Sequence[WaitView]) -> None:
        """Show waits that last in the views of the mesh, in place of earlier ones from the same source."""
        self.runtime.wait_lines.show(self._base, source, waits)

    def view(self) -> MeshView:
        """Return the current state of the mesh, for display."""
        return self.runtime.view(self._base, self.name, dict(self.spawned_extent))
