"""The SSH launcher, against real servers; a puppet, which starts at once, replaces the agent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.base import agent_command
from tests.launch import puppet
from tests.launch.puppet import Desk, make_python
from tests.launch.sshds import Sshd, SshFolder, why_no_sshd
from tests.support.processes import is_gone
from tests.support.timing import Bar
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_no_sshd()), reason=why_no_sshd())]

ssh = pytest.importorskip("monarch_kernel.launch.ssh")

DIRECT, THROUGH = "the controller", "a tunnel"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshFolder]:
    folder = SshFolder(tmp_path_factory.mktemp("ssh"))
    for name in ("a", "b", "c"):
        folder.add(name)
    yield folder
    folder.close()


@pytest.fixture
def server(folder: SshFolder) -> Iterator[Callable[..., Sshd]]:
    """Servers for one test."""
    before, known = list(folder.servers), folder.known_hosts.read_text()
    yield folder.add
    for server in folder.servers[len(before) :]:
        server.kill()
    folder.servers[:] = before
    folder.known_hosts.write_text(known)
    folder.write_config()


@pytest.fixture
def python(tmp_path: Path) -> str:
    return make_python(tmp_path)


@pytest.fixture
def desk() -> Iterator[Desk]:
    with puppet.desk() as desk:
        yield desk


@pytest.fixture
def launch(folder: SshFolder, server: Any, python: str, desk: Desk) -> Iterator[Callable[..., Any]]:
    """A function that creates launchers; they are closed after the test."""
    launchers = []

    def make(hosts: Any, **options: Any) -> Any:
        launchers.append(ssh.SshLauncher(hosts, **{"python": python, "config": folder.config, **options}))
        return launchers[-1]

    yield make
    for launcher in launchers:
        launcher.close(0.0)


def end_of(handle: Any) -> str:
    return str(wait_until(handle.poll, "the end of the host"))


# -- coming up


def test_agents_dial_back_through_a_tunnel(launch: Any, desk: Desk) -> None:
    launcher = launch("a,b", tunnel="always")
    handles = launcher.launch(desk.configs(2))
    assert launcher.progress() == "SSH: connecting to a, b"
    agents = sorted([desk.greet(), desk.greet()], key=lambda agent: agent.host)
    assert [agent.host for agent in agents] == [1, 2]
    assert f"tcp://127.0.0.1:{desk.port}" not in {agent.address for agent in agents}
    wait_until(lambda: not launcher.progress(), "both to be up")
    assert [handle.poll() for handle in handles] == [None, None]
    assert [handle.address for handle in handles] == ["", ""]
    assert agents[0].hello["argv"] == list(agent_command()[1:])
    assert agents[0].hello["sid"] == agents[0].pid
    umask = os.umask(0)
    os.umask(umask)
    assert agents[0].hello["umask"] == umask
    agents[0].tell("say hello there")
    wait_until(lambda: handles[0].log_tail()[-1:] == ("hello there",), "its log")
    launcher.close(0.0)
    assert all(is_gone(agent.pid) for agent in agents)
    assert not [thread for thread in psutil.Process().threads() if thread.id == -1]


def test_other_users_cannot_read_the_token(launch: Any, desk: Desk) -> None:
    launch("a", tunnel="always").launch([desk.config()])
    agent = desk.greet()
    assert desk.token not in str(agent.hello)
    for process in psutil.process_iter():
        try:
            assert desk.token not in " ".join(process.cmdline())
        except psutil.Error:
            pass
    (directory,) = Path(os.environ["TMPDIR"]).glob("monarch-ssh-*")
    assert directory.stat().st_mode & 0o777 == 0o700


def test_an_agent_dials_directly_if_it_can(launch: Any, desk: Desk) -> None:
    launch("a").launch([desk.config()])
    assert desk.greet().address == f"tcp://127.0.0.1:{desk.port}"


def test_an_agent_uses_the_tunnel_if_it_must(launch: Any, desk: Desk) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        nowhere = f"tcp://127.0.0.1:{deaf.getsockname()[1]}"
    launch("a").launch([desk.config(addresses=(nowhere, f"tcp://localhost.invalid:{desk.port}"))])
    assert desk.greet().address not in (nowhere, f"tcp://127.0.0.1:{desk.port}")


def test_an_agent_dials_directly_with_tunnel_never(launch: Any, desk: Desk) -> None:
    launch("a", tunnel="never").launch([desk.config()])
    assert desk.greet().address == f"tcp://127.0.0.1:{desk.port}"


def test_the_controller_dials_if_reverse_tunnels_are_forbidden(launch: Any, desk: Desk, server: Any) -> None:
    strict = server("strict", ["AllowTcpForwarding local"])
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        nowhere = f"tcp://127.0.0.1:{deaf.getsockname()[1]}"
    (handle,) = launch("strict").launch([desk.config(addresses=(nowhere,), grace_s=30.0)])
    address = wait_until(lambda: handle.address or handle.poll(), "an address")
    assert address.startswith("tcp://127.0.0.1:"), handle.log_tail()
    agent = desk.dial(address)
    assert agent.host == 1
    strict.break_connections()
    wait_until(agent.is_cut_off, "the end of the connection")
    again = wait_until(lambda: _try_to_dial(desk, address), "a new connection at the same address")
    assert again.pid == agent.pid
    assert handle.address == address


def _try_to_dial(desk: Desk, address: str) -> Any:
    try:
        return desk.dial(address)
    except (OSError, ValueError):
        return None


def test_an_agent_dials_directly_if_reverse_tunnels_are_forbidden(launch: Any, desk: Desk, server: Any) -> None:
    server("strict", ["AllowTcpForwarding local"])
    (handle,) = launch("strict").launch([desk.config()])
    assert desk.greet().address == f"tcp://127.0.0.1:{desk.port}"
    assert handle.address == ""


def test_no_connection_is_possible(launch: Any, desk: Desk, server: Any) -> None:
    server("closed", ["AllowTcpForwarding no"])
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        nowhere = f"tcp://127.0.0.1:{deaf.getsockname()[1]}"
    (handle,) = launch("closed").launch([desk.config(addresses=(nowhere,))])
    text = end_of(handle)
    assert text.startswith(f"closed (from {socket.gethostname()}): its SSH server forbids port forwarding")
    assert nowhere in text
    assert "AllowTcpForwarding" in text


def test_python_in_the_home_directory_of_the_host(launch: Any, desk: Desk, server: Any, tmp_path: Path) -> None:
    server("elsewhere", HOME=str(tmp_path))
    folder = tmp_path / "a folder"
    folder.mkdir()
    make_python(folder)
    launch("elsewhere", python="~/a folder/python").launch([desk.config()])
    assert desk.greet().hello["env"]["HOME"] == str(tmp_path)


def test_the_ssh_agent_is_forwarded(
    launch: Any, desk: Desk, folder: SshFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the user's SSH agent has the key, and it is forwarded to the host."""
    path = f"{tmp_path}/agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    config = tmp_path / "config"
    try:
        wait_until(lambda: os.path.exists(path), "the SSH agent")
        environment = {**os.environ, "SSH_AUTH_SOCK": path}
        subprocess.run(["ssh-add", "-q", str(folder.key)], env=environment, check=True)
        text = folder.config.read_text().replace("IdentityAgent none", f"IdentityAgent {path}")
        config.write_text(text.replace(f"IdentityFile {folder.key}", f"IdentityFile {folder.key}.pub"))
        monkeypatch.setenv("SSH_AUTH_SOCK", path)
        launcher = launch("a,b,c", config=config)
        launcher.launch([desk.config()])
        assert "SSH_AUTH_SOCK" not in desk.greet().hello["env"]
        for options, text in (({"forward_agent": True}, ""), ({}, "  ForwardAgent yes\n")):
            config.write_text(config.read_text() + text)
            launch("a,b,c", config=config, **options).launch([desk.config()])
            key = folder.key.with_suffix(".pub").read_text().split()[1]
            assert key in desk.greet().tell("run ssh-add -L")
    finally:
        agent.terminate()
        agent.wait()


# -- failures


def test_a_broken_connection_is_restored(launch: Any, desk: Desk, server: Any) -> None:
    shaky = server("shaky")
    (handle,) = launch("shaky", tunnel="always").launch([desk.config(grace_s=30.0)])
    agent = desk.greet()
    assert shaky.break_connections()
    again = desk.greet()
    assert (again.pid, again.address) == (agent.pid, agent.address)
    again.tell("say here I am")
    wait_until(lambda: "here I am" in handle.log_tail(), "its log")
    assert handle.poll() is None
    again.tell("end 0")
    assert f"the host agent (pid {agent.pid}) ended" in end_of(handle)


def test_the_end_of_the_server_ends_the_host(launch: Any, desk: Desk, server: Any) -> None:
    """The agent gets no signal, and ends by itself; so does its shell."""
    lost = server("lost")
    (handle,) = launch("lost", tunnel="always").launch([desk.config(grace_s=1.0)])
    agent = desk.greet()
    lost.kill()
    text = end_of(handle)
    assert "SSH connection lost, and reconnecting failed: lost (" in text
    assert f"connection refused: is sshd running on port {lost.port}?" in text
    wait_until(lambda: is_gone(agent.pid), "the end of the agent")


def test_an_agent_that_dials_directly_survives_the_server(launch: Any, desk: Desk, server: Any) -> None:
    lost = server("lost")
    launcher = launch("lost")
    (handle,) = launcher.launch([desk.config(grace_s=0.3)])
    agent = desk.greet()
    wait_until(lambda: not launcher.progress(), "the host to be up")
    lost.kill()
    wait_until(lambda: launcher.progress() == "SSH: reconnecting to lost", "the launcher to notice it")
    time.sleep(0.5)  # longer than the launcher waits for a connection that the agent needs
    assert handle.poll() is None
    assert agent.tell("run echo here") == "here"
    lost.start()
    wait_until(lambda: not launcher.progress(), "the connection")
    handle.close(0.0)
    assert is_gone(agent.pid)


def test_poll_reports_the_signal_that_killed_an_agent(launch: Any, desk: Desk) -> None:
    (handle,) = launch("a").launch([desk.config()])
    agent = desk.greet()
    os.kill(agent.pid, signal.SIGKILL)
    assert end_of(handle) == f"a (from {socket.gethostname()}): the host agent (pid {agent.pid}) was killed by SIGKILL"
    assert "the puppet for host 1 is up" in handle.log_tail()


def test_poll_reports_the_exit_code_of_an_agent(launch: Any, desk: Desk) -> None:
    (handle,) = launch("a").launch([desk.config()])
    agent = desk.greet()
    agent.tell("end 7")
    assert f"(pid {agent.pid}) ended with exit code 7 (ends with 7)" in end_of(handle)
    assert handle.log_tail()[-1] == "ends with 7"


# -- closing


def test_close_lets_an_agent_end(launch: Any, desk: Desk) -> None:
    (handle,) = launch("a").launch([desk.config(grace_s=0.5)])
    desk.greet()
    desk.close()
    handle.close(10.0)
    assert "ended with exit code 3" in handle.poll()  # by itself
    handle.close(0.0)


def test_close_kills_an_agent_that_does_not_end(launch: Any, desk: Desk) -> None:
    (handle,) = launch("a").launch([desk.config()])
    agent = desk.greet()
    agent.tell("stay")
    handle.close(0.0)
    assert is_gone(agent.pid)
    assert "SIGKILL" in handle.poll()


def test_close_while_hosts_come_up(launch: Any, desk: Desk, folder: SshFolder) -> None:
    """Closing while connections or agents start leaves nothing behind."""
    moments = {
        "at once": lambda launcher: True,
        "a connection": lambda launcher: any(server.connections() for server in folder.servers),
        "a connected host": lambda launcher: "connecting to a, b, c" not in launcher.progress(),
        "an agent": lambda launcher: desk.greet(),
    }
    for what, has_come in moments.items():
        launcher = launch("a,b,c")
        handles = launcher.launch(desk.configs(3))
        wait_until(lambda has_come=has_come, launcher=launcher: has_come(launcher), what)  # type: ignore[misc]
        launcher.close(0.0)
        assert all(handle.poll() for handle in handles)
        assert launcher.progress() == ""


def test_close_while_a_login_hangs(launch: Any, desk: Desk, bar: Bar) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        launcher = launch(f"127.0.0.1:{deaf.getsockname()[1]}", connect_timeout_s=60.0)
        launcher.launch([desk.config()])
        connection, _ = deaf.accept()
        with bar.below(3.0, "the end of a launcher that has no agents yet"):
            launcher.close(5.0)
        connection.close()


# -- choosing hosts


def test_more_hosts_than_the_list_has_are_refused(launch: Any, desk: Desk) -> None:
    launcher = launch("a,b")
    with pytest.raises(LaunchError, match="asked for 3 hosts by SSH; the list has 2: add hosts to it"):
        launcher.launch(desk.configs(3))
    launcher.launch(desk.configs(1))
    with pytest.raises(LaunchError, match="asked for 2 hosts by SSH; the list has 2, of which 1 is in use"):
        launcher.launch(desk.configs(2))


def test_order_of_replacements(launch: Any, desk: Desk) -> None:
    """The launcher uses a spare first, then the place that was used before."""
    launcher = launch("a,b")
    (first,) = launcher.launch([desk.config(1)])
    os.kill(desk.greet().pid, signal.SIGKILL)
    end_of(first)
    (second,) = launcher.launch([desk.config(2)])
    assert str(second.place) == "b"
    assert desk.greet().host == 2
    (third,) = launcher.launch([desk.config(3)])
    assert str(third.place) == "a"
    assert desk.greet().host == 3
    first.close(0.0)
    second.close(0.0)
    (fourth,) = launcher.launch([desk.config(4)])
    assert str(fourth.place) == "b"
    assert desk.greet().host == 4


def test_a_spare_replaces_an_unreachable_host(launch: Any, desk: Desk, server: Any) -> None:
    server("down").kill()
    launcher = launch("down,a")
    (handle,) = launcher.launch([desk.config()])
    assert desk.greet().host == 1
    assert str(handle.place) == "a"
    assert "down" in handle.log_tail()[0]
    assert "connection refused" in handle.log_tail()[0]


# -- errors


def test_connection_refused(launch: Any, desk: Desk, server: Any) -> None:
    down = server("down")
    down.kill()
    (handle,) = launch("down").launch([desk.config()])
    text = end_of(handle)
    assert text.startswith("down (")
    assert f"@127.0.0.1, port {down.port}, from {socket.gethostname()}): connection refused: is sshd running on" in text


def test_connection_timeout(launch: Any, desk: Desk) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        (handle,) = launch(f"127.0.0.1:{port}", connect_timeout_s=0.3).launch([desk.config()])
        assert f"timed out after 0.3 s: is it up, and do firewall and VPN let port {port} through?" in end_of(handle)


def test_unknown_name(launch: Any, desk: Desk) -> None:
    (handle,) = launch("no-such-host.invalid").launch([desk.config()])
    assert "can't resolve its name: check the spelling" in end_of(handle)


def test_refused_user_key(launch: Any, desk: Desk, folder: SshFolder, tmp_path: Path) -> None:
    folder.new_key(tmp_path / "other")
    config = tmp_path / "config"
    config.write_text(folder.config.read_text().replace(str(folder.key), f"{tmp_path}/other"))
    (handle,) = launch("a", config=config).launch([desk.config()])
    text = end_of(handle)
    assert "it refused all keys of user" in text
    assert f"`ssh -F {config} -p {folder.servers[0].port} a true`" in text


def test_identity_option(launch: Any, desk: Desk, folder: SshFolder, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(folder.config.read_text().replace(str(folder.key), f"{tmp_path}/no-such-key"))
    launch("a", config=config, identity=folder.key).launch([desk.config()])
    assert desk.greet().host == 1
    (handle,) = launch("a", config=config, identity="~/no-such-key").launch([desk.config()])
    assert "no-such-key" in end_of(handle)


def test_unknown_host_key(launch: Any, desk: Desk, folder: SshFolder, server: Any) -> None:
    server("new", known=False)
    (handle,) = launch("new").launch([desk.config()])
    text = end_of(handle)
    assert f"its host key is unknown ({folder.known_hosts} has none): log in once with `ssh" in text


@pytest.mark.parametrize("kind", ["ed25519", "rsa"])
def test_wrong_host_key(launch: Any, desk: Desk, folder: SshFolder, server: Any, tmp_path: Path, kind: str) -> None:
    other = server("changed", known=False)
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", str(key)], check=True)
    folder.know(other, key)
    (handle,) = launch("changed").launch([desk.config()])
    text = end_of(handle)
    assert f"its host key differs from the one in {folder.known_hosts}" in text
    assert f"ssh-keygen -R '[127.0.0.1]:{other.port}'" in text


def test_host_keys_are_always_checked(launch: Any, desk: Desk, folder: SshFolder, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(f"UserKnownHostsFile none\nStrictHostKeyChecking no\n{folder.config.read_text()}")
    (handle,) = launch("a", config=config).launch([desk.config()])
    assert "its host key is unknown" in end_of(handle)


def test_missing_python(launch: Any, desk: Desk) -> None:
    (handle,) = launch("a", python="/no/such/python").launch([desk.config()])
    text = end_of(handle)
    assert text.startswith(f"a (from {socket.gethostname()}): can't run /no/such/python")
    assert "name a Python on that machine that has monarch_kernel" in text


def test_missing_package(launch: Any, desk: Desk, tmp_path: Path) -> None:
    python = tmp_path / "bare"
    python.write_text(f'#!/bin/sh\nunset PYTHONPATH; exec {sys.executable} -S "$@"\n')
    python.chmod(0o700)
    (handle,) = launch("a", python=str(python)).launch([desk.config()])
    text = end_of(handle)
    assert f"{python} lacks a package" in text
    assert "No module named" in text
    assert "install monarch_kernel==" in text


def test_old_python(launch: Any, desk: Desk, tmp_path: Path) -> None:
    """Without an old Python at hand, a script fails like one, and reports an old version."""
    python = make_python(
        tmp_path, name="old", body='case "$2" in *version_info*) echo 3.8.2;; *) exit 1;; esac; exit 0'
    )
    (handle,) = launch("a", python=python).launch([desk.config()])
    assert f"{python} is Python 3.8.2, but 3.10 or newer is required" in end_of(handle)


def test_login_without_commands(launch: Any, desk: Desk, server: Any) -> None:
    server("menu", ["ForceCommand echo this machine is for mail only"])
    (handle,) = launch("menu").launch([desk.config()])
    assert "the login works, but commands do not run (this machine is for mail only)" in end_of(handle)


def test_invalid_configuration(launch: Any, desk: Desk, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host *\n  Port many\n")
    (handle,) = launch("a", config=config).launch([desk.config()])
    assert "the SSH configuration is not valid" in end_of(handle)
