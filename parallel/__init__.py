"""One graph over several ranks of torch.distributed: rows are partitioned, and attention stays exact.

See docs/several-gpus.md.

    torchrun --nproc-per-node 4 program.py

    with ranks() as group:                                       # one process per GPU
        part = load_part("parts/arxiv-4", group)                 # this rank's rows; made by scripts/partition.py
        attention = plan_part_attention(part, group, dtype=..., head_dim=64, num_heads=2)
        out = attention(q, k, v)                                 # [rows of this part, H, d], each

A rank owns consecutive rows of the partition's order: queries, keys, values and outputs. The columns that its rows use
and that other ranks own are its halo.
"""

from parallel.assignment import METHODS
from parallel.attention import PartAttention, plan_part_attention
from parallel.builder import partition_graph
from parallel.collectives import gather_rows, sum_in_rank_order
from parallel.cost_model import SCHEMES, Link
from parallel.errors import PartitionError
from parallel.group import Group, all_values, check_agreement, on_first_rank, ranks, shared_from_first_rank
from parallel.part import Part, Partition, load_part, load_partition
from parallel.source import GraphSource, source_from_csr, source_from_edges

__all__ = [
    "METHODS",
    "SCHEMES",
    "GraphSource",
    "Group",
    "Link",
    "Part",
    "PartAttention",
    "Partition",
    "PartitionError",
    "all_values",
    "check_agreement",
    "gather_rows",
    "load_part",
    "load_partition",
    "on_first_rank",
    "partition_graph",
    "plan_part_attention",
    "ranks",
    "shared_from_first_rank",
    "source_from_csr",
    "source_from_edges",
    "sum_in_rank_order",
]
