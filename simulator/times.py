"""Predicted time of attention, and of a block, of one graph on several GPUs.

Each scheme as the code of `parallel` runs it, with the kernel times of `simulator.fit`, the sizes of
`simulator.sizes`, the bytes of `parallel.cost_model` and a link whose rate is an input:

    halo, allgather   pack; own columns while the exchange flies; halo columns; combine
    heads             transpose; exchange; the whole graph for the rank's heads; exchange; transpose
    block             attention and the layers around it, until the slowest rank is done

Not modelled: what the exchange takes from the kernel beside it (multiprocessors, bandwidth), and the host.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from configs.bench_schema import Shape
from parallel.cost_model import Link, Traffic, share_of_heads, traffic
from simulator.fit import ITEM, AttentionTimes, DenseTimes, NotRecordedError
from simulator.sizes import GraphSize

START = 3e-3  # ms from the launch of a kernel to its first bytes: kernels/NOTES.md, "Where is the remaining time?"
# How often a row is read or written outside the kernels and the exchange (parallel/exchange.py, parallel/passes.py).
PACK_HALO = 2  # keys and values: gathered
PACK_ALLGATHER = 3  # keys and values: a buffer is zeroed, then filled
TRANSPOSE = 3 * 6 + 2  # heads: q, k and v are stacked, split by rank and joined; the output is joined
COMBINE = 3  # boundary rows: two are read, one is written


@dataclass(frozen=True)
class Prediction:
    """One scheme over one link, in ms.

    Attributes:
        attention: until all ranks are done.
        parts: of the rank that takes longest. Of halo and allgather: pack, own, exchange (beside own), halo, combine;
            of heads: transpose, exchange, kernel; of one rank: kernel.
        block: attention and the layers around it; None if layers of this width were not recorded.
        kernel: the shape whose recorded times were used.
        is_bound: the ranks run fewer heads than `kernel` has, since their share was not recorded: an upper bound.
    """

    attention: float
    parts: Mapping[str, float]
    block: float | None
    kernel: Shape
    is_bound: bool = False


class Machine:
    """Fits of one device, made on demand.

    Args:
        rows: of `report.frames.recorded`.
        device: as in the rows.
    """

    def __init__(self, rows: pd.DataFrame, device: str) -> None:
        self.rows, self.device = rows, device
        self._attention: dict[Shape, AttentionTimes | NotRecordedError] = {}
        self._dense: dict[int, DenseTimes | None] = {}

    def attention(self, shape: Shape) -> AttentionTimes:
        """Raises a NotRecordedError where the shape has too few recorded times."""
        if shape not in self._attention:
            try:
                self._attention[shape] = AttentionTimes.of(self.rows, self.device, shape)
            except NotRecordedError as error:
                self._attention[shape] = error
        found = self._attention[shape]
        if isinstance(found, NotRecordedError):
            raise found
        return found

    def attention_of_share(self, share: int, shape: Shape) -> AttentionTimes:
        """Of `share` heads of a shape, or of the fewest recorded heads above: an upper bound.

        Raises:
            NotRecordedError: the shape itself has too few recorded times.
        """
        for heads in range(share, shape.heads):
            try:
                return self.attention(Shape(heads, shape.dim))
            except NotRecordedError:
                continue
        return self.attention(shape)

    def dense(self, width: int) -> DenseTimes | None:
        """None where layers of this width were not recorded."""
        if width not in self._dense:
            try:
                self._dense[width] = DenseTimes.of(self.rows, self.device, width)
            except NotRecordedError:
                self._dense[width] = None
        return self._dense[width]


def bytes_of(graph: GraphSize, scheme: str, shape: Shape) -> Traffic:
    """Bytes of each rank."""
    rows, halo = [part.rows for part in graph.parts], [part.halo for part in graph.parts]
    return traffic(scheme, rows, halo, shape.heads, ITEM * shape.dim)


def peer_bytes(graph: GraphSize, scheme: str, shape: Shape) -> list[int]:
    """Bytes from each rank to each other one; of "heads" in both exchanges together."""
    row_bytes, head_bytes = ITEM * shape.width, ITEM * shape.dim
    heads = share_of_heads(shape.heads, graph.ranks)
    largest = max(part.rows for part in graph.parts)
    found = []
    for to, receiver in enumerate(graph.parts):
        for by, sender in enumerate(graph.parts):
            if to == by:
                continue
            if scheme == "halo":
                found.append(2 * row_bytes * receiver.halo[by])
            elif scheme == "allgather":
                found.append(2 * row_bytes * largest)
            else:
                found.append(head_bytes * (3 * sender.rows * heads[to] + receiver.rows * heads[by]))
    return found


def predict_one(graph: GraphSize, shape: Shape, machine: Machine) -> Prediction:
    """Times of a graph of one part on one GPU, whether it fits or not.

    Raises:
        NotRecordedError: the shape has too few recorded times.
    """
    times, dense = machine.attention(shape), machine.dense(shape.width)
    kernel = times.anchors.get(graph.sha256, 1.0) * times.ms(graph.nodes, graph.gathered, graph.nodes)
    block = None if dense is None else kernel + dense.ms(graph.nodes)
    return Prediction(kernel, {"kernel": kernel}, block, shape)


def predict(graph: GraphSize, scheme: str, shape: Shape, link: Link, machine: Machine) -> Prediction:
    """Times of a scheme.

    Raises:
        NotRecordedError: the shape has too few recorded times.
        ValueError: "heads" with more ranks than heads.
    """
    exchange = 1e3 * bytes_of(graph, scheme, shape).seconds(link)
    of_scheme = _predict_heads if scheme == "heads" else _predict_split
    return of_scheme(graph, scheme, shape, exchange, machine)


def _predict_split(graph: GraphSize, scheme: str, shape: Shape, exchange: float, machine: Machine) -> Prediction:
    """Halo and allgather: `parallel.passes.SplitPasses`. Ranks wait for each other once a block.

    Gathers take as long as those of the whole graph, although a rank has fewer columns, of which L2 could serve more:
    a partition keeps together what a single GPU finds in L2 anyway.
    """
    times, dense = machine.attention(shape), machine.dense(shape.width)
    anchor = times.anchors.get(graph.sha256, 1.0)
    largest = max(part.rows for part in graph.parts)
    found, blocks = [], []
    for rank, part in enumerate(graph.parts):
        if scheme == "halo":
            packed = PACK_HALO * sum(other.halo[rank] for other in graph.parts)
        else:
            packed = PACK_ALLGATHER * largest
        row_bytes = ITEM * shape.width
        parts = {
            "pack": _copy_ms(times, 2 * row_bytes * packed),
            "own": anchor * times.ms(part.rows, part.own_gathered, graph.nodes),
            "exchange": exchange,
            "halo": anchor * times.ms(part.boundary_rows, part.halo_gathered, graph.nodes),
            "combine": _copy_ms(times, row_bytes * COMBINE * part.boundary_rows),
        }
        attention = sum(parts.values()) - min(parts["own"], exchange)  # the two run side by side
        found.append((attention, parts))
        blocks.append(None if dense is None else attention + dense.ms(part.rows))
    attention, parts = max(found, key=lambda one: one[0])
    return Prediction(attention, parts, None if dense is None else max(blocks), shape)


def _copy_ms(times: AttentionTimes, num_bytes: int) -> float:
    """Milliseconds of a kernel that reads and writes this many bytes together; 0 without any: nothing is launched."""
    return START + times.copy_ms(num_bytes) if num_bytes else 0.0


def _predict_heads(graph: GraphSize, scheme: str, shape: Shape, exchange: float, machine: Machine) -> Prediction:
    """`parallel.passes.HeadsPasses`. Ranks wait for each other before and after the kernel."""
    if shape.heads < graph.ranks:
        raise ValueError(f"{shape.heads} heads on {graph.ranks} ranks; with scheme {scheme!r} each rank needs a head")
    share = max(share_of_heads(shape.heads, graph.ranks))
    times = machine.attention_of_share(share, shape)
    anchor = times.anchors.get(graph.sha256, 1.0)
    kernel = anchor * times.ms(graph.nodes, graph.gathered, graph.nodes)
    largest = max(part.rows for part in graph.parts)
    transpose = _copy_ms(times, TRANSPOSE * ITEM * shape.width * largest)
    dense = machine.dense(shape.width)
    parts = {"transpose": transpose, "exchange": exchange, "kernel": kernel}
    attention = sum(parts.values())
    block = None if dense is None else attention + dense.ms(largest)
    return Prediction(attention, parts, block, times.shape, is_bound=times.shape.heads > share)
