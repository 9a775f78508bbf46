"""Configuration of `scripts/bench_kernels.py`: graphs, kernels, measurement."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from configs.schema import HEAD_DIM_STEP, MAX_HEAD_DIM, Section, did_you_mean

if TYPE_CHECKING:
    from data import LoadedGraph

# The paper's ablation: switches of the kernel `fused3s_paper`, one changed from each variant to the next.
VARIANTS = {
    "F3S_splitR": {"split_rows": True, "reordered": False, "permuted": False},
    "F3S_splitC": {"split_rows": False, "reordered": False, "permuted": False},
    "F3S_reorderRW": {"split_rows": False, "reordered": True, "permuted": False},
    "F3S_permuteQKV": {"split_rows": False, "reordered": True, "permuted": True},  # the same as fused3s_paper
}

# The alternative that the paper decided against: blocks share out the TCBs evenly instead of the row windows.
EDGE_PARALLEL = {
    "F3S_edgeParallel": {"split_rows": False, "reordered": False, "permuted": True, "edge_parallel": True},
}

SWITCHES = VARIANTS | EDGE_PARALLEL  # all entries that are `fused3s_paper` with switches of its own

REORDERED = "fused3s+reorder"  # backend fused3s with reorder="auto", see `kernels.formats.row_order`

Names = Annotated[tuple[str, ...], Field(min_length=1, strict=False)]  # YAML has lists and no tuples


class BenchDataConfig(Section):
    """Graphs and their source, see `data.load`."""

    names: Names
    source: Literal["auto", "official", "file", "synthetic"] = "auto"
    root: str = Field(default="datasets", min_length=1)  # relative to the current directory
    batch_size: int = Field(default=1024, ge=1)  # graphs per batch, for data sets of many small graphs

    @model_validator(mode="after")
    def _names_known(self) -> Self:
        import data  # on use: `import configs` stays light

        if self.source != "file":
            here = [name for name in self.names if (Path(self.root) / f"{name}.npz").is_file()]
            _check_names("data.names", self.names, (*data.names(), *here))
        return self

    def load(self, name: str) -> "LoadedGraph":
        """A graph without features, which kernels do not read. Errors are those of `data.load`."""
        import data

        return data.load(name, root=self.root, source=self.source, batch_size=self.batch_size, features=False)


class KernelConfig(Section):
    """Kernels. The input type of a backend is the one that it computes in, see `bench.runner`."""

    backends: Names  # of `kernels.list_backends()`, SWITCHES or REORDERED
    dims: Annotated[tuple[int, ...], Field(min_length=1, strict=False)] = (64, 128, 256)  # of a head
    out_dtype: Literal["float32", "float16"] = "float32"  # float16: for the backends that compute in it
    # fixed: the sparse format is built once. rebuilt: at each call, from the CSR arrays on the GPU.
    plans: Annotated[tuple[Literal["fixed", "rebuilt"], ...], Field(min_length=1, strict=False)] = ("fixed",)

    @field_validator("backends")
    @classmethod
    def _backends_known(cls, backends: tuple[str, ...]) -> tuple[str, ...]:
        import kernels

        _check_names("kernel.backends", backends, (*kernels.list_backends("cpu"), *SWITCHES, REORDERED))
        return backends

    @field_validator("plans")
    @classmethod
    def _plans_once(cls, plans: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(plans)) < len(plans):
            raise ValueError(f"kernel.plans = {list(plans)}: each of fixed and rebuilt is allowed once")
        return plans

    @field_validator("dims")
    @classmethod
    def _dims_fit(cls, dims: tuple[int, ...]) -> tuple[int, ...]:
        for dim in dims:
            if dim % HEAD_DIM_STEP or not HEAD_DIM_STEP <= dim <= MAX_HEAD_DIM:
                raise ValueError(
                    f"kernel.dims = {list(dims)}: {dim} is not among the multiples of {HEAD_DIM_STEP} "
                    f"up to {MAX_HEAD_DIM}"
                )
        return dims


class MeasureConfig(Section):
    """Settings that all cells share. Its `sha` is the `config_sha` of a row."""

    repeats: int = Field(default=30, ge=30)  # timed intervals; fewer for a kernel that takes over 10 ms
    scale: float = Field(default=1.0, allow_inf_nan=False)  # of the scores; 1 as in the paper


class BenchConfig(Section):
    data: BenchDataConfig
    kernel: KernelConfig
    measure: MeasureConfig = MeasureConfig()


def _check_names(key: str, names: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    problems = [f"{name!r} is given twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    unknown = [f"{name!r} is not known,{did_you_mean(name, allowed)}".rstrip(",") for name in set(names) - {*allowed}]
    if unknown:
        problems += [*sorted(unknown), f"allowed are {', '.join(allowed)}"]
    if problems:
        raise ValueError(f"{key} = {list(names)}: {'; '.join(problems)}")
