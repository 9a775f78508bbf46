"""Predicted times worked out by hand, on a machine with round numbers."""

import pandas as pd
import pytest

from configs.bench_schema import Shape
from parallel.cost_model import Link
from report.gather_model import PeakRates
from simulator.fit import AttentionTimes, DenseTimes, Fit, NotRecordedError
from simulator.sizes import GraphSize, PartSize
from simulator.times import Machine, bytes_of, peer_bytes, predict, predict_one

SHAPE = Shape(4, 32)
ROW_BYTES = 256
COPY = 1e6  # bytes per ms
GATHER = 2 * ROW_BYTES * 1000.0  # bytes per ms: 1000 columns, keys and values
LINK = Link("link", bandwidth=512_000.0, latency=0.5)  # bytes per second
DENSE = 0.001  # ms of a row
SHA = "0123"


class RoundMachine(Machine):
    """1 ms a launch, 2 ms for 1000 gathered columns of the whole shape, 0.25 ms a row window."""

    def __init__(self, recorded: tuple[Shape, ...] = (SHAPE,), anchor: float = 1.0, dense: bool = True) -> None:
        super().__init__(pd.DataFrame(), "a GPU")
        for shape in recorded:
            # Half the columns take half the time, at the same rate.
            rates = pd.DataFrame({2 * shape.width: [GATHER]}, index=[1])
            fit = Fit((1.0, 2.0, 0.25), (0.1, 0.2))
            times = AttentionTimes(shape, fit, PeakRates("a GPU", COPY, rates, None), {SHA: anchor})
            self._attention[shape] = times
        for heads in range(1, SHAPE.heads):
            self._attention.setdefault(Shape(heads, SHAPE.dim), NotRecordedError("not recorded"))
        self._dense[SHAPE.width] = DenseTimes(Fit((0.0, DENSE), (0.1,))) if dense else None


PARTS = (
    PartSize(160, 32, 900, 100, own_gathered=1000, halo_gathered=500, halo=(0, 20)),
    PartSize(320, 64, 400, 600, own_gathered=2000, halo_gathered=250, halo=(40, 0)),
)


def graph(*parts: PartSize) -> GraphSize:
    rows, edges = sum(part.rows for part in parts), sum(part.edges for part in parts)
    return GraphSize("g", SHA, "file", rows, edges, "metis", "counted", parts)


def copied(num_bytes: float) -> float:
    """A kernel that starts in 3 us."""
    return 0.003 + num_bytes / COPY


# 40 rows to rank 0 and 20 to rank 1 are the most that one rank sends and receives: 2 * 256 * 40 bytes.
EXCHANGE = 1e3 * (0.5 + 2 * ROW_BYTES * 40 / 512_000)  # 540 ms
# Boundary rows: two are read, one is written.
COMBINED = [3 * ROW_BYTES * 32, 3 * ROW_BYTES * 64]
OWN = [1 + 2 * 1 + 0.25 * 10, 1 + 2 * 2 + 0.25 * 20]
HALO = [1 + 2 * 0.5 + 0.25 * 2, 1 + 2 * 0.25 + 0.25 * 4]


def test_halo_waits_for_the_exchange_or_the_own_columns():
    found = predict(graph(*PARTS), "halo", SHAPE, LINK, RoundMachine())
    packs = [copied(2 * 2 * ROW_BYTES * 40), copied(2 * 2 * ROW_BYTES * 20)]  # what the other rank receives
    totals = [packs[rank] + EXCHANGE + HALO[rank] + copied(COMBINED[rank]) for rank in (0, 1)]
    assert found.attention == pytest.approx(max(totals))
    assert found.block == pytest.approx(
        max(total + DENSE * part.rows for total, part in zip(totals, PARTS, strict=True))
    )
    slowest = totals.index(max(totals))
    expected = (packs[slowest], OWN[slowest], EXCHANGE, HALO[slowest], copied(COMBINED[slowest]))
    assert found.parts == pytest.approx(
        dict(zip(("pack", "own", "exchange", "halo", "combine"), expected, strict=True))
    )

    fast = Link("fast", bandwidth=512_000_000.0, latency=0.0)  # 0.04 ms, hidden behind the own columns
    totals = [packs[rank] + OWN[rank] + HALO[rank] + copied(COMBINED[rank]) for rank in (0, 1)]
    assert predict(graph(*PARTS), "halo", SHAPE, fast, RoundMachine()).attention == pytest.approx(max(totals))


def test_allgather_receives_the_largest_part_of_every_rank():
    found = predict(graph(*PARTS), "allgather", SHAPE, LINK, RoundMachine())
    exchange = 1e3 * (0.5 + 2 * ROW_BYTES * 320 / 512_000)
    pack = copied(3 * 2 * ROW_BYTES * 320)
    assert found.attention == pytest.approx(
        max(pack + exchange + HALO[rank] + copied(COMBINED[rank]) for rank in (0, 1))
    )
    assert found.parts["exchange"] == pytest.approx(exchange)


def test_heads_exchange_twice_around_the_whole_graph():
    half = Shape(2, 32)
    found = predict(graph(*PARTS), "heads", SHAPE, LINK, RoundMachine((SHAPE, half)))
    kernel = 1 + 2 * (3750 / 2) / 1000 + 0.25 * 30  # 480 rows; half as many bytes a column
    # Rank 0 has 160 rows: it receives q, k and v of 320 rows for its half, and the other half of its own output.
    received = [128 * (3 * 320 + 160), 128 * (3 * 160 + 320)]
    exchange = 1e3 * (2 * 0.5 + max(received) / 512_000)
    transpose = copied(20 * ROW_BYTES * 320)
    assert found.parts == pytest.approx({"transpose": transpose, "exchange": exchange, "kernel": kernel})
    assert found.attention == pytest.approx(transpose + exchange + kernel)
    assert found.block == pytest.approx(found.attention + DENSE * 320)
    assert (found.kernel, found.is_bound) == (half, False)


def test_a_share_that_was_not_recorded_is_bounded_by_more_heads():
    found = predict(graph(*PARTS), "heads", SHAPE, LINK, RoundMachine((SHAPE, Shape(3, 32))))
    assert (found.kernel, found.is_bound) == (Shape(3, 32), True)
    assert found.parts["kernel"] == pytest.approx(1 + 2 * 3750 * 0.75 / 1000 + 0.25 * 30)
    found = predict(graph(*PARTS), "heads", SHAPE, LINK, RoundMachine())
    assert (found.kernel, found.is_bound) == (SHAPE, True)


def test_the_rank_with_the_most_heads_is_the_slowest():
    parts = tuple(PartSize(160, 0, 10, 0, 10, 0, (0, 0, 0)) for _ in range(3))
    machine = RoundMachine((SHAPE, Shape(1, 32), Shape(2, 32)))  # 4 heads on 3 ranks: 2, 1 and 1
    assert predict(graph(*parts), "heads", SHAPE, LINK, machine).kernel == Shape(2, 32)


def test_one_rank():
    found = predict_one(graph(PartSize(480, 0, 2000, 0, 3000, 0, (0,))), SHAPE, RoundMachine())
    assert found.attention == pytest.approx(1 + 2 * 3 + 0.25 * 30)
    assert found.block == pytest.approx(found.attention + DENSE * 480)


def test_a_recorded_graph_scales_kernels_and_not_copies_or_links():
    plain, twice = (predict(graph(*PARTS), "halo", SHAPE, LINK, RoundMachine(anchor=anchor)).parts for anchor in (1, 2))
    changed = {name for name in plain if plain[name] != twice[name]}
    assert changed == {"own", "halo"}
    assert twice["own"] == pytest.approx(2 * plain["own"])


def test_gathers_of_a_part_are_as_fast_as_those_of_the_whole_graph():
    machine, whole = RoundMachine(), 2 * ROW_BYTES * (160 + 320)  # bytes of all keys and values
    rates = machine.attention(SHAPE).rates.gather
    rates.loc[whole // 2], rates.loc[whole] = 4 * GATHER, GATHER  # L2 serves half of them four times as fast
    assert predict(graph(*PARTS), "halo", SHAPE, LINK, machine).parts["own"] == pytest.approx(OWN[1])


def test_layers_of_an_unrecorded_width_leave_the_block_out():
    for scheme in ("halo", "heads", "allgather"):
        assert predict(graph(*PARTS), scheme, SHAPE, LINK, RoundMachine(dense=False)).block is None


def test_parts_without_a_halo_combine_nothing():
    alone = (PartSize(160, 0, 900, 0, 1000, 0, (0, 0)), PartSize(0, 0, 0, 0, 0, 0, (0, 0)))
    found = predict(graph(*alone), "halo", SHAPE, LINK, RoundMachine())
    assert found.parts == pytest.approx({"pack": 0, "own": OWN[0], "exchange": 500, "halo": 0, "combine": 0})


def test_more_ranks_than_heads():
    parts = tuple(PartSize(16, 0, 16, 0, 16, 0, (0,) * 5) for _ in range(5))
    with pytest.raises(ValueError, match="4 heads on 5 ranks; with scheme 'heads' each rank needs a head"):
        predict(graph(*parts), "heads", SHAPE, LINK, RoundMachine())


@pytest.mark.parametrize("scheme", ["halo", "heads", "allgather"])
@pytest.mark.parametrize("heads", [4, 7])  # 7 heads on 3 ranks are shared out unevenly
def test_bytes_of_the_peers_add_up_to_those_of_the_ranks(scheme, heads):
    parts = (
        PartSize(160, 32, 900, 100, 1000, 500, (0, 20, 3)),
        PartSize(320, 64, 400, 600, 2000, 250, (40, 0, 7)),
        PartSize(48, 16, 50, 10, 40, 9, (5, 6, 0)),
    )
    shape = Shape(heads, 32)
    received = bytes_of(graph(*parts), scheme, shape).received
    by_peer = peer_bytes(graph(*parts), scheme, shape)
    assert [sum(by_peer[2 * rank : 2 * rank + 2]) for rank in range(3)] == list(received)
