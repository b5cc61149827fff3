"""The local launcher: an agent that comes up, and the failures of agents and ranks to start."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.errors import Failure, LaunchError
from monarch_kernel.launch.local import LocalHost, LocalLauncher
from monarch_kernel.net.hosts.zmq import ZmqRouter
from monarch_kernel.net.wire.codec import load, pack
from monarch_kernel.net.wire.config import AgentConfig
from monarch_kernel.net.wire.messages import Ping, RankSpec, Run
from monarch_kernel.runtime.controller import host_tree, processes
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.testing import rank_spec
from tests.support.processes import is_gone
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_until


class Controller:
    """A runtime with agents that run a command of the test's choice.

    Attributes:
        is_light: whether ranks start without torch, which takes seconds to import.
    """

    def __init__(self, directory: Path) -> None:
        self.is_light = False
        self.directory = directory
        self.address = f"ipc://{directory}/controller"
        self.runtime = Runtime(ZmqRouter(self.address), "the secret token")
        self.host = 0

    def start(self, command: Sequence[str] | None = None, nranks: int = 2) -> Any:
        """Launch an agent, start ranks on it, and ping them."""
        self.host = self.launch(LocalLauncher(self.directory, *([] if command is None else [command])))
        specs = [spec_here(rank + 1, rank, nranks) for rank in range(nranks)]
        self.runtime.start_ranks(self.host, specs)
        procs = [spec.proc for spec in specs]
        return self.runtime.request(procs, lambda id: pack(Ping(id)), "ping", list)

    def launch(self, launcher: LocalLauncher) -> int:
        """Launch the agent of this machine."""
        return self.runtime.host_pool.add(launcher, self.config)[0]

    def config(self, host: int, token: str = "the secret token") -> AgentConfig:
        """Return the config of an agent on this machine."""
        log = str(self.directory / f"agent-{host}.log")
        directory = str(self.directory)
        return AgentConfig(
            host,
            token,
            (self.address,),
            directory=directory,
            controller_pid=os.getpid(),
            log=log,
            is_light=self.is_light,
        )

    @property
    def handle(self) -> LocalHost:
        handle = self.runtime.host_pool._handles[self.host]
        assert isinstance(handle, LocalHost)
        return handle

    @property
    def pid(self) -> int:
        return self.handle._process.pid


def spec_here(proc: int, rank: int, world_size: int) -> RankSpec:
    spec = rank_spec(proc, rank=rank, world_size=world_size)
    values = {name: getattr(spec, name) for name in spec.__struct_fields__}
    return RankSpec(**{**values, "cwd": os.getcwd(), "sys_path": tuple(sys.path)})


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    controller = Controller(tmp_path)
    yield controller
    controller.runtime.close()


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def shell(code: str) -> list[str]:
    """Return a shell command, which starts at once."""
    return ["/bin/sh", "-c", code]


def failures(future: Any) -> list[Failure]:
    answers = future.get(LONG_S)
    assert all(isinstance(answer, Failure) for answer in answers), answers
    return list(answers)


# -- agents that come up


def test_an_agent_comes_up_and_ends(controller: Controller, bar: Bar) -> None:
    assert len(controller.start().get(LONG_S)) == 2
    handle = controller.handle
    assert handle.poll() is None
    assert handle.log_tail() == ()
    with bar.below(3.0, "the end of the runtime"):
        controller.runtime.close()
    assert handle.poll() is not None
    handle.close(0)  # a second call has no effect


def test_other_users_cannot_see_the_token(controller: Controller) -> None:
    controller.is_light = True
    controller.start().get(LONG_S)
    pids = [
        controller.pid,
        *map(int, Path(f"/proc/{controller.pid}/task/{controller.pid}/children").read_text().split()),
    ]
    assert len(pids) == 4
    for pid in pids:
        for name in ("cmdline", "environ"):
            assert b"the secret token" not in Path(f"/proc/{pid}/{name}").read_bytes()


def test_the_agent_has_its_own_session(controller: Controller) -> None:
    controller.is_light = True
    controller.start().get(LONG_S)
    assert os.getsid(controller.pid) == controller.pid != os.getsid(0)


# -- agents that fail to start


@pytest.mark.parametrize("command", [["/bin/false"], python("import sys; sys.stdin.close(); sys.exit(1)")])
def test_an_agent_that_ends_at_once_is_reported_with_its_exit_code(controller: Controller, command: list[str]) -> None:
    for failure in failures(controller.start(command)):
        assert (failure.kind, failure.etype) == ("lost", "RankNotStarted")
        assert failure.message == f"the host agent (pid {controller.pid}) ended with exit code 1"


def test_launch_does_not_raise_if_the_agent_does_not_read_its_config(controller: Controller) -> None:
    launcher = LocalLauncher(controller.directory, ["/bin/false"])
    (handle,) = launcher.launch([controller.config(7, "x" * (1 << 20))])  # more than the pipe holds
    wait_until(lambda: handle.poll() is not None, "the end")
    assert "exit code 1" in (handle.poll() or "")


def test_an_agent_that_fails_is_reported_with_the_last_lines_of_its_log(controller: Controller, bar: Bar) -> None:
    code = "import sys\nfor i in range(100): print('line', i)\nsys.stdout.flush()\nimport no_such_module"
    with bar.below(5.0, "the news of the failure"):
        (failure, _) = failures(controller.start(python(code)))
    assert "ended with exit code 1" in failure.message
    assert failure.last_lines[-1] == "ModuleNotFoundError: No module named 'no_such_module'"
    assert "line 99" in failure.last_lines
    assert "line 9" not in failure.last_lines
    assert len(failure.last_lines) == 20


def test_an_agent_that_is_killed_while_it_starts_is_reported_with_the_signal(controller: Controller) -> None:
    future = controller.start(python("import time; time.sleep(1000)"))
    os.kill(controller.pid, signal.SIGKILL)
    assert "was killed by SIGKILL" in failures(future)[0].message


def test_a_missing_program_raises_at_once(controller: Controller) -> None:
    with pytest.raises(LaunchError, match="/no/such/python can't be run: No such file"):
        controller.start(["/no/such/python"])


def test_an_agent_that_hangs_fails_at_its_deadline(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, bar: Bar
) -> None:
    monkeypatch.setattr(host_tree, "HOST_DEADLINE_S", 1.0)
    future = controller.start(shell("echo looking for a licence; exec sleep 1000"))
    wait_until(lambda: bool(controller.handle.log_tail()), "the log")
    (failure, _) = failures(future)
    assert "the host agent did not come up in time" in failure.message
    assert failure.last_lines == ("looking for a licence",)
    pid = controller.pid
    with bar.below(2.0, "the end of the runtime"):
        controller.runtime.close()
    assert is_gone(pid)


def test_an_agent_that_ignores_sigterm_is_killed(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tree, "HOST_DEADLINE_S", 1.0)
    monkeypatch.setattr("monarch_kernel.launch.local._TERMINATE_S", 0.2)
    future = controller.start(shell("trap '' TERM; echo deaf; exec sleep 1000"))
    wait_until(lambda: controller.handle.log_tail() == ("deaf",), "the agent to ignore SIGTERM")
    failures(future)
    pid = controller.pid
    controller.runtime.close()
    assert is_gone(pid)


def test_an_agent_with_another_token_is_refused(controller: Controller) -> None:
    impostor = """
        import json, sys
        from monarch_kernel import bootstrap
        from monarch_kernel.net.wire.config import AgentConfig
        config = json.loads(sys.stdin.buffer.read())
        config["token"] = "another"
        AgentConfig.decode = classmethod(lambda cls, data: cls(**config))
        sys.argv = ["", "agent"]
        bootstrap.main()
    """
    future = controller.start(python(impostor))
    wait_until(lambda: controller.runtime.refused > 0, "the refusal")
    assert not future.wait(0)  # its ranks do not answer
    os.kill(controller.pid, signal.SIGTERM)
    assert {(failure.kind, failure.etype) for failure in failures(future)} == {("lost", "RankNotStarted")}


# -- ranks that fail to start

OWN_PRELOAD = """
    import sys
    from monarch_kernel import bootstrap
    bootstrap._PRELOAD = ({!r},)
    sys.argv = ["", "agent"]
    bootstrap.main()
"""


def test_a_failing_import_of_torch_is_reported_with_its_error(controller: Controller) -> None:
    for failure in failures(controller.start(python(OWN_PRELOAD.format("no_such_torch")))):
        assert failure.etype == "RankNotStarted"
        assert "the process that ranks are forked from (it imports torch) ended" in failure.message
        assert failure.last_lines[-1] == "ModuleNotFoundError: No module named 'no_such_torch'"


def test_a_hanging_import_of_torch_fails_at_the_deadline(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bar: Bar
) -> None:
    (tmp_path / "slow_torch.py").write_text("import time; time.sleep(1000)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(processes, "RANK_DEADLINE_S", 1.0)
    with bar.below(10.0, "the news of the failure"):
        (failure, _) = failures(controller.start(python(OWN_PRELOAD.format("slow_torch"))))
    assert failure.message == "the host agent is up, but this rank was not forked from the zygote within 1 s"


def test_a_rank_that_fails_while_it_starts_is_reported_with_its_output(controller: Controller) -> None:
    controller.is_light = True
    host = controller.launch(LocalLauncher(controller.directory))
    spec = spec_here(1, 0, 1)
    values = {name: getattr(spec, name) for name in spec.__struct_fields__}
    controller.runtime.start_ranks(host, [RankSpec(**{**values, "cwd": "/no/such/directory"})])
    future = controller.runtime.request([1], lambda id: pack(Ping(id)), "ping", list)
    (failure,) = failures(future)
    assert failure.etype == "RankNotStarted"
    assert "exit code 1" in failure.message
    assert "/no/such/directory" in failure.last_lines[-1]


def test_a_second_agent_can_be_launched_after_the_first_has_failed(controller: Controller) -> None:
    controller.is_light = True
    failures(controller.start(["/bin/false"]))
    host = controller.launch(LocalLauncher(controller.directory))
    controller.runtime.start_ranks(host, [spec_here(11, 0, 1)])
    assert len(controller.runtime.request([11], lambda id: pack(Ping(id)), "ping", list).get(LONG_S)) == 1


def test_ranks_have_different_random_numbers_after_a_preloaded_numpy(controller: Controller) -> None:
    wrapper = """
        import sys
        from monarch_kernel import bootstrap
        bootstrap._PRELOAD += ("numpy.random",)
        sys.argv = ["", "agent"]
        bootstrap.main()
    """
    controller.start(python(wrapper)).get(LONG_S)
    code = "import numpy, random, sys; (numpy.random.rand(), random.random())"
    answers: Any = controller.runtime.request([1, 2], lambda id: pack(Run(id, code, 0, True)), "code", list).get(LONG_S)
    first, second = (load(answer.payload, answer.frames) for answer in answers)
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_modules_in_the_working_directory_do_not_shadow_libraries(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch", "selectors", "faulthandler"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name}.py of the working directory was imported')")
    monkeypatch.chdir(tmp_path)
    assert len(controller.start().get(LONG_S)) == 2
