"""Texts about resources that a Ray cluster lacks, and about errors of Ray, without a cluster."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.ray import RayLauncher
from monarch_kernel.launch.ray.cluster import Node, amount, explain, in_numbers

BIG = {"CPU": 4.0, "GPU": 8.0, "memory": 1e9}
HEAD = {"CPU": 0.0, "memory": 1e9}
HOST = {"GPU": 8.0, "CPU": 1.0}


def nodes(*totals: dict[str, float]) -> list[Node]:
    return [Node(f"n{i}", f"10.0.0.{i}", total) for i, total in enumerate(totals)]


@pytest.mark.parametrize(
    ("resources", "text"),
    [
        ({"CPU": 1.0}, "1 CPU"),
        ({"CPU": 2.0, "GPU": 8.0}, "8 GPUs and 2 CPUs"),
        ({"CPU": 0.5, "GPU": 1.0, "TPU-v4": 4.0}, "1 GPU, 0.5 CPUs and 4 TPU-v4"),
    ],
)
def test_amounts_of_resources_as_text(resources: dict[str, float], text: str) -> None:
    assert amount(resources, resources) == text


def test_missing_resources_are_zero() -> None:
    assert amount(HEAD, HOST) == "0 GPUs and 0 CPUs"


def test_no_text_if_the_cluster_has_enough_nodes() -> None:
    assert in_numbers(4, HOST, nodes(HEAD, BIG, BIG, BIG, BIG), ()) == ""


def test_text_for_too_many_hosts() -> None:
    assert in_numbers(5, HOST, nodes(HEAD, BIG, BIG, BIG, BIG), ()) == (
        "asked for 5 hosts with 8 GPUs and 1 CPU each, a node for each; "
        "the cluster has 4 such nodes (of 5 nodes: 4 with 8 GPUs and 4 CPUs; 1 with 0 GPUs and 0 CPUs)"
    )


def test_text_for_nodes_that_already_have_a_host() -> None:
    text = in_numbers(1, HOST, nodes(BIG, BIG), {"n0", "n1", "gone"})
    assert text.startswith("asked for 1 host with 8 GPUs and 1 CPU, a node for each; the cluster has 2 such nodes")
    assert text.endswith(", but 2 of these already have a host of this mesh")
    assert in_numbers(1, HOST, nodes(BIG, BIG), {"n0"}) == ""


def test_text_for_a_cluster_without_nodes() -> None:
    assert in_numbers(1, HOST, [], ()).endswith("the cluster has 0 such nodes (of 0 nodes: it has none)")


def test_errors_of_ray_are_shown_without_tables() -> None:
    died = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: AgentActor\n\tactor_id: 42\n\tpid: 883\n"
        "\tnamespace: 89778e0e\n\tip: 10.0.0.1\nThe actor died because its node has died. Node Id: cdd8\n"
        "\tthe actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats"
    )
    assert explain(RuntimeError(died)) == (
        "The actor died because its node has died. Node Id: cdd8 "
        "the actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats"
    )
    assert explain(RuntimeError()) == "RuntimeError"


def test_a_host_without_resources_is_refused() -> None:
    with pytest.raises(LaunchError, match="must take some resource"):
        RayLauncher(cpus=0)
    with pytest.raises(LaunchError, match="must take some resource"):
        RayLauncher(gpus=-1)


def test_resources_must_be_numbers() -> None:
    with pytest.raises(LaunchError, match="--resource accelerator=1.*'many'"):
        RayLauncher(resources=[("tpu", "many")])
    RayLauncher(resources=[("tpu", "4")])
    RayLauncher(resources={"tpu": 4})


@pytest.mark.parametrize(
    ("given", "left"), [("ray.util.rpdb.set_trace", None), ("mine.debugger", "mine.debugger"), (None, None)]
)
def test_ranks_do_not_get_the_debugger_of_ray(given: str | None, left: str | None) -> None:
    """A node inherits variables from the process that started it, which may be another Ray program."""
    code = "from monarch_kernel.launch.ray import agent_actor; print(agent_actor._environment(None).get('PYTHONBREAKPOINT'))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONBREAKPOINT"}
    environment |= {} if given is None else {"PYTHONBREAKPOINT": given}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(left)
