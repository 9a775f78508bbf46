"""Configuration of `scripts/bench_kernels.py`: graphs, kernels, measurement."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from configs.paths import check_folder_name, check_label
from configs.schema import MAX_HEAD_DIM, MOST_GRAPHS, Section, did_you_mean

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

FLOAT32_BACKENDS = ("fused3s", "dfgnn_tiling", "csr_unfused")  # of bench/float32.py

REORDERED = "fused3s+reorder"  # backend fused3s with reorder="auto", see `kernels.formats.row_order`

MOST = 1_000  # entries of a list
MOST_HEADS = 65_535
MOST_REPEATS = 1_000_000
MOST_SCALE = 1e6
MOST_MS = 3_600_000.0  # of a time limit

LIST = Field(min_length=1, max_length=MOST, strict=False)  # YAML has lists and no tuples
Names = Annotated[tuple[str, ...], LIST]
Integers = Annotated[tuple[int, ...], LIST]

SHAPE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")  # heads x head dimension
NO_EDGES = "none"
# Kinds of edge data: none, a bias of [nnz] or of [nnz, H], features of R columns with weights for keys and values
# (low_rank_R), T types with a vector each (types_T).
PLAIN_EDGES = (NO_EDGES, "bias", "bias_per_head")
NUMBERED_EDGES = {"low_rank": 16, "types": 256}  # with the largest number
NUMBERED = re.compile(rf"({'|'.join(NUMBERED_EDGES)})_([1-9][0-9]{{0,4}})")


class Shape(NamedTuple):
    """Heads and columns of a head: "8x16"."""

    heads: int
    dim: int

    @property
    def width(self) -> int:
        """Columns of all heads."""
        return self.heads * self.dim

    def __str__(self) -> str:
        return f"{self.heads}x{self.dim}"


class SourceConfig(Section):
    """Where graphs come from, see `data.load`."""

    # No measurement is of a surrogate unless that was asked for.
    source: Literal["auto", "official", "file", "synthetic"] = "official"
    root: str = Field(default="datasets", min_length=1)  # relative to the current directory
    batch_size: int = Field(default=1024, ge=1, le=MOST_GRAPHS)  # graphs per batch of a collection

    @field_validator("root")
    @classmethod
    def _root_is_a_folder(cls, root: str) -> str:
        check_folder_name("data.root", root)
        return root

    def load(self, name: str) -> "LoadedGraph":
        """A graph without features, which kernels do not read. Errors are those of `data.load`."""
        import data

        return data.load(name, root=self.root, source=self.source, batch_size=self.batch_size, features=False)

    def check_graphs(self, key: str, names: tuple[str, ...]) -> None:
        """Raise a ValueError that names `key` for a graph that is neither registered nor a file of its own."""
        import data  # on use: `import configs` stays light

        if self.source != "file":
            here = [name for name in names if (Path(self.root) / f"{name}.npz").is_file()]
            _check_names(key, names, (*data.names(), *here))


class BenchDataConfig(SourceConfig):
    """Graphs and their source."""

    names: Names

    @field_validator("names")
    @classmethod
    def _names_are_labels(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            check_label("data.names", name)
        check_once("data.names", names)
        return names

    @model_validator(mode="after")
    def _names_known(self) -> Self:
        self.check_graphs("data.names", self.names)
        return self


class KernelConfig(Section):
    """Kernels. The input type of a backend is the one that it computes in, see `bench.runner`."""

    backends: Names  # of `baselines.REGISTRY`, SWITCHES or REORDERED
    dims: Integers = (64, 128, 256)  # of one head
    shapes: Annotated[Names | None, Field(strict=False)] = None  # in place of dims: heads x head dimension, "8x16"
    edges: Names = (NO_EDGES,)  # kinds of edge data
    # float16: for the backends that compute in it. input: the type that the backend computes in.
    out_dtype: Literal["float32", "float16", "input"] = "float32"
    # fixed: the sparse format is built once. rebuilt: at each call, from the CSR arrays on the GPU.
    plans: Annotated[tuple[Literal["fixed", "rebuilt"], ...], LIST] = ("fixed",)
    backward: bool = False  # time the backward pass, and the forward pass of training
    float32: bool = False  # time both passes of fused3s in float16 and float32, see bench/float32.py

    @field_validator("backends")
    @classmethod
    def _backends_known(cls, backends: tuple[str, ...]) -> tuple[str, ...]:
        from baselines import REGISTRY

        _check_names("kernel.backends", backends, (*REGISTRY, *SWITCHES, REORDERED))
        return backends

    @field_validator("plans")
    @classmethod
    def _plans_once(cls, plans: tuple[str, ...]) -> tuple[str, ...]:
        check_once("kernel.plans", plans)
        return plans

    @field_validator("dims")
    @classmethod
    def _dims_fit(cls, dims: tuple[int, ...]) -> tuple[int, ...]:
        for dim in dims:
            if not 1 <= dim <= MAX_HEAD_DIM:
                raise ValueError(f"kernel.dims = {list(dims)}: got {dim}; 1 to {MAX_HEAD_DIM} is allowed")
        check_once("kernel.dims", dims)
        return dims

    @field_validator("shapes")
    @classmethod
    def _shapes_fit(cls, shapes: tuple[str, ...] | None) -> tuple[str, ...] | None:
        check_shapes("kernel.shapes", shapes or ())
        return shapes

    @field_validator("edges")
    @classmethod
    def _edges_known(cls, edges: tuple[str, ...]) -> tuple[str, ...]:
        for kind in edges:
            name, number = edge_kind(kind)
            if not (name in PLAIN_EDGES if number is None else number <= NUMBERED_EDGES[name]):
                numbered = ", ".join(f"{name}_1 to {name}_{most}" for name, most in NUMBERED_EDGES.items())
                raise ValueError(
                    f"kernel.edges = {[*edges]}: got {kind!r}; allowed are {', '.join(PLAIN_EDGES)}, {numbered}"
                )
        check_once("kernel.edges", edges)
        return edges

    @model_validator(mode="after")
    def _dims_or_shapes(self) -> Self:
        if self.shapes is not None and "dims" in self.model_fields_set:
            raise ValueError(
                f"kernel.dims = {list(self.dims)} and kernel.shapes = {[*self.shapes]}: one of the two is allowed; "
                "the shape of one head of 64 columns is 1x64"
            )
        return self

    @model_validator(mode="after")
    def _backward_alone(self) -> Self:
        for name, is_set in (("backward", self.backward), ("float32", self.float32)):
            if is_set and (self.edges != (NO_EDGES,) or self.plans != ("fixed",)):
                raise ValueError(
                    f"kernel.{name} = true: kernel.edges = [none] and kernel.plans = [fixed] are needed with it"
                )
        if self.float32 and self.backward:
            raise ValueError("kernel.float32 = true times both passes: leave out kernel.backward")
        if self.float32 and not ("fused3s" in self.backends and {*self.backends} <= {*FLOAT32_BACKENDS}):
            raise ValueError(
                f"kernel.backends = {[*self.backends]}: kernel.float32 = true takes fused3s, and beside it some of "
                f"{', '.join(FLOAT32_BACKENDS[1:])}"
            )
        return self

    @property
    def bench(self) -> Literal["kernels", "heads", "edges", "backward", "float32"]:
        """Name of the benchmark: float32 beside float16, the backward pass, kinds of edge data, shapes of heads, or
        kernels with one head as in the paper."""
        if self.float32:
            return "float32"
        if self.backward:
            return "backward"
        if self.edges != (NO_EDGES,):
            return "edges"
        return "kernels" if self.shapes is None else "heads"

    @property
    def head_shapes(self) -> tuple[Shape, ...]:
        """Shapes to measure: `shapes`, or one head of each of `dims`."""
        if self.shapes is None:
            return tuple(Shape(1, dim) for dim in self.dims)
        return tuple(Shape(*map(int, SHAPE.fullmatch(shape).groups())) for shape in self.shapes)


class MeasureConfig(Section):
    """Settings that all cells share. Its `sha` is the `config_sha` of a row."""

    repeats: int = Field(default=30, ge=30, le=MOST_REPEATS)  # timed intervals; fewer of a kernel of over 10 ms
    # Factor of the scores: 1 in the paper; rsqrt_dim is 1/sqrt(head dimension), as in models.
    scale: Annotated[float, Field(ge=-MOST_SCALE, le=MOST_SCALE, allow_inf_nan=False)] | Literal["rsqrt_dim"] = 1.0

    def scale_of(self, dim: int) -> float:
        """Factor of the scores of heads of `dim` columns."""
        return dim**-0.5 if self.scale == "rsqrt_dim" else self.scale


class BenchConfig(Section):
    data: BenchDataConfig
    kernel: KernelConfig
    measure: MeasureConfig = MeasureConfig()


def edge_kind(kind: str) -> tuple[str, int | None]:
    """Name and number of a kind of edge data: ("low_rank", 11) of "low_rank_11", ("bias", None) of "bias"."""
    match = NUMBERED.fullmatch(kind)
    return (match[1], int(match[2])) if match else (kind, None)


def check_once(key: str, values: tuple[Any, ...]) -> None:
    """Raise a ValueError that names the values given twice."""
    if twice := [value for value in dict.fromkeys(values) if values.count(value) > 1]:
        raise ValueError(f"{key} = {list(values)}: {', '.join(map(repr, twice))} is given twice; once is allowed")


class ShapesConfig(Section):
    """A section with shapes of attention.

    Attributes:
        section: its key in the configuration, for messages.
    """

    section: ClassVar[str]
    shapes: Names = ("1x128",)  # heads x head dimension

    @field_validator("shapes")
    @classmethod
    def _shapes_fit(cls, shapes: tuple[str, ...]) -> tuple[str, ...]:
        check_shapes(f"{cls.section}.shapes", shapes)
        return shapes

    @property
    def head_shapes(self) -> tuple[Shape, ...]:
        return tuple(Shape(*map(int, SHAPE.fullmatch(shape).groups())) for shape in self.shapes)


def check_shapes(key: str, shapes: tuple[str, ...]) -> None:
    """Raise a ValueError that names the first entry that is no shape of heads, or comes twice."""
    for shape in shapes:
        match = SHAPE.fullmatch(shape)
        if not match or int(match[1]) > MOST_HEADS or int(match[2]) > MAX_HEAD_DIM:
            raise ValueError(
                f"{key} = {[*shapes]}: got {shape!r}; heads x head dimension is needed, such as 8x16, with up to "
                f"{MOST_HEADS} heads and a head dimension up to {MAX_HEAD_DIM}"
            )
    check_once(key, shapes)


def _check_names(key: str, names: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    problems = [f"{name!r} is given twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    unknown = [f"{name!r} is not known,{did_you_mean(name, allowed)}".rstrip(",") for name in set(names) - {*allowed}]
    if unknown:
        problems += [*sorted(unknown), f"allowed are {', '.join(allowed)}"]
    if problems:
        raise ValueError(f"{key} = {list(names)}: {'; '.join(problems)}")
