"""Configuration of `scripts/bench_end_to_end.py`: graphs, models, ways to run them, measurement."""

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from configs.bench_schema import LIST, MOST, MOST_MS, MOST_REPEATS, BenchDataConfig, Integers, check_once
from configs.schema import ModelConfig, RuntimeConfig, Section, check_choice

# How the non-attention layers are computed (runtime.dense); "+graph": the pass is replayed as a CUDA graph.
Mode = Literal["plain", "compiled", "fused", "plain+graph", "compiled+graph", "fused+graph"]
Modes = Annotated[tuple[Mode, ...], LIST]
Backends = Annotated[tuple[str, ...], Field(max_length=MOST, strict=False)]


class EndToEndModelConfig(Section):
    """The models. Other settings have the defaults of `ModelConfig`, as in the paper.

    Attributes:
        dtype: precision of everything outside attention, for all backends. A backend that computes in another type
            (see `bench.models.attention_dtype`) casts its inputs and its output.
    """

    dims: Integers = (64, 128, 256)
    heads: int = Field(default=1, ge=1)
    blocks: int = Field(default=10, ge=1)
    dtype: Literal["float16", "bfloat16", "float32"] = "float16"

    @model_validator(mode="after")
    def _models_exist(self) -> Self:
        check_once("model.dims", self.dims)
        for dim in self.dims:
            check_model("model.dims", dim, self.heads, self.blocks)
        return self


class RunConfig(Section):
    """Attention backends, and how the model around each of them is run.

    Attributes:
        modes: by backend.
        regions: backends whose eager passes are also timed region by region; may be empty.
        accuracy: backends whose logits in float16 and bfloat16 are also compared with float32; may be empty.
    """

    modes: dict[str, Modes] = Field(min_length=1)
    regions: Backends = ("csr_unfused", "fused3s_paper", "fused3s")
    accuracy: Backends = ("fused3s",)

    @field_validator("modes", "regions", "accuracy")
    @classmethod
    def _backends_known(cls, backends: Iterable[str], info: ValidationInfo) -> Iterable[str]:
        from baselines import REGISTRY

        for backend in backends:
            check_choice(f"run.{info.field_name}", backend, tuple(REGISTRY))
        check_once(f"run.{info.field_name}", tuple(backends))
        for backend, modes in backends.items() if isinstance(backends, dict) else ():
            check_once(f"run.modes.{backend}", modes)
        return backends


class EndToEndMeasureConfig(Section):
    """Length of the measurement of a cell, and the seed. Its `sha` is the `config_sha` of a row.

    A cell is timed in two rounds of passes, or in more until two agree, see `bench.timers.time_rounds`.
    """

    repeats: int = Field(default=10, ge=2, le=MOST_REPEATS)  # largest number of passes of a round
    # Of a round: fewer passes for a slower cell, at least one.
    budget_ms: float = Field(default=50.0, gt=0, le=MOST_MS, allow_inf_nan=False)
    seed: int = Field(default=RuntimeConfig.model_fields["seed"].default, ge=0, lt=2**63)  # of the weights


def check_model(key: str, dim: int, heads: int, blocks: int) -> None:
    """Raise a ValueError that names `key`, which holds `dim` or `heads`, if there is no such model."""
    try:
        ModelConfig(dim=dim, heads=heads, blocks=blocks)
    except ValidationError as error:
        details = error.errors()[0]
        reason = details["ctx"]["error"] if details["type"] == "value_error" else details["msg"]
        name = ".".join(["model", *map(str, details["loc"])])
        raise ValueError(f"{key}: with width {dim}, {heads} heads and {blocks} blocks: {name}: {reason}") from None


class EndToEndConfig(Section):
    data: BenchDataConfig
    run: RunConfig
    model: EndToEndModelConfig = EndToEndModelConfig()
    measure: EndToEndMeasureConfig = EndToEndMeasureConfig()
