"""Automatic restarts of ranks are bounded and come ever later; each death leads to one restart, or to none with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.runtime.controller.restart_policy import RestartPolicy, Restarts

RANKS = (0, 1, 2, 3)

policies = st.builds(
    RestartPolicy,
    restart=st.sampled_from(["rank", "mesh"]),
    max_restarts=st.integers(0, 4),
    within_s=st.sampled_from([0.0, 5.0, 60.0]),
    backoff_s=st.sampled_from([0.0, 0.5, 2.0]),
    max_backoff_s=st.sampled_from([0.0, 1.0, 30.0]),
)
# Steps: a rank dies, or time passes.
happenings = st.lists(st.tuples(st.sampled_from(RANKS), st.sampled_from([0.0, 0.1, 0.5, 1.0, 4.0, 30.0])), max_size=60)


@given(policy=policies, happenings=happenings)
def test_restarts_are_bounded_and_each_death_leads_to_one_or_to_a_reason(
    policy: RestartPolicy, happenings: list[tuple[int, float]]
) -> None:
    restarts = Restarts(policy, RANKS)
    now = 0.0
    dead: set[int] = set()
    given_up: set[int] = set()
    accepted: dict[int, list[float]] = {}
    done: set[int] = set()
    for rank, dt in happenings:
        if rank not in dead:
            is_restarted, said = restarts.died(rank, now)
            assert said
            assert ("not restarted" in said) != is_restarted
            dead.add(rank)
            if not is_restarted:
                given_up |= set(RANKS) if policy.restart == "mesh" else {rank}
            elif policy.restart == "rank" or dead == {rank}:
                accepted.setdefault(rank if policy.restart == "rank" else -1, []).append(now)
        now += dt
        again = restarts.due(now)
        assert len(set(again)) == len(again)
        assert restarts.due(now) == (), "each rank is returned once"
        if policy.restart == "mesh":
            assert again in ((), RANKS)
        else:
            assert set(again) <= dead, "a rank that lives is replaced"
        done |= set(again)
        dead -= set(again)
        given_up -= set(again)  # by then there were fewer within the time
        assert dead <= given_up or restarts.next_at < float("inf"), "nobody is forgotten"
    late = now + policy.max_backoff_s
    dead -= set(restarts.due(late))
    assert restarts.next_at == float("inf")
    assert dead <= given_up
    for times in accepted.values():
        for i, first in enumerate(times):
            assert (
                sum(each < first + policy.within_s for each in times[i:]) <= policy.max_restarts or not policy.within_s
            )
    if policy.max_restarts == 0:
        assert not done


def test_the_first_restart_is_at_once_and_each_further_one_waits_longer() -> None:
    restarts = Restarts(RestartPolicy("rank", max_restarts=6, backoff_s=1.0, max_backoff_s=5.0), RANKS)
    now, waits = 100.0, []
    for _ in range(6):
        restarts.died(2, now)
        waits.append(restarts.next_at - now)
        now = restarts.next_at
        assert restarts.due(now) == (2,)
    assert waits == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert restarts.died(2, now).text == "it is not restarted, because it was restarted 6 times within 300 s"
    assert restarts.due(now + 1000) == ()


def test_old_restarts_do_not_count() -> None:
    restarts = Restarts(RestartPolicy("rank", max_restarts=1, within_s=10.0), RANKS)
    for now in (0.0, 11.0, 22.0):
        assert restarts.died(1, now).text == "a new process replaces it"
        assert restarts.due(now) == (1,)
    assert "not restarted, because it was restarted 1 time within 10 s" in restarts.died(1, 23.0).text


def test_restarts_are_counted_for_each_rank() -> None:
    """A machine that fails ends all its ranks: that is one death of each."""
    restarts = Restarts(RestartPolicy("rank", max_restarts=1), RANKS)
    for rank in RANKS:
        restarts.died(rank, 0.0)
    assert restarts.due(0.0) == RANKS


def test_a_mesh_is_restarted_once_for_several_deaths() -> None:
    restarts = Restarts(RestartPolicy("mesh", max_restarts=2, backoff_s=3.0), RANKS)
    assert restarts.died(0, 0.0).text == "the mesh is restarted"
    assert restarts.due(0.0) == RANKS
    assert restarts.died(1, 1.0).text == "the mesh is restarted in 3.0 s"
    assert restarts.died(3, 2.0).text == "the mesh is restarted in 2.0 s"
    assert restarts.due(3.9) == ()
    assert restarts.due(4.0) == RANKS
    assert restarts.died(1, 5.0).text == "the mesh is not restarted, because it was restarted 2 times within 300 s"


def test_a_rank_that_the_program_replaced_is_not_restarted() -> None:
    restarts = Restarts(RestartPolicy("rank", backoff_s=5.0), RANKS)
    restarts.died(1, 0.0)
    restarts.due(0.0)
    restarts.died(1, 1.0)
    restarts.forget(1)
    assert restarts.due(100.0) == ()


def test_the_policy_never_does_not_restart() -> None:
    restarts = Restarts(RestartPolicy(), RANKS)
    assert restarts.died(1, 0.0) == (False, "")
    assert restarts.due(1e9) == ()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"restart": "always"}, "restart must be one of 'never', 'rank', 'mesh', not 'always'"),
        ({"max_restarts": -1}, "max_restarts must be a number of at least 0, not -1"),
        ({"backoff_s": "1"}, "backoff_s must be a number of at least 0, not '1'"),
        ({"within_s": float("nan")}, "within_s must be a number"),
        ({"max_backoff_s": True}, "max_backoff_s must be a number"),
    ],
)
def test_invalid_policies_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RestartPolicy(**options)
