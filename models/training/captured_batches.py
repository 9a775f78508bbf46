"""Steps on changing batches as CUDA graphs. The next batch is assembled and planned on a second stream meanwhile:

current stream   | step i, reads slot A               | step i + 1, reads slot B           | ...
second stream    | assembly of i + 1, writes slot B   | assembly of i + 2, writes slot A   | ...
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fused3s.runtime.cuda_graph import CapturedGraph, capture
from models.second_stream import SecondStream
from models.training.step import Step
from models.training.tasks import Batch, Task

Load = Callable[[Any], bool]  # queues the copy of a batch's ids; returns False, without a change, if it does not fit
Assemble = Callable[[], Batch]  # of what was loaded last, in tensors of one size


class Slot:
    """A padded batch, and the step on it, as two CUDA graphs.

    Args:
        shares: a slot whose step never runs at the same time.

    Attributes:
        held: the batch that was assembled last; None if it did not fit.
    """

    def __init__(self, step: Step, load: Load, assemble: Assemble, shares: "Slot | None") -> None:
        self._load, self.held = load, None
        self._assembly: CapturedGraph[Batch] = capture(assemble, step.device)
        self._assembly.replay()  # a capture computes nothing, and the next one begins with calls that read the batch
        self.step = step.captured(lambda: step(self._assembly.result), shares and shares.step)

    def take(self, batch: Any) -> bool:
        """Queue the assembly of a batch, if it fits."""
        fits = batch is not None and self._load(batch)
        self.held = batch if fits else None
        if fits:
            self._assembly.replay()
        return fits


class CapturedBatches:
    """`Step` on batches that are padded to one size. Larger batches run eagerly. Subclasses add `evaluate`.

    Args:
        make_slot: makes the functions of each slot, and loads a batch that fits.

    Attributes:
        num_eager: number of steps that ran eagerly.

    Raises:
        CaptureError: a layer waits for the GPU.
    """

    def __init__(self, step: Step, make_slot: Callable[[], tuple[Load, Assemble]]) -> None:
        self.step, self.num_eager = step, 0
        self._second = SecondStream(step.device)
        first = Slot(step, *make_slot(), None)
        self._slots = [first, Slot(step, *make_slot(), first)]

    def __call__(self, batch: Any, following: Any = None) -> Tensor:
        """The loss before the step, on the device; the batch `following` is assembled meanwhile."""
        slot, other = self._slots
        if slot.held is not batch and not slot.take(batch):
            self.num_eager += 1
            return self.step(batch)
        # The assembly first: each replay stores the offset of torch's random numbers, and that of a step advances it. A
        # later assembly would store the next step's offset while this step reads it.
        with self._second.work():
            other.take(following)
        loss = slot.step.replay()
        self._second.join()
        self._slots.reverse()
        return loss

    def predict(self, task: Task, part: str) -> tuple[Tensor, Tensor]:
        with self.step.evaluating():
            return task.predict(self.evaluate, part)
