"""CUDA graphs of passes that exchange rows between ranks.

NCCL's kernels are nodes of a graph like any other; the warm-up connects the ranks before. All ranks capture the same
passes in the same order, and replay them together.
"""

from collections.abc import Callable

from fused3s.runtime.cuda_graph import CapturedGraph, CaptureError, Result
from parallel.group import Group, all_values


def capture_together(make: Callable[[], CapturedGraph[Result]], group: Group) -> CapturedGraph[Result]:
    """`make()`, which captures a pass, on every rank: all ranks get their CUDA graph, or none does. A capture waits for
    no other rank; only its warm-up does. The end of `parallel.ranks` frees the graph, and NCCL's communicator then.

    Raises:
        CaptureError: on all ranks, if one of them cannot capture; the text names its number and the reason.
    """
    captured, reason = None, "gloo exchanges rows through host memory" if group.through_host else ""
    if not reason:
        try:
            captured = make()
        except CaptureError as error:
            reason = str(error)
    for rank, of_rank in enumerate(all_values(group, reason)):
        if of_rank:
            raise CaptureError(f"rank {rank}: {of_rank}")
    group.graphs.add(captured)
    return captured
