"""Configuration of `scripts/predict_scaling.py`: graphs and their partitions, shapes of attention, links."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from configs.bench_schema import BenchDataConfig, ShapesConfig
from configs.schema import Section, check_choice

MOST_RANKS = 65_536
Ranks = Annotated[tuple[Annotated[int, Field(ge=2, le=MOST_RANKS)], ...], Field(min_length=1, strict=False)]
Methods = Annotated[tuple[Literal["metis", "contiguous"], ...], Field(min_length=1, strict=False)]


class PartitionConfig(Section):
    """Partitions of each graph, made by `parallel.partition_graph` and kept below data.root/scaling."""

    ranks: Ranks = (2, 4, 8)
    methods: Methods = ("metis",)  # metis needs the graph in memory, 120 bytes an edge


class ScaleConfig(Section):
    """A graph that is not at hand: rows and edges of the registry, locality of the graph that was partitioned.

    Attributes:
        to: a registered name; null predicts for the graphs of data.names themselves.
        random: also predict for columns that are uniformly random, which no partition can improve.
    """

    to: str | None = None
    random: bool = False

    @field_validator("to")
    @classmethod
    def _graph_known(cls, to: str | None) -> str | None:
        import data  # on use: `import configs` stays light

        if to is not None:
            check_choice("scale.to", to, tuple(data.names()))
            if data.info(to).num_graphs is not None:
                raise ValueError(f"scale.to = {to!r}: a collection of small graphs; a single graph is needed")
        return to


class AttentionConfig(ShapesConfig):
    """Attention of one block, in float16. A shape needs recorded times of `fused3s` on the device."""

    section = "attention"

    device: str = Field(default="NVIDIA H200", min_length=1)


class LinkConfig(Section):
    """Link between the ranks. Rates are inputs, not measurements: `source` says where they are from.

    Attributes:
        gb_per_s: 10^9 bytes per second that a rank receives while it sends as many.
        latency_us: microseconds of a collective without data.
        most_ranks: largest number of ranks that it connects; null for any.
    """

    gb_per_s: Annotated[float, Field(gt=0, le=1e6, strict=False, allow_inf_nan=False)]
    latency_us: Annotated[float, Field(ge=0, le=1e6, strict=False, allow_inf_nan=False)]
    most_ranks: Annotated[int, Field(ge=2, le=MOST_RANKS)] | None = None
    source: str = Field(min_length=1)


class ScalingConfig(Section):
    data: BenchDataConfig
    partition: PartitionConfig = PartitionConfig()
    scale: ScaleConfig = ScaleConfig()
    attention: AttentionConfig = AttentionConfig()
    nvlink: LinkConfig
    infiniband: LinkConfig

    @model_validator(mode="after")
    def _random_is_of_a_scaled_graph(self) -> Self:
        if self.scale.random and self.scale.to is None:
            raise ValueError("scale.random = True and scale.to = None: name the graph with scale.to")
        return self

    def sha(self) -> str:
        """As in `Section`, of what is predicted: the folder and the source of the graphs do not count."""
        names = BenchDataConfig.model_construct(names=self.data.names)
        return super(ScalingConfig, self.model_copy(update={"data": names})).sha()

    @property
    def links(self) -> dict[str, LinkConfig]:
        """By the name in results."""
        return {"NVLink": self.nvlink, "InfiniBand": self.infiniband}
