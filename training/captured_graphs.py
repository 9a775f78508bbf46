"""Steps on batches of graphs as CUDA graphs."""

from collections.abc import Callable

from torch import Tensor

from data.csr_batches import BatchSize
from fused3s.runtime.cuda_graph import CapturedGraph, capture
from training.padded_batches import PaddedBatches, Room
from training.step import Step
from training.tasks import Batch, GraphsBatch, GraphsTask


class CapturedGraphs:
    """`Step` on batches of graphs as two CUDA graphs, for a step and for an evaluation. Each assembles a padded batch,
    plans its attention and computes it; its only input are the ids of the graphs.

    Larger batches run eagerly. Dropout masks differ from those of an eager step, whose batches have other shapes.

    Args:
        make_room: a plan with room for batches of a size, with its backward pass if the second argument is True.

    Attributes:
        size: padded size of the batches of a step.
        num_eager: number of steps that ran eagerly.

    Raises:
        CaptureError: no refillable plan supports the model's heads, or a layer waits for the GPU.
    """

    def __init__(self, step: Step, task: GraphsTask, make_room: Callable[[BatchSize, bool], Room]) -> None:
        self.step, self.num_eager = step, 0
        graphs, model, train = task.graphs, step.working.model, task.ids["train"].numpy()
        self.size = graphs.likely_size(train, task.batch_size)
        evaluated = graphs.largest_size([*task.order("valid", None), *task.order("test", None)])
        self._train = PaddedBatches(graphs, self.size, model, make_room(self.size, True))
        self._evaluation = PaddedBatches(graphs, evaluated, model, make_room(evaluated, False))
        self._task = task
        self._train.load(train[:1])  # any that fits
        self._captured_step: CapturedGraph[Tensor] = step.captured(lambda: step(self._batch(self._train)))
        self._captured_evaluation: CapturedGraph[Tensor] = capture(
            lambda: step.evaluate(self._batch(self._evaluation)), step.device
        )

    def __call__(self, batch: GraphsBatch) -> Tensor:
        if not self._train.load(batch.ids):
            self.num_eager += 1
            return self.step(batch)
        return self._captured_step.replay()

    def evaluate(self, batch: GraphsBatch) -> Tensor:
        self._evaluation.load(batch.ids)
        rows = self._task.num_rows(batch.ids)
        return self._captured_evaluation.replay()[:rows].clone()  # the next replay overwrites it

    def _batch(self, padded: PaddedBatches) -> Batch:
        inputs = padded.inputs()
        return Batch(inputs, self._task.padded_labels(padded))
