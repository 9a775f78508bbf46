"""Configuration of `scripts/bench_layers.py`: workloads, the model around a layer, precisions, measurement."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from configs.bench_schema import (
    LIST,
    MOST,
    MOST_MS,
    MOST_REPEATS,
    SHAPE,
    Names,
    Shape,
    SourceConfig,
    check_once,
    check_shapes,
)
from configs.paths import check_label
from configs.schema import MOST_GRAPHS, Section, check_choice

MOST_LAYERS = 100
# Parameters and inputs in float32; the same under torch.autocast in bfloat16; both in bfloat16.
Precision = Literal["float32", "autocast", "bfloat16"]


class Workload(Section):
    """Inputs of a training step.

    A whole graph, the same in every step; or in every step another batch of small graphs of a collection; or in every
    step other seeds with sampled neighbours, one bipartite block for each layer.
    """

    graph: str = Field(min_length=1)  # data set
    edge_dim: int | None = Field(default=None, ge=1, le=16)  # columns of edge features, random numbers
    batch: int | None = Field(default=None, ge=1, le=MOST_GRAPHS)  # small graphs of a step
    seeds: int | None = Field(default=None, ge=1, le=10**9)
    # Neighbours that are drawn for each node, with replacement and without repeated edges; the seeds' come first, as
    # in PyG. One for each layer.
    fan_out: Annotated[
        tuple[Annotated[int, Field(ge=1, le=10**6)], ...], Field(max_length=MOST_LAYERS, strict=False)
    ] = ()
    captured: bool = False  # also timed: our step as one CUDA graph, see `bench.captured_loop`

    @property
    def is_new(self) -> bool:
        """Whether each step gets another graph."""
        return self.batch is not None or self.seeds is not None


class LayersDataConfig(SourceConfig):
    """Workloads by name. `batch_size` graphs of a collection are loaded, from which batches are drawn."""

    workloads: dict[str, Workload] = Field(min_length=1, max_length=MOST)
    only: Names | None = Field(default=None, strict=False)  # the workloads to measure; null: all

    @model_validator(mode="after")
    def _workloads_exist(self) -> Self:
        for name, workload in self.workloads.items():
            check_label("data.workloads", name)
            self._check_workload(f"data.workloads.{name}", workload)
        for name in self.only or ():
            check_choice("data.only", name, tuple(self.workloads))
        check_once("data.only", self.only or ())
        self.check_graphs("data.workloads", tuple({workload.graph: None for workload in self.workloads.values()}))
        return self

    def _check_workload(self, key: str, workload: Workload) -> None:
        check_label(f"{key}.graph", workload.graph)
        batch, seeds, fan_out = workload.batch, workload.seeds, [*workload.fan_out]
        if (seeds is None) != (not fan_out):
            raise ValueError(f"{key}: got seeds = {seeds} and fan_out = {fan_out}; one needs the other")
        if batch and seeds:
            raise ValueError(f"{key}: got batch = {batch} and seeds = {seeds}; one of the two is allowed")
        if workload.captured and not workload.is_new:
            raise ValueError(f"{key}.captured = true: batch or seeds are needed with it; a whole graph has one size")
        if batch and batch > self.batch_size:
            raise ValueError(
                f"{key}.batch = {batch}: data.batch_size = {self.batch_size} graphs are loaded; that many or fewer are "
                "allowed"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Workloads to measure, in the order of the file."""
        return tuple(name for name in self.workloads if self.only is None or name in self.only)


class LayersModelConfig(Section):
    """Layers of one shape, with LayerNorm and ReLU between them."""

    shape: str = "8x16"  # heads x columns of a head
    layers: int = Field(default=3, ge=1, le=MOST_LAYERS)  # sampled workloads have as many as fan-outs

    @field_validator("shape")
    @classmethod
    def _shape_fits(cls, shape: str) -> str:
        check_shapes("model.shape", (shape,))
        return shape

    @property
    def head_shape(self) -> Shape:
        return Shape(*map(int, SHAPE.fullmatch(self.shape).groups()))


class LayersRunConfig(Section):
    precisions: Annotated[tuple[Precision, ...], LIST] = ("float32", "autocast", "bfloat16")

    @field_validator("precisions")
    @classmethod
    def _precisions_once(cls, precisions: tuple[Precision, ...]) -> tuple[Precision, ...]:
        check_once("run.precisions", precisions)
        return precisions


class LayersMeasureConfig(Section):
    """Settings that all cells share. Its `sha` is the `config_sha` of a row."""

    pool: int = Field(default=8, ge=2, le=MOST)  # batches that are drawn before timing; steps take them in turn
    steps: int = Field(default=8, ge=1, le=MOST_REPEATS)  # most steps in a row, between two synchronisations
    repeats: int = Field(default=3, ge=1, le=MOST_REPEATS)  # rows of steps of each layer in a round, by turns
    # Of a row of steps: fewer of a slow step, four at least (or `steps`).
    budget_ms: float = Field(default=150.0, gt=0, le=MOST_MS, allow_inf_nan=False)
    seed: int = Field(default=0, ge=0, lt=2**63)  # of batches, features and weights


class LayersBenchConfig(Section):
    data: LayersDataConfig
    model: LayersModelConfig = LayersModelConfig()
    run: LayersRunConfig = LayersRunConfig()
    measure: LayersMeasureConfig = LayersMeasureConfig()
