"""Steps on batches of graphs as CUDA graphs."""

from collections.abc import Callable

from torch import Tensor

from data.batches import BatchSize
from fused3s.runtime.cuda_graph import CapturedGraph, capture
from models.padded_batches import PaddedBatches, Room
from models.training.captured_batches import Assemble, CapturedBatches, Load
from models.training.step import Step
from models.training.tasks import Batch, GraphsTask, LazyBatch


class CapturedGraphs(CapturedBatches):
    """`CapturedBatches` of graphs, whose only input are the ids of the graphs. Another CUDA graph assembles, plans and
    evaluates a batch. Dropout masks differ from those of an eager step, whose batches have other shapes.

    Args:
        make_room: a plan with room for batches of a size, with its backward pass if the second argument is True.

    Attributes:
        size: padded size of the batches of a step.

    Raises:
        CaptureError: no refillable plan supports the model's heads, or a layer waits for the GPU.
    """

    def __init__(self, step: Step, task: GraphsTask, make_room: Callable[[BatchSize, bool], Room]) -> None:
        graphs, model, train = task.graphs, step.working.model, task.ids["train"].numpy()
        self.size = graphs.likely_size(train, task.batch_size)
        evaluated = graphs.largest_size([*task.order("valid", None), *task.order("test", None)])
        self._task, self._evaluated = task, PaddedBatches(graphs, evaluated, model, make_room(evaluated, False))

        def make_slot() -> tuple[Load, Assemble]:
            padded = PaddedBatches(graphs, self.size, model, make_room(self.size, True))
            padded.load(train[:1])  # any that fits
            return lambda batch: padded.load(batch.key), lambda: self._batch(padded)

        super().__init__(step, make_slot)
        self._evaluation: CapturedGraph[Tensor] = capture(
            lambda: step.evaluate(self._batch(self._evaluated)), step.device
        )

    def evaluate(self, batch: LazyBatch) -> Tensor:
        self._evaluated.load(batch.key)
        rows = self._task.graphs.num_rows(batch.key)
        return self._evaluation.replay()[:rows].clone()  # the next replay overwrites it

    def _batch(self, padded: PaddedBatches) -> Batch:
        inputs = padded.inputs()
        return Batch(inputs, self._task.padded_labels(padded))
