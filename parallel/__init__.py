"""One graph over several ranks of torch.distributed: rows are partitioned, and attention stays exact.

See docs/several-gpus.md.

    torchrun --nproc-per-node 4 program.py

    with ranks() as group:  # one process per GPU
        part = scatter(group, partition_graph(matrix, group.size) if group.is_first else None)
        attention = plan_part_attention(part, group, dtype=..., head_dim=64, num_heads=2)
        out = attention(q, k, v)  # [rows of this part, H, d], each

A rank owns the rows of its part; the columns that they use and that other ranks own are its halo.
"""

from parallel.attention import PartAttention, plan_part_attention
from parallel.collectives import gather_rows, scatter
from parallel.group import Group, all_values, check_agreement, on_first_rank, ranks
from parallel.partition import Part, PartitionError, partition_graph

__all__ = [
    "Group",
    "Part",
    "PartAttention",
    "PartitionError",
    "all_values",
    "check_agreement",
    "gather_rows",
    "on_first_rank",
    "partition_graph",
    "plan_part_attention",
    "ranks",
    "scatter",
]
