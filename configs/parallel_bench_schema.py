"""Configuration of `scripts/bench_parallel.py`: graphs, their partitions, shapes of attention, measurement."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from configs.bench_schema import BenchDataConfig, ShapesConfig
from configs.schema import Section, check_choice

Ranks = Annotated[tuple[Annotated[int, Field(ge=2, le=1024)], ...], Field(min_length=1, strict=False)]


class PartitionConfig(Section):
    """Partitions, kept below data.root/parts. Under torchrun the number of ranks is that of the processes."""

    ranks: Ranks = (2, 4)
    method: Literal["metis", "contiguous"] = "metis"


class AttentionConfig(ShapesConfig):
    """Attention of one block; the scale is 1/sqrt(head dimension)."""

    section = "attention"

    backend: str = "fused3s"
    dtype: Literal["float16", "bfloat16", "float32"] = "float16"

    @field_validator("backend")
    @classmethod
    def _backend_known(cls, backend: str) -> str:
        from baselines import REGISTRY  # on use: `import configs` stays light

        check_choice("attention.backend", backend, [name for name, one in REGISTRY.items() if one.writes_lse])
        return backend


class MeasureConfig(Section):
    """Settings that all measurements share."""

    repeats: int = Field(default=30, ge=3, le=1_000_000)


class ParallelBenchConfig(Section):
    data: BenchDataConfig
    partition: PartitionConfig = PartitionConfig()
    attention: AttentionConfig = AttentionConfig()
    measure: MeasureConfig = MeasureConfig()
