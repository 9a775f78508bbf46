"""Steps on changing batches as CUDA graphs. The next batch is assembled and planned on a second stream meanwhile:

current stream   | step i, reads slot A               | step i + 1, reads slot B           | ...
second stream    | assembly of i + 1, writes slot B   | assembly of i + 2, writes slot A   | ...
"""

from typing import Any

from torch import Tensor

from fused3s.runtime.cuda_graph import CapturedGraph, capture
from models.second_stream import SecondStream
from models.training.step import Step
from models.training.tasks import Assemble, Batch, GraphsTask, Load, MakeRoom, Task


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
    """`Step` on batches that are padded to one size. Larger batches run eagerly. Another CUDA graph evaluates a batch.
    Dropout masks differ from those of an eager step, whose batches have other shapes.

    Args:
        task: batches of graphs, or samples.

    Attributes:
        size: padded size of the batches of a step.
        num_eager: number of steps that ran eagerly.

    Raises:
        CaptureError: no refillable plan supports the model's heads, or a layer waits for the GPU.
    """

    def __init__(self, step: Step, task: GraphsTask | Any, make_room: MakeRoom) -> None:
        self.step, self.num_eager, self.size = step, 0, task.likely_size()
        self._second = SecondStream(step.device)
        self._slots: list[Slot] = []
        for _ in range(2):
            shares = self._slots[0] if self._slots else None
            self._slots.append(Slot(step, *task.slot(self.size, make_room(self.size, True)), shares))
        self.evaluate = task.evaluation(step.evaluate, make_room)

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
