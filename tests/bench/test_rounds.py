"""Rounds of passes, with fake times."""

import pytest

from bench.rounds import time_rounds, time_rounds_by_turns


def timed(*rounds, first=None):
    """The result of `time_rounds` where the passes of each round take these milliseconds, and the rounds not timed."""
    left = list(rounds)
    return time_rounds(lambda: left.pop(0), first), left


def test_two_rounds_that_agree_are_enough_and_give_their_passes():
    found, left = timed([1.0, 2.0, 3.0], [2.0, 2.05, 9.0], [5.0])
    assert left == [[5.0]]
    assert (found.disturbed, found.medians) == (False, (2.0, 2.05))
    assert (found.spread.median, found.spread.repeats) == (2.025, 6)
    assert found.spread.p10 == pytest.approx(1.5)
    assert found.spread.p90 == pytest.approx(6.0)
    assert found.columns()["disturbed"] == "no"
    assert found.warning == ""


def test_a_disturbed_round_is_dropped_whenever_it_comes():
    for rounds in ([[9.0], [2.0], [2.02]], [[2.0], [9.0], [2.02]]):
        found, left = timed(*rounds)
        assert (found.spread.median, found.spread.repeats, found.disturbed, left) == (2.01, 2, False, [])


def test_the_nearest_of_several_rounds_is_kept():
    found, _ = timed([2.0], [2.2], [2.11])
    assert found.spread.median == pytest.approx((2.2 + 2.11) / 2)


@pytest.mark.parametrize(("second", "agree"), [(1.049, True), (1.051, False), (0.953, True), (0.951, False)])
def test_medians_agree_within_five_percent_of_the_smaller(second, agree):
    _, left = timed([1.0], [second], [9.0], [30.0], [90.0])
    assert (len(left) == 3) == agree


def test_five_rounds_that_disagree_are_marked_with_their_range_and_all_kept():
    found, left = timed([2.0], [3.0], [4.0], [5.0], [6.0], [2.0])
    assert left == [[2.0]]
    assert found.columns() == {"value": 4.0, "p10": 2.4, "p90": 5.6, "repeats": 5, "disturbed": "yes"}
    assert found.warning == "; medians of 5 rounds from 2 to 6 ms"


def test_a_round_timed_before_is_the_first():
    found, left = timed([4.1], [4.1], first=[4.0])
    assert left == [[4.1]]
    assert found.spread.median == 4.05


def test_runs_by_turns_go_on_until_the_times_of_each_agree():
    rounds = [{"a": [1.0], "b": [9.0]}, {"a": [1.01], "b": [5.0]}, {"a": [7.0], "b": [5.1]}, {"a": [1.0], "b": [1.0]}]
    found = time_rounds_by_turns(lambda: rounds.pop(0))
    assert len(rounds) == 1
    assert (found["a"].spread.median, found["a"].disturbed) == (1.005, False)  # its first two that agreed
    assert (found["b"].spread.median, found["b"].disturbed) == (5.05, False)


def test_by_turns_only_the_run_that_never_agrees_is_disturbed():
    rounds = [{"a": [1.0], "b": [2.0**nth]} for nth in range(9)]
    found = time_rounds_by_turns(lambda: rounds.pop(0))
    assert len(rounds) == 4
    assert (found["a"].disturbed, found["b"].disturbed) == (False, True)
    assert found["b"].spread.repeats == 5
