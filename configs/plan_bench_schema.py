"""Configuration of `scripts/bench_plans.py`: graphs, inputs that plans are made for, measurement."""

from pydantic import Field, field_validator

from configs.bench_schema import MOST_MS, MOST_REPEATS, SHAPE, BenchDataConfig, Names, Shape, check_shapes
from configs.schema import Section, check_choice


class PlanConfig(Section):
    """Plans: for float16 inputs of each shape."""

    backend: str = "fused3s"
    shapes: Names = ("1x128",)  # heads x head dimension

    @field_validator("backend")
    @classmethod
    def _backend_known(cls, backend: str) -> str:
        import kernels  # on use: `import configs` stays light

        check_choice("plan.backend", backend, tuple(kernels.list_backends("cpu")))
        return backend

    @field_validator("shapes")
    @classmethod
    def _shapes_fit(cls, shapes: tuple[str, ...]) -> tuple[str, ...]:
        check_shapes("plan.shapes", shapes)
        return shapes

    @property
    def head_shapes(self) -> tuple[Shape, ...]:
        return tuple(Shape(*map(int, SHAPE.fullmatch(shape).groups())) for shape in self.shapes)


class PlanMeasureConfig(Section):
    """Settings that all cells share. Its `sha` is the `config_sha` of a row."""

    repeats: int = Field(default=200, ge=10, le=MOST_REPEATS)  # timed calls
    # A call is not repeated after this time.
    seconds: float = Field(default=2.0, gt=0, le=MOST_MS / 1e3, allow_inf_nan=False)


class PlanBenchConfig(Section):
    data: BenchDataConfig
    plan: PlanConfig = PlanConfig()
    measure: PlanMeasureConfig = PlanMeasureConfig()
