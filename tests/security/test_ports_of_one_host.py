"""A mesh of one host on this machine, the default, listens at no port."""

from __future__ import annotations

import psutil

from monarch_kernel.actor import this_host
from tests.support.waiting import LONG_S


def test_a_mesh_of_one_host_listens_at_no_port(session: None) -> None:
    me = psutil.Process()
    before = _listeners(me)
    mesh = this_host().spawn_procs({"r": 2}, name="alone", device="cpu")
    try:
        pids = mesh.run("__import__('os').getpid()").get(LONG_S).values()
        agent = psutil.Process(pids[0]).parent()
        assert agent is not None
        processes = [agent, *agent.children(recursive=True)]
        assert {each.pid for each in processes} >= set(pids)
        assert not _listeners(agent)
        assert not any(_listeners(psutil.Process(pid)) for pid in pids)
        assert _listeners(me) == before
    finally:
        mesh.stop(grace_s=0).get(LONG_S)


def _listeners(process: psutil.Process) -> set[int]:
    connections = process.net_connections("tcp")
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
