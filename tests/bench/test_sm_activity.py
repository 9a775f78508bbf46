"""SM active time: from clocks to cycles to rows."""

import numpy as np
import pytest
from bench_runs import config, context

from bench import sm_activity
from bench.sm_activity import active_cycles


def test_active_cycles_of_overlapping_nested_and_separate_blocks():
    clocks = [
        (5, 100, 200),
        (5, 150, 250),  # overlaps
        (5, 160, 170),  # inside
        (5, 250, 260),  # follows at once
        (5, 400, 450),  # after a gap
        (0, 10**12, 10**12 + 7),  # another clock
    ]
    for order in ([0, 1, 2, 3, 4, 5], [4, 2, 5, 0, 3, 1]):
        assert active_cycles(np.array(clocks)[order], num_sms=2) == {5: 210, 0: 7}


def test_active_cycles_are_those_with_a_block():
    rng = np.random.default_rng(0)
    start = rng.integers(0, 2000, 300)
    clocks = np.stack([rng.integers(0, 4, 300), start, start + rng.integers(1, 30, 300)], axis=1)
    expected = {sm: len({t for s, a, b in clocks if s == sm for t in range(a, b)}) for sm in range(4)}
    assert active_cycles(clocks, num_sms=4) == expected


def test_an_sm_without_a_block_counts_with_0():
    assert active_cycles(np.array([(1, 5, 8)]), num_sms=3) == {0: 0, 1: 3, 2: 0}
    # SM numbers may have gaps: no other SM is added.
    assert active_cycles(np.array([(1, 5, 8), (7, 0, 2)]), num_sms=2) == {1: 3, 7: 2}


@pytest.mark.parametrize(("error", "status"), [(1e-4, "ok"), (3e-3, "wrong"), (float("nan"), "wrong")])
def test_rows_are_of_the_median_launch_and_the_share_of_all(error, status):
    one = context(config("sm_active"))
    case, _ = sm_activity.cases(one.config, one.device)
    launches = [{0: 90, 1: 100}, {0: 50, 1: 50}, {0: 20, 1: 300}]
    share, *times = sm_activity.rows_of_launches(one, case, launches, error)
    assert (share.metric, share.unit, share.repeats, share.variant) == ("sm_active_share", "1", 3, "F3S_splitC")
    assert share.value == pytest.approx(0.95)  # of 0.95, 1 and 160 / 300
    assert [(row.metric, row.unit, row.value, row.sm) for row in times] == [
        ("sm_active_time", "cycles", 90, 0),
        ("sm_active_time", "cycles", 100, 1),
    ]
    assert {row.status for row in (share, *times)} == {status}
