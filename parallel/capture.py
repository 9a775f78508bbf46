"""CUDA graphs of passes that exchange rows between ranks.

NCCL's kernels are nodes of a graph like any other; the warm-up connects the ranks before. All ranks capture the same
passes in the same order, and replay them together.
"""

from collections.abc import Callable

from fused3s.runtime.cuda_graph import CapturedGraph, CaptureError, Result
from parallel.group import Group, all_values


def capture_together(make: Callable[[], CapturedGraph[Result]], group: Group) -> CapturedGraph[Result]:
    """`make()` on every rank: all ranks get their CUDA graph, or none does.

    The end of `parallel.ranks` frees the graph: NCCL's communicator cannot end before.

    Args:
        make: captures a pass in a CUDA graph. A capture waits for no other rank; only its warm-up does.

    Raises:
        CaptureError: on all ranks, if one of them cannot capture; the text names its number and the reason.
    """
    captured, reason = None, ""
    if group.through_host:
        reason = "gloo exchanges rows through host memory"
    else:
        try:
            captured = make()
        except CaptureError as error:
            reason = str(error)
    reasons = all_values(group, reason)
    for rank, reason in enumerate(reasons):
        if reason:
            raise CaptureError(f"rank {rank}: {reason}")
    group.graphs.add(captured)
    return captured
