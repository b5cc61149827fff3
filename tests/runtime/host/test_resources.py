"""A rank gets its share of a host that the controller does not know."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from monarch_kernel.net.wire.messages import RankSpec
from monarch_kernel.runtime.host.gpus import Inventory, gpus_for_ranks
from monarch_kernel.runtime.host.resources import TooFewGpusError, assign_resources


def spec(
    device: str, *, local_rank: int = 1, per_host: int = 2, hosts: int = 2, threads: int = 0, **env: str
) -> RankSpec:
    world = per_host * hosts
    axes = (("hosts", hosts), ("gpus", per_host))
    return RankSpec(7, local_rank, world, local_rank, per_host, axes, "m", device, threads, env, "/", ())


def share(wanted: RankSpec, gpus: list[str], **environment: str) -> RankSpec:
    return assign_resources(wanted, environment, machine(gpus), "node7", "eth0")


def machine(gpus: list[str]) -> Callable[[str | None], list[str]]:
    """A host with eight GPUs, some of which its processes may use."""
    eight = Inventory([f"GPU-{number}" for number in range(8)], lambda name: False)
    return lambda visible: gpus if visible is None else gpus_for_ranks(visible, eight)


def test_each_rank_gets_a_gpu_if_there_are_enough() -> None:
    for local_rank in range(2):
        given = share(spec("auto", local_rank=local_rank), ["3", "GPU-5f", "6"])
        assert (given.device, given.env["CUDA_VISIBLE_DEVICES"]) == ("cuda", ["3", "GPU-5f"][local_rank])


@pytest.mark.parametrize("gpus", [[], ["0"]])
def test_no_rank_gets_a_gpu_if_there_are_too_few(gpus: list[str]) -> None:
    given = share(spec("auto"), gpus)
    assert (given.device, given.env["CUDA_VISIBLE_DEVICES"]) == ("cpu", "")


def test_the_error_for_too_few_gpus_names_the_host_and_its_count() -> None:
    with pytest.raises(TooFewGpusError, match=r"^4 ranks with a GPU each .* host node7 has 1 GPU; request fewer"):
        share(spec("cuda", per_host=4), ["0"])
    assert share(spec("cuda", per_host=1, local_rank=0), ["4"]).env["CUDA_VISIBLE_DEVICES"] == "4"


def test_ranks_share_the_gpus_that_the_user_names() -> None:
    given = share(spec("auto", CUDA_VISIBLE_DEVICES="6, 7"), ["0", "1", "2"])
    assert (given.device, given.env["CUDA_VISIBLE_DEVICES"]) == ("cuda", "7")
    assert share(spec("auto", CUDA_VISIBLE_DEVICES="-1"), ["0", "1"]).device == "cpu"
    for local_rank in range(2):
        given = share(spec("cuda", local_rank=local_rank, CUDA_VISIBLE_DEVICES="0,0"), ["0"])
        assert (given.device, given.env["CUDA_VISIBLE_DEVICES"]) == ("cuda", "0")


def test_a_rank_sees_the_gpus_that_the_user_names_if_none_is_assigned() -> None:
    assert share(spec("auto", CUDA_VISIBLE_DEVICES="4"), ["0", "1"]).env["CUDA_VISIBLE_DEVICES"] == "4"
    assert share(spec("cpu", CUDA_VISIBLE_DEVICES="4,5"), ["0", "1"]).env["CUDA_VISIBLE_DEVICES"] == ""


def test_all_ranks_see_all_gpus_of_the_mesh_or_the_host() -> None:
    for env, surroundings, visible in [
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "0,1"}, "4,5"),
        ({}, {"CUDA_VISIBLE_DEVICES": "0,1"}, "0,1"),
        ({}, {}, None),
    ]:
        given = share(spec("visible", **env), ["0", "1"], **surroundings)
        assert (given.device, given.env.get("CUDA_VISIBLE_DEVICES")) == ("cpu", visible)


@pytest.mark.parametrize("visible", ["NoDevFiles", "8", "0,8", "0,abc,1", "0,,1", "MIG-1"])
def test_names_that_are_no_gpu_do_not_count(visible: str) -> None:
    assert share(spec("auto", CUDA_VISIBLE_DEVICES=visible), ["0", "1"]).device == "cpu"
    with pytest.raises(TooFewGpusError):
        share(spec("cuda", CUDA_VISIBLE_DEVICES=visible), ["0", "1"])


def test_a_rank_on_the_controllers_machine_has_its_threads() -> None:
    given = assign_resources(spec("auto", hosts=1), {}, machine(["0"]), "here", "", 3)
    assert (given.device, given.threads, given.env) == (
        "cpu",
        3,
        {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"},
    )


def test_collectives_use_the_interface_to_other_hosts() -> None:
    env = share(spec("cpu"), []).env
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("eth0", "=eth0")


def test_settings_of_the_user_are_kept() -> None:
    assert share(spec("cpu", GLOO_SOCKET_IFNAME="ib0"), []).env["GLOO_SOCKET_IFNAME"] == "ib0"
    of_the_host = share(spec("cpu"), [], GLOO_SOCKET_IFNAME="ib1", NCCL_SOCKET_IFNAME="ib").env
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & set(of_the_host)


def test_a_mesh_of_one_host_needs_no_network() -> None:
    env = share(spec("cpu", hosts=1), []).env
    assert env["GLOO_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in env


def test_nothing_is_set_if_the_interface_is_unknown() -> None:
    assert "GLOO_SOCKET_IFNAME" not in assign_resources(spec("cpu"), {}, machine([]), "node7", "").env


def test_a_settled_spec_is_unchanged() -> None:
    settled = spec("cuda", per_host=8, threads=4)
    assert share(settled, []) is settled
