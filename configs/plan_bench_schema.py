"""Configuration of `scripts/bench_plans.py`: graphs, inputs that plans are made for, measurement."""

from typing import Annotated

from pydantic import Field, field_validator

from configs.bench_schema import SHAPE, BenchDataConfig, Names, Shape
from configs.schema import MAX_HEAD_DIM, Section, check_choice


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
        for shape in shapes:
            match = SHAPE.fullmatch(shape)
            if not match or int(match[2]) > MAX_HEAD_DIM or shapes.count(shape) > 1:
                raise ValueError(
                    f"plan.shapes = {[*shapes]}: got {shape!r}; heads x head dimension is needed, such as 8x16, with a "
                    f"head dimension up to {MAX_HEAD_DIM}, each once"
                )
        return shapes

    @property
    def head_shapes(self) -> tuple[Shape, ...]:
        return tuple(Shape(*map(int, SHAPE.fullmatch(shape).groups())) for shape in self.shapes)


class PlanMeasureConfig(Section):
    """Settings that all cells share. Its `sha` is the `config_sha` of a row."""

    repeats: int = Field(default=200, ge=10)  # timed calls
    seconds: Annotated[float, Field(gt=0)] = 2.0  # a call is not repeated after this time


class PlanBenchConfig(Section):
    data: BenchDataConfig
    plan: PlanConfig = PlanConfig()
    measure: PlanMeasureConfig = PlanMeasureConfig()
