"""Configuration of `scripts/bench_training.py`: graphs, model, ways to run a step, measurement."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from configs.bench_schema import LIST, BenchDataConfig, Integers, check_once
from configs.end_to_end_schema import EndToEndMeasureConfig, check_model
from configs.schema import Section, check_choice

# How the layers between two attentions are computed; "+graph": the step is replayed as a CUDA graph.
Mode = Literal["plain", "compiled", "fused", "plain+graph", "compiled+graph", "fused+graph"]
Modes = Annotated[tuple[Mode, ...], LIST]


class TrainedModelConfig(Section):
    """The models: Graph Transformers with random weights, without dropout."""

    dim: int = Field(default=128, ge=4)
    heads: Integers = (1, 8)
    blocks: int = Field(default=10, ge=1)
    precision: Literal["float16", "bfloat16", "float32"] = "bfloat16"  # of the layers, over float32 weights

    @model_validator(mode="after")
    def _models_exist(self) -> Self:
        check_once("model.heads", self.heads)
        for heads in self.heads:
            check_model("model.heads", self.dim, heads, self.blocks)
        return self


class StepsConfig(Section):
    """Attention backends, and how a step with each of them is run."""

    modes: dict[str, Modes] = Field(min_length=1)

    @field_validator("modes")
    @classmethod
    def _backends_known(cls, modes: dict[str, Modes]) -> dict[str, Modes]:
        from baselines import REGISTRY

        for backend in modes:
            check_choice("run.modes", backend, tuple(REGISTRY))
            check_once(f"run.modes.{backend}", modes[backend])
        return modes


class TrainingBenchConfig(Section):
    data: BenchDataConfig
    run: StepsConfig
    model: TrainedModelConfig = TrainedModelConfig()
    measure: EndToEndMeasureConfig = EndToEndMeasureConfig()
