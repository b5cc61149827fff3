"""Sessions of meshes that outlive the process that brought them up, and how another process attaches to them.

Theory of operation
===================

Each such mesh has its own session in a directory with a stable path (`registry`). The directory has the socket to which ranks
and agent connect again when another controller binds it.

Agents on hosts of an engine keep trying to connect to the TCP port in the manifest, with the keys in the manifest. The next
controller listens at that port; only then is it known whether they are still alive. The manifest also records how the engine's
launcher was created, so that the next controller can replace a lost host (`previous_launcher`).

How a mesh is kept: when its ranks are up, the session writes the manifest and sends `Detach` to the agents. Until they
confirm it (`Detached`) the mesh ends like any other. When the controller ends, by `Goodbye` or not, the agent goes on
reading the pipes into a bounded `OutputBacklog`, and ranks do not notice.

How it is taken up: a new controller binds the same address, and the sockets of agent and ranks connect to it by themselves.
Messages to the former controller are lost, so the new one asks each process (`Attach`, repeated until it answers) and
admits nothing before its hello. The agent answers with `HostHello`, `Backlog`, and a `Lost` for every rank that ever died;
a rank with `Hello`, its pending requests (`runtime.worker.replay_log`) and the answers to cells that it keeps until
`Forget`. Answers wait until all ranks have said what they owe (`runtime.controller.adoption`), because only then it is
known which answers complete a cell. From then on the cell is a request like any other.

Each controller has an *epoch* in the upper bits of the ids that it makes. In a new epoch the relays elsewhere start all numbers
again. A host that is no longer in the manifest is stopped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from importlib.metadata import version

from monarch_kernel.errors import AttachError, LaunchError
from monarch_kernel.launch.local import AdoptedHost
from monarch_kernel.net.wire.config import Elsewhere, Manifest, Recipe
from monarch_kernel.net.wire.messages import RankSpec
from monarch_kernel.runtime.controller.session import Origin, Session
from monarch_kernel.runtime.detached.previous_launcher import PreviousLauncher
from monarch_kernel.runtime.detached.registry import Home, span
from monarch_kernel.runtime.host.processes import open_process, start_ticks

__all__ = ["DetachedSession", "end"]

ATTACH_S = 8.0
GRACE_S = 2.0
_CONFIRM_S = 10.0
"""How long agents have to confirm that they keep a mesh."""

_HOST_S = 600.0
_ALIVE_EVERY_S = 1.0


class DetachedSession(Session):
    """The session of one mesh that outlives this process.

    Args:
        home: its directory, which this process has locked.
        manifest: the manifest of an existing mesh; None for a new mesh.
    """

    def __init__(self, home: Home, manifest: Manifest | None = None) -> None:
        self.home = home
        self._adopted: AdoptedHost | None = None
        self._left_at: float | None = None  # when the previous controller left; None once the mesh is attached
        epoch = 0 if manifest is None else manifest.epoch + 1
        self._manifest = None if manifest is None else manifest.at_epoch(epoch)
        keys = manifest.elsewhere.keys if manifest is not None and manifest.elsewhere is not None else None
        super().__init__(home.path, "" if manifest is None else manifest.token, epoch, keys)
        os.chmod(home.path / "controller", 0o600)
        self._alive_at = 0.0
        self.runtime.on_tick = self._record_alive

    def _record_alive(self, now: float) -> None:
        """Record once a second that this process is alive, in case it is killed: agents on other hosts can't record that."""
        if now >= self._alive_at + _ALIVE_EVERY_S and self._origins and self._left_at is None:
            self._alive_at = now
            self.home.mark_alive()

    def _look_after(self) -> None:
        """Do nothing: if this process is killed, the next controller needs the files that it leaves."""

    def record_of(self, proc: int, *, is_here: bool) -> str:
        """Return the file in which a rank records what it runs; for a rank on another host only its name there."""
        return str(self.directory / f"rank-{proc}") if is_here else f"rank-{proc}"

    def keep(
        self,
        name: str,
        specs: tuple[RankSpec, ...],
        gpus: bool,
        device: str,
        env: dict[str, str],
        *,
        keep_s: float = 0.0,
        recipe: Recipe | None = None,
    ) -> None:
        """Detach the mesh, which must be up, from the lifetime of this process; on return the mesh outlives it.

        Args:
            name: name of the mesh.
            specs: specifications of its ranks.
            gpus: as requested by the user.
            device: as requested by the user.
            env: as requested by the user.
            keep_s: how long the mesh is kept without a controller, in seconds; 0 for no limit.
            recipe: how the launcher of its hosts was created; None if later controllers can't recreate it.

        Raises:
            LaunchError: a host is lost, or does not answer.
        """
        place: Elsewhere | None = None
        host = pid = started = 0
        if self._origins:
            places = self.runtime.host_pool.places([spec.proc for spec in specs])
            origin = self._origins[places[0]]
            known = max(self._origins) + 1
            engine, nodes = origin.launcher.name, self._nodes(places)
            place = Elsewhere(
                engine,
                self._keys,
                self._ports[origin.config.listens_at],
                origin.lost_after_s,
                places,
                known,
                nodes,
                recipe,
                origin.config.listens_at,
            )
        else:
            host = self.local_host()
            pid = self.runtime.host_pool.agent_pid(host)
            started = start_ticks(pid)
        here = version("monarch_kernel")
        self._keep(
            Manifest(here, name, self.token, 0, host, pid, started, specs, gpus, device, env, keep_s, place),
            _CONFIRM_S,
        )

    def _keep(self, manifest: Manifest, wait_s: float) -> None:
        """Write the manifest, and make the hosts outlive this process."""
        self._manifest = manifest
        self.home.write(manifest)
        hosts = (manifest.host,) if manifest.elsewhere is None else dict.fromkeys(manifest.elsewhere.places)
        deadline = time.monotonic() + wait_s
        confirmations = [self.runtime.host_pool.outlive(host, manifest.keep_s) for host in hosts]
        for confirmation in confirmations if wait_s else ():
            if not confirmation.wait(max(0.0, deadline - time.monotonic())) or not confirmation.get():
                raise LaunchError(
                    f"mesh {manifest.name!r} can't be kept: one of its host agents is lost, or did not answer within "
                    f"{wait_s:g} s"
                )

    def _nodes(self, hosts: Collection[int]) -> dict[int, str]:
        """Return the engine's names of the machines of hosts, as far as its launcher needs them."""
        before = self._manifest.elsewhere.nodes if self._manifest and self._manifest.elsewhere else {}
        found = {host: self.runtime.host_pool.node(host) or before.get(host, "") for host in hosts}
        return {host: node for host, node in found.items() if node}

    def replace_hosts(self, gone: Collection[int]) -> dict[int, int]:
        """Replace hosts that are gone by new ones, which outlive this process, too.

        Raises:
            LaunchError: the engine has no host, or an earlier controller requested the hosts in a way that can't be repeated.
        """
        found = super().replace_hosts(gone)
        if self._manifest is not None and (elsewhere := self._manifest.elsewhere) is not None:
            places = tuple(found.get(host, host) for host in elsewhere.places)
            nodes = {**elsewhere.nodes, **self._nodes(self._origins)}
            self._keep(self._manifest.placed(places, max(self._origins) + 1, nodes), 0.0)
        return found

    def _used(self) -> tuple[list[str], list[str]]:
        """Return the machines of running hosts, and those of hosts that are gone."""
        nodes = self._nodes(self._origins)
        runs = {node for host, node in nodes.items() if not self.runtime.host_pool.is_gone(host)}
        return sorted(runs), sorted(set(nodes.values()) - runs)

    @classmethod
    def attach(cls, home: Home) -> tuple[DetachedSession, Manifest]:
        """Attach to the mesh in a directory.

        Raises:
            AttachError: this is not possible; nothing has changed.
        """
        home.lock()
        session: DetachedSession | None = None
        try:
            manifest = home.manifest()
            here = version("monarch_kernel")
            if manifest.version != here:
                raise AttachError(
                    f"mesh {home.name!r} was brought up by monarch_kernel {manifest.version}, this is {here}; attach it "
                    f"from there, or end it with %mesh down {home.name}"
                )
            if manifest.elsewhere is not None:
                session = cls(home, manifest)
                session._attach_elsewhere(manifest, manifest.elsewhere)
                return session, manifest
            pidfd = open_process(manifest.agent_pid, manifest.agent_started)
            if pidfd < 0:
                raise AttachError(f"mesh {home.name!r} is gone: its host agent (pid {manifest.agent_pid}) has ended")
            session = cls(home, manifest)
            home.write(manifest.at_epoch(manifest.epoch + 1))
            handle = AdoptedHost(manifest.agent_pid, pidfd, home.path / f"agent-{manifest.host}.log")
            session._adopted = handle
            session._local_host = manifest.host
            if not session.runtime.attachment.attach(
                {manifest.host: manifest.specs}, {manifest.host: handle}, ATTACH_S
            ):
                raise AttachError(
                    f"the host agent of mesh {home.name!r} (pid {manifest.agent_pid}) does not answer; attach it again when "
                    f"the machine is less busy, or end it with %mesh down {home.name}"
                )
        except BaseException:
            if session is not None:
                session.leave()
            home.unlock()
            raise
        return session, manifest

    def _attach_elsewhere(self, manifest: Manifest, elsewhere: Elsewhere) -> None:
        """Listen at the port at which the hosts look for a controller, and attach those that connect."""
        name, port = manifest.name, elsewhere.port
        over, self._left_at = self.home.time_over(), self.home.since() or time.time()
        try:
            self._listen(elsewhere.listens_at, port)
        except OSError as error:
            raise AttachError(
                f"mesh {name!r} can't be attached: its hosts look for a controller at port {port} of this machine, and "
                f"another program listens there ({error.strerror})"
            ) from None
        assert self._manifest is not None
        self.home.write(self._manifest)
        hosts: dict[int, list[RankSpec]] = {}
        for place, spec in zip(elsewhere.places, manifest.specs, strict=True):
            hosts.setdefault(place, []).append(spec)
        launcher = PreviousLauncher(elsewhere.engine, elsewhere.recipe, self._used)
        self._launchers.append(launcher)
        config = self._config_elsewhere(elsewhere.lost_after_s, at=elsewhere.listens_at)
        self._origins.update(dict.fromkeys(hosts, Origin(launcher, config, _HOST_S, elsewhere.lost_after_s)))
        self.home.mark_attached()
        asked = time.monotonic()
        if not self.runtime.attachment.attach(
            hosts, {}, ATTACH_S, lost_after_s=elsewhere.lost_after_s, known=elsewhere.known
        ):
            if over:
                raise AttachError(f"mesh {name!r} is gone: {over}")
            may_be = f", or their time is over ({span(manifest.keep_s)} without a kernel)" if manifest.keep_s else ""
            raise AttachError(
                f"none of the {len(hosts)} hosts of mesh {name!r} has connected to port {port} of this machine within "
                f"{time.monotonic() - asked:.1f} s; if they still run, check whether they can reach it{may_be}; "
                f"%mesh down {name} forgets the mesh"
            )
        self._left_at = None

    def leave(self) -> None:
        """Detach this process; the mesh continues to run."""
        if os.getpid() == self.pid:
            if self._origins:
                self.home.mark_detached(self._left_at or time.time())
            self.runtime.leave()
            if self._adopted is not None:
                self._adopted.release()
            self.home.unlock()

    def close(self) -> None:
        """End the mesh; this takes until its processes have ended."""
        if os.getpid() == self.pid:
            self.runtime.close(GRACE_S + 3.0, GRACE_S)
            for launcher in self._launchers:
                launcher.close(GRACE_S + 3.0)
            self.home.remove()


def end(home: Home) -> int:
    """End a mesh without a kernel; return the number of its ranks, 0 if no host has connected.

    Raises:
        AttachError: the mesh can't be ended.
    """
    try:
        session, manifest = DetachedSession.attach(home)
        session.close()
    except AttachError:  # it does not answer, or has another version
        home.lock()
        manifest = home.manifest()
        if manifest.elsewhere is not None:  # if its hosts try to connect later, no controller accepts them
            home.remove()
            return 0
        pidfd = open_process(manifest.agent_pid, manifest.agent_started)
        AdoptedHost(manifest.agent_pid, pidfd, home.path / f"agent-{manifest.host}.log").close(0.0)
        home.remove()
    return len(manifest.specs)
