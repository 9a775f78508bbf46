"""Configuration of `scripts/bench_end_to_end.py`: graphs, models, ways to run them, measurement."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from configs.bench_schema import BenchDataConfig, Names
from configs.schema import FUSED_DIMS, ModelConfig, RuntimeConfig, Section, check_choice

# How the non-attention layers are computed (runtime.dense); "+graph": the pass is replayed as a CUDA graph.
Mode = Literal["plain", "compiled", "fused", "plain+graph", "compiled+graph", "fused+graph"]
Modes = Annotated[tuple[Mode, ...], Field(min_length=1, strict=False)]


class EndToEndModelConfig(Section):
    """The models. Other settings have the defaults of `ModelConfig`, as in the paper."""

    dims: Annotated[tuple[int, ...], Field(min_length=1, strict=False)] = FUSED_DIMS
    heads: int = Field(default=1, ge=1)
    blocks: int = Field(default=10, ge=1)

    @model_validator(mode="after")
    def _models_exist(self) -> Self:
        for dim in self.dims:
            ModelConfig(dim=dim, heads=self.heads, blocks=self.blocks)
        return self


class RunConfig(Section):
    """Attention backends, and how the model around each of them is run.

    Attributes:
        modes: by backend. The precision of a backend is the one that it computes in, see `bench.runner.FLOAT32`.
        regions: backends whose eager passes are also timed region by region.
        accuracy: backends whose logits in float16 and bfloat16 are also compared with float32.
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


class EndToEndMeasureConfig(Section):
    """Length of the measurement of a cell, and the seed. Its `sha` is the `config_sha` of a row."""

    repeats: int = Field(default=30, ge=1)  # largest number of passes of a cell
    budget_ms: float = Field(default=150.0, gt=0)  # fewer passes for a slower cell, at least one
    seed: int = RuntimeConfig.model_fields["seed"].default  # of the weights


class EndToEndConfig(Section):
    data: BenchDataConfig
    run: RunConfig
    model: EndToEndModelConfig = EndToEndModelConfig()
    measure: EndToEndMeasureConfig = EndToEndMeasureConfig()
