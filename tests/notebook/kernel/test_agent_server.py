"""An agent looks at the meshes of a kernel through the client of the package ``mcp``; ``make test-field`` has that package."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from tests.notebook.kernel.conftest import Notebook
from tests.support.waiting import wait_until

mcp = pytest.importorskip("mcp", reason="the package mcp is in the environment of make test-field")

pytestmark = pytest.mark.slow  # each test starts a server and loads its packages

T = TypeVar("T")

READS = {"list_meshes", "show_mesh", "show_stacks", "read_logs", "show_traceback", "profile", "show_record"}
CHANGES = {"set_knob", "control_live_loop", "interrupt", "heal"}

WAITS_FOR_RANK_1 = """
import time, torch, torch.distributed as dist
for step in live.loop(100_000):
    live.knob("lr", 0.1, low=0.0, high=1.0)
    if rank == 1:
        time.sleep(0.02)
    dist.all_reduce(torch.ones(4))
"""


def with_agent(notebook: Notebook, use: Callable[[Any], Awaitable[T]], *options: str) -> T:
    """Let an agent use the server, which is a process as agents start it."""
    arguments = ["-m", "monarch_kernel", "mcp", "--kernel", notebook.manager.connection_file, *options]

    async def run() -> T:
        async with mcp.Client(mcp.StdioServerParameters(command=sys.executable, args=arguments)) as client:
            return await use(client)

    return asyncio.run(run())


async def text_of(client: Any, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    text = "\n".join(part.text for part in result.content)
    assert not result.is_error, text
    return text


async def refusal_of(client: Any, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    return "\n".join(part.text for part in result.content)


def test_an_agent_can_read_and_has_no_tools_to_change(notebook: Notebook) -> None:
    notebook.ok("%%remote t\nprint('hello from', rank)")

    async def use(client: Any) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == READS
        assert all(tool.annotations.read_only_hint for tool in tools.values())
        listed = (await client.call_tool("list_meshes", {})).structured_content
        assert [mesh["name"] for kernel in listed["kernels"] for mesh in kernel["meshes"]] == ["t"]
        shown = (await client.call_tool("show_mesh", {"mesh": "t"})).structured_content
        assert [rank["state"] for rank in shown["ranks"]] == ["idle", "idle"]
        part = (await client.call_tool("show_mesh", {"mesh": "t[1]"})).structured_content
        assert [rank["rank"] for rank in part["ranks"]] == [1]
        assert "from 0 to 1" in await refusal_of(client, "show_mesh", mesh="t[9]")
        assert "there is no mesh 'u'" in await refusal_of(client, "show_record", mesh="u")
        assert "a record is of the whole run; write t" in await refusal_of(client, "show_record", mesh="t[0]")
        assert "hello from 1" in await text_of(client, "read_logs", mesh="t[1]", lines=5)
        assert "no record runs" in await text_of(client, "show_record")
        assert "must be 1 or more, not -3" in await refusal_of(client, "read_logs", mesh="t", lines=-3)
        assert "must be 1 or more, not 0" in await refusal_of(client, "profile", mesh="t", steps=0)
        assert "seconds must be above 0" in await refusal_of(client, "profile", mesh="t", seconds=-1)
        assert "there is no mesh 'u'" in await refusal_of(client, "show_stacks", mesh="u")
        assert "t runs nothing" in await refusal_of(client, "profile", mesh="t")
        assert "Unknown tool" in await refusal_of(client, "interrupt", mesh="t")

    with_agent(notebook, use)
    assert notebook.ok("%%remote t\n1 + 1").ok


def test_an_agent_names_the_straggler_and_turns_a_knob_where_it_may(notebook: Notebook) -> None:
    notebook.ok(f"%%remote t --background\n{WAITS_FOR_RANK_1}")
    wait_until(lambda: notebook.value("[loop.view().step > 2 for loop in t.loops[-1:]]") == [True], "the loop to start")

    async def use(client: Any) -> None:
        tools = {tool.name for tool in (await client.list_tools()).tools}
        assert tools == READS | CHANGES
        assert "[1] is last in" in await text_of(client, "profile", mesh="t", steps=10, seconds=60)
        assert (await text_of(client, "set_knob", mesh="t", name="lr", value=0.5)).startswith("lr is 0.5 from step ")
        assert "at most 1" in await refusal_of(client, "set_knob", mesh="t", name="lr", value=7)
        assert "write t, without ranks" in await refusal_of(client, "set_knob", mesh="t[0]", name="lr", value=0.2)
        assert "write t, without ranks" in await refusal_of(client, "control_live_loop", mesh="t[0]", action="pause")
        for action in ("", " "):
            refusal = await refusal_of(client, "control_live_loop", mesh="t", action=action)
            assert "write one of pause, resume, step, stop, or KNOB=VALUE" in refusal
        assert "neither one of pause" in await refusal_of(client, "control_live_loop", mesh="t", action="faster")
        assert "pause before step" in await text_of(client, "control_live_loop", mesh="t", action="pause")
        await text_of(client, "control_live_loop", mesh="t", action="step 2")
        await text_of(client, "interrupt", mesh="t")

    with_agent(notebook, use, "--allow-changes")
    wait_until(lambda: notebook.value("t.loop.view().state == 'over'"), "the loop to be over")
    knobs = notebook.value("[(knob.name, knob.value) for knob in t.loop.view().knobs]")
    assert knobs == [("lr", 0.5)]
