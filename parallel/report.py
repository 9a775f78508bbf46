"""What a run on several ranks says of its partition."""

from collections.abc import Sequence

from parallel.cost_model import Choice
from parallel.group import Group
from parallel.part import Part


def partition_lines(part: Part, group: Group, choice: Choice) -> dict[str, str]:
    """Lines of a report: ranks, partition, halo and the scheme of the exchange, each with its reason."""
    found = part.partition
    method = "METIS" if found.method == "metis" else "contiguous rows (METIS cuts fewer edges, and needs pymetis)"
    halo = [sum(counts) for counts in found.halo]
    boundary = [rows - interior for rows, interior in zip(found.rows, found.interior, strict=True)]
    nodes = max(found.num_nodes, 1)
    return {
        "ranks": f"{group.size} over {group.link}, rank 0 on {group.device}",
        "partition": f"{method}, in {part.folder}",
        "of each rank": f"{_range(found.rows)} rows, {_range(found.edges)} edges",
        "boundary rows": f"{_range(boundary)} of each rank use columns of other ranks",
        "halo columns": f"{_range(halo)} of each rank, at most {max(halo) / nodes:.1%} of all rows",
        "exchange": f"{choice.scheme} ({choice.reason})",
    }


def _range(counts: Sequence[int]) -> str:
    return f"{min(counts):,} to {max(counts):,}"
