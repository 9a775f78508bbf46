"""What a configuration of `scripts/bench_end_to_end.py` may say: graphs, models, ways to run them, measurement."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from configs.bench_schema import BenchDataConfig, Names
from configs.schema import FUSED_DIMS, ModelConfig, RuntimeConfig, Section, check_choice

# How the dense part is computed (runtime.dense), and whether the pass is replayed as a CUDA graph.
Mode = Literal["plain", "compiled", "fused", "plain+graph", "compiled+graph", "fused+graph"]
Modes = Annotated[tuple[Mode, ...], Field(min_length=1, strict=False)]


class EndToEndModelConfig(Section):
    """The models; all else is `ModelConfig`'s default, as in the paper."""

    dims: Annotated[tuple[int, ...], Field(min_length=1, strict=False)] = FUSED_DIMS
    heads: int = Field(default=1, ge=1)
    blocks: int = Field(default=10, ge=1)

    @model_validator(mode="after")
    def _models_exist(self) -> Self:
        for dim in self.dims:
            ModelConfig(dim=dim, heads=self.heads, blocks=self.blocks)
        return self


class RunConfig(Section):
    """Which attention back ends, and how the model around each of them is run.

    Attributes:
        modes: by back end. A back end gets the precision that it computes in: see `bench.kernels.FLOAT32`.
        regions: back ends whose eager passes are also timed region by region.
        accuracy: back ends whose logits are also compared with float32, in float16 and bfloat16.
    """

    modes: dict[str, Modes] = Field(min_length=1)
    regions: Names = ("csr_unfused", "fused3s_paper", "fused3s")
    accuracy: Names = ("fused3s",)

    @field_validator("modes")
    @classmethod
    def _backends_known(cls, modes: dict[str, Modes]) -> dict[str, Modes]:
        import kernels

        for backend in modes:
            check_choice("run.modes", backend, tuple(kernels.list_backends("cpu")))
        return modes

    @property
    def cells_of_a_width(self) -> int:
        """Measurements for a model's width on a graph: every mode, and the accuracy where it is wanted."""
        return sum(len(modes) + (backend in self.accuracy) for backend, modes in self.modes.items())


class EndToEndMeasureConfig(Section):
    """How long a cell is measured for, and the seed. Its `sha` is the `config_sha` of a row."""

    repeats: int = Field(default=30, ge=1)  # passes of a cell, at most
    budget_ms: float = Field(default=150.0, gt=0)  # a slower cell gets fewer, at least one
    seed: int = RuntimeConfig.model_fields["seed"].default  # of the weights


class EndToEndConfig(Section):
    data: BenchDataConfig
    run: RunConfig
    model: EndToEndModelConfig = EndToEndModelConfig()
    measure: EndToEndMeasureConfig = EndToEndMeasureConfig()
