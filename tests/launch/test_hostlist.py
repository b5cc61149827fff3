"""Parsing of lists of hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.ssh.hostlist import SshTarget, read_hosts

PLACES = {
    "node1": SshTarget("node1"),
    "me@node1.example.org": SshTarget("node1.example.org", "me"),
    "node1:2222": SshTarget("node1", port=2222),
    "me@10.0.0.1:2222": SshTarget("10.0.0.1", "me", 2222),
    "fe80::1%eth0": SshTarget("fe80::1%eth0"),
    "::1": SshTarget("::1"),
    "me@[::1]:2222": SshTarget("::1", "me", 2222),
    "me@corp.com@node1": SshTarget("node1", "me@corp.com"),
}


@pytest.mark.parametrize("text", PLACES)
def test_valid_hosts_are_parsed(text: str) -> None:
    assert SshTarget.parse(text) == PLACES[text]
    assert str(PLACES[text]) == text


@pytest.mark.parametrize(
    "text", ["node1:", "node1:0", "node1:65536", "node1:ssh", "-oProxyCommand=x", "[::1", "me@", ";ls"]
)
def test_invalid_hosts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        SshTarget.parse(text)


def test_lists_and_host_files(tmp_path: Path) -> None:
    expected = [SshTarget("a"), SshTarget("b", "me"), SshTarget("c", port=2222)]
    assert read_hosts("a,me@b,c:2222") == expected
    assert read_hosts(" a, me@b ,,c:2222,") == expected
    assert read_hosts(["a", "me@b", "c:2222"]) == expected
    file = tmp_path / "hosts"
    file.write_text("# ours\n\na slots=8\n  me@b   # spare\nc:2222 max_slots=4 slots=2\n")
    assert read_hosts(file) == read_hosts(str(file)) == expected


def test_the_name_of_an_existing_file_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_hosts("hosts") == [SshTarget("hosts")]
    (tmp_path / "hosts").write_text("a\n")
    assert read_hosts("hosts") == [SshTarget("a")]
    assert read_hosts(["hosts"]) == [SshTarget("hosts")]


WRONG = {
    "a\nb gpus=8\n": "hosts, line 2: can't parse 'gpus=8'",
    "a\nb:x\n": "hosts, line 2: 'b:x': 'x' is not a port",
    "a\nb\n\na\n": "hosts, line 4: a is in the list of hosts twice, first in line 1",
    "# nobody\n": "there is no host in ",
    "": "there is no host in ",
}


@pytest.mark.parametrize("text", WRONG)
def test_errors_in_host_files(tmp_path: Path, text: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(LaunchError, match=WRONG[text]):
        read_hosts(file)


def test_errors_in_lists(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="twice; a host runs only one agent"):
        read_hosts("a,b,a")
    with pytest.raises(LaunchError, match="the list of hosts is empty"):
        read_hosts(" , ")
    with pytest.raises(LaunchError, match="can't read the host file .*missing: No such file"):
        read_hosts(f"{tmp_path}/missing")
    with pytest.raises(LaunchError, match="Is a directory"):
        read_hosts(tmp_path)
    (tmp_path / "key").write_bytes(bytes(range(256)))
    with pytest.raises(LaunchError, match="is not a text file"):
        read_hosts(tmp_path / "key")
