"""Configuration of `scripts/bench_plans.py`: graphs, inputs that plans are made for, measurement."""

from pydantic import Field, field_validator

from configs.bench_schema import MOST_MS, MOST_REPEATS, BenchDataConfig, ShapesConfig
from configs.schema import Section, check_choice


class PlanConfig(ShapesConfig):
    """Plans: for float16 inputs of each shape."""

    section = "plan"

    backend: str = "fused3s"

    @field_validator("backend")
    @classmethod
    def _backend_known(cls, backend: str) -> str:
        from baselines import REGISTRY  # on use: `import configs` stays light

        check_choice("plan.backend", backend, tuple(REGISTRY))
        return backend


class PlanMeasureConfig(Section):
    """Settings that all cells share. Its `sha` is the `config_sha` of a row."""

    repeats: int = Field(default=200, ge=10, le=MOST_REPEATS)  # timed calls
    # A call is not repeated after this time.
    seconds: float = Field(default=2.0, gt=0, le=MOST_MS / 1e3, allow_inf_nan=False)


class PlanBenchConfig(Section):
    data: BenchDataConfig
    plan: PlanConfig = PlanConfig()
    measure: PlanMeasureConfig = PlanMeasureConfig()
