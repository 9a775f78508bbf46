"""Predicted bytes and time of the three schemes, the choice between them, and whether one GPU alone is faster.

Per layer, with b bytes of a row of keys (H d elements), rank p receives

    halo        2 b (halo columns of p)                 keys and values
    allgather   2 b (P - 1) (rows of the largest part)  keys and values
    heads       4 b (N - rows of p) (heads of p) / H    query, key, value; and its output goes back

The choice depends only on the partition and the kind of link, not on a measurement in the run: the same run always
chooses the same scheme and gives the same bits. Numbers of NVLink and of a GPU are those of two and four H100 in
results/h100/parallel.csv; those of INFINIBAND and LOOPBACK are assumptions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from parallel.assignment import EDGES_PER_ROW
from parallel.part import Partition

SCHEMES = ("halo", "heads", "allgather")


@dataclass(frozen=True)
class Link:
    """The link between ranks.

    Attributes:
        bandwidth: bytes per second received by a rank that sends as many at the same time.
        latency: seconds of an empty collective.
    """

    name: str
    bandwidth: float
    latency: float


NVLINK = Link("NVLink", 286e9, 100e-6)  # with pack: ogbn-products' exchange, and the shortest one
INFINIBAND = Link("InfiniBand", 45e9, 30e-6)  # NDR: 400 Gbit/s a GPU
LOOPBACK = Link("gloo", 1e9, 1e-3)
LINKS = {"nccl": NVLINK, "nccl between machines": INFINIBAND, "gloo": LOOPBACK}  # by `Group.link`

# `heads` takes so many times as long for its bytes, since it copies its rows before and after each exchange: on four
# H100 8.8 ms for ogbn-products, where halo takes 8.1 with twice the bytes.
HEADS_COPIES = 2.0
# Bytes of keys and values that attention gathers in a second: from the L2 cache (ego-twitter), and the others
# (ogbn-products). Of ogbn-arxiv, in between, they predict 0.11 ms; 0.09 ms were measured.
L2_BYTES, FROM_L2, FROM_MEMORY = 50e6, 13.9e12, 3.0e12
PASS_SECONDS = 0.2e-3  # of a layer on ranks, beside attention and exchange


@dataclass(frozen=True)
class Choice:
    """The scheme of a run, and the reason."""

    scheme: str
    reason: str


@dataclass(frozen=True)
class Traffic:
    """Traffic of one layer's forward pass.

    Attributes:
        received, sent: [P] bytes of each rank.
        collectives: number of consecutive collectives.
        copies: factor of the time of the bytes.
    """

    received: tuple[int, ...]
    sent: tuple[int, ...]
    collectives: int
    copies: float = 1.0

    def seconds(self, link: Link) -> float:
        """Predicted time of the busiest rank."""
        return self.collectives * link.latency + self.copies * max(*self.received, *self.sent) / link.bandwidth


def share_of_heads(num_heads: int, num_ranks: int) -> list[int]:
    """Heads of each rank in scheme "heads"; they differ by at most one."""
    return [num_heads // num_ranks + (rank < num_heads % num_ranks) for rank in range(num_ranks)]


def traffic(
    scheme: str, rows: Sequence[int], halo: Sequence[Sequence[int]], num_heads: int, head_bytes: int
) -> Traffic:
    """Bytes of a scheme.

    Args:
        rows: [P] rows of each rank.
        halo: [P, P] rows that rank p receives from rank q.
        head_bytes: bytes of one row of one head.
    """
    num_ranks, row_bytes = len(rows), num_heads * head_bytes
    if scheme == "halo":
        received = [2 * row_bytes * sum(counts) for counts in halo]
        sent = [2 * row_bytes * sum(counts[rank] for counts in halo) for rank in range(num_ranks)]
        return Traffic(tuple(received), tuple(sent), 1)
    if scheme == "allgather":
        each = 2 * row_bytes * (num_ranks - 1) * max(rows)
        return Traffic((each,) * num_ranks, (each,) * num_ranks, 1)
    heads = share_of_heads(num_heads, num_ranks)
    others = [(sum(rows) - own) * share * head_bytes for own, share in zip(rows, heads, strict=True)]
    mine = [own * (num_heads - share) * head_bytes for own, share in zip(rows, heads, strict=True)]
    received = [3 * other + own for other, own in zip(others, mine, strict=True)]
    sent = [3 * own + other for other, own in zip(others, mine, strict=True)]
    return Traffic(tuple(received), tuple(sent), 2, HEADS_COPIES)


def choose_scheme(scheme: str, partition: Partition, num_heads: int, head_dim: int, itemsize: int, link: str) -> Choice:
    """Check the scheme; for "auto" choose the one with the least predicted time.

    Args:
        scheme: "auto" or one of SCHEMES.
        head_dim, itemsize: columns of a head, and bytes of an element.
        link: a key of LINKS.

    Raises:
        ValueError: no such scheme, or more ranks than heads with "heads".
    """
    if scheme not in ("auto", *SCHEMES):
        raise ValueError(f"scheme: got {scheme!r}; allowed are auto, {', '.join(SCHEMES)}")
    num_ranks = partition.num_parts
    if scheme == "heads" and num_heads < num_ranks:
        raise ValueError(
            f"scheme: got 'heads' with {num_heads} heads on {num_ranks} ranks; each rank needs a head: take 'halo' or "
            "'auto'"
        )
    if scheme != "auto":
        return Choice(scheme, "as asked")
    connection = LINKS[link]
    able = [name for name in SCHEMES if name != "heads" or num_heads >= num_ranks]
    seconds = {
        name: traffic(name, partition.rows, partition.halo, num_heads, head_dim * itemsize).seconds(connection)
        for name in able
    }
    best = min(able, key=seconds.__getitem__)
    shown = ", ".join(f"{name} {1e6 * seconds[name]:.0f} µs" for name in able)
    return Choice(best, f"predicted for a layer's exchange over {connection.name}: {shown}")


def one_gpu_is_faster(partition: Partition, num_heads: int, head_dim: int, itemsize: int, link: str) -> str | None:
    """Why one GPU is predicted to compute a layer faster than all ranks; None if it is not, and on CPUs.

    Args:
        head_dim, itemsize, link: as of `choose_scheme`.
    """
    if link == "gloo":
        return None
    row_bytes = 2 * num_heads * head_dim * itemsize  # of a key and a value

    def seconds(edges: int, rows: int, columns: int) -> float:
        cached = min(1.0, L2_BYTES / max(columns * row_bytes, 1))
        gather = edges * (cached / FROM_L2 + (1 - cached) / FROM_MEMORY)
        return row_bytes * (gather + EDGES_PER_ROW * rows / FROM_MEMORY)

    one = seconds(partition.num_edges, partition.num_nodes, partition.num_nodes)
    parts = zip(partition.edges, partition.rows, map(sum, partition.halo), strict=True)
    slowest = max(seconds(edges, rows, rows + halo) for edges, rows, halo in parts)
    exchange = traffic("halo", partition.rows, partition.halo, num_heads, head_dim * itemsize).seconds(LINKS[link])
    several = slowest + exchange + PASS_SECONDS
    if several < one:
        return None
    return f"predicted for a layer: one GPU {1e6 * one:.0f} µs, {partition.num_parts} ranks {1e6 * several:.0f} µs"
