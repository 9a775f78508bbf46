"""Schema of a configuration: five frozen sections, no unknown keys, no silent conversion of types.

A YAML file states only the values that it changes; the defaults are below, and those of runtime.warmup and
runtime.repeats in the data set's registry entry. Whether a configuration is valid depends on nothing but its values:
the machine is checked by `models.machine`, files when they are read.
"""

import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

import data

MOST_GRAPHS = 10**9  # of a batch, and batches
BATCH_NODES = 200_000  # of a batch that fills a GPU
MAX_HEAD_DIM = 256  # largest head dimension that the attention kernels hold in registers
MIN_DIM = 4  # the readout has a layer of width dim / 4

Count = Annotated[int, Field(ge=1, le=MOST_GRAPHS)]
Passes = Annotated[int, Field(ge=1, le=1_000_000)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Section(BaseModel):
    # strict: "4" is not 4 and 1 is not true, so that a typo is an error and not a conversion.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def sha(self) -> str:
        """Twelve hexadecimal digits of the resolved values, independent of the file or override they came from."""
        return digits(self.model_dump(mode="json"))

    def changed(self, name: str, *keys: str) -> Iterator[tuple[str, Any]]:
        """Keys of this section, called `name`, that do not have their default: "name.key = value", and the default."""
        for key in keys:
            value, default = getattr(self, key), type(self).model_fields[key].default
            if value != default:
                yield f"{name}.{key} = {value!r}", default


def digits(values: Any) -> str:
    """Twelve hexadecimal digits of a hash of JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def did_you_mean(word: str, allowed: Sequence[str]) -> str:
    """A hint such as " did you mean 'cora'?" for a misspelt word; empty if no allowed word is close."""
    close = difflib.get_close_matches(word.lower(), allowed, n=1, cutoff=0.6)
    return f" did you mean {close[0]!r}?" if close else ""


def check_choice(key: str, value: str, allowed: Sequence[str], also: str = "") -> None:
    """Raise a ValueError that names the key, the value and the allowed ones, with what is allowed `also`."""
    if value not in allowed:
        hint = did_you_mean(value, allowed)
        raise ValueError(f"{key} = {value!r}: not known;{hint} allowed are {', '.join(allowed)}{also}")


def check_label(key: str, name: str) -> None:
    """Raise a ValueError unless a name can be part of a file's name."""
    if name in ("", ".", "..") or not name.isprintable() or set(name) & set("/\\") or len(name.encode()) > 200:
        raise ValueError(
            f"{key} = {name!r}: it names files, so that it must be printable, of 1 to 200 bytes, without / and \\; the "
            "place of a file of your own is data.path"
        )


def refuse(problems: Iterable[str | None]) -> None:
    """Raise a ValueError of all problems, if there are any."""
    if found := [problem for problem in problems if problem]:
        raise ValueError("; ".join(found))


def _label(name: str) -> str:
    check_label("data.name", name)
    return name


def _backend(name: str) -> str:
    if name != "auto":
        from bench.baselines import REGISTRY  # on use: it imports torch and the kernels

        check_choice("attention.backend", name, ("auto", *REGISTRY))
    return name


class DataConfig(Section):
    """The graph and its source (see `data.load`)."""

    name: Annotated[str, AfterValidator(_label)]
    source: Literal["auto", "official", "file", "synthetic"] = "auto"
    root: str = Field(default="datasets", min_length=1)  # downloads go here; relative to the current directory
    path: Annotated[str, Field(min_length=1)] | None = (
        None  # the user's own graph file; without it, source: file reads <root>/<name>.npz
    )
    # Graphs per batch, for data sets of many small graphs; auto: about 200,000 nodes, for batches: all, whose default
    # it is. With training.sampler: neighbor training nodes per batch.
    batch_size: Count | Literal["auto"] = 1024
    batches: Count | Literal["all"] = 1  # batches that inference goes over; training goes over all
    order: Literal["dataset", "random"] = "dataset"  # order in which graphs are taken
    split: Literal["train", "val", "test"] | None = None  # null: the choice of the published run
    self_loops: bool = False  # add those that are missing: each node attends to itself

    @model_validator(mode="before")
    @classmethod
    def _batch_size_of_all(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and settings.get("batches") == "all":
            return {"batch_size": "auto"} | settings
        return settings

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        source = f"data.source = {self.source!r}"
        if self.source in ("official", "synthetic") and self.path is not None:
            raise ValueError(f"{source} and data.path = {self.path!r}: only file and auto read a path")
        collection = True
        if not self.reads_file:
            also = "; a file of your own has any name, with data.path or data.source: file"
            check_choice("data.name", self.name, tuple(data.names()), also)
            collection = data.info(self.name).num_graphs is not None
        if self.batch_size == "auto" and self.batches != "all":
            raise ValueError(f"data.batch_size = 'auto' and data.batches = {self.batches}: auto needs batches: all")
        if self.batches == "all" and self.source == "synthetic":
            raise ValueError(f"data.batches = 'all' and {source}: a surrogate needs a number of batches")
        if not collection:
            self._refuse(("batches", "order", "split"), f"data.name = {self.name!r}: it is a single graph")
        elif self.source == "synthetic":
            self._refuse(("order", "split"), f"{source}: a surrogate has neither an order nor splits")
        elif self.reads_file:
            self._refuse(("split",), f"{source}, data.path = {self.path!r}: a file has no splits")
        return self

    def _refuse(self, keys: Sequence[str], why: str) -> None:
        """Refuse values of these keys that are not their defaults."""
        refuse(
            f"{given} and {why}; only {'null' if default is None else default} is allowed"
            for given, default in self.changed("data", *keys)
        )

    @property
    def reads_file(self) -> bool:
        """Whether the graph is a file of the user's, which may have any name."""
        return self.source == "file" or self.path is not None

    def graphs_per_batch(self, num_graphs: int, num_nodes: int) -> int:
        """batch_size; "auto": batches of about BATCH_NODES nodes, and of as many graphs each."""
        if self.batch_size != "auto":
            return self.batch_size
        return -(-num_graphs // max(1, round(num_nodes / BATCH_NODES)))

    def load_arguments(self) -> dict[str, Any]:
        """Arguments of `data.load` for the graphs of all batches, as far as this section has them."""
        graphs = None if self.batches == "all" else self.batches * self.batch_size
        return self.model_dump(exclude={"batches"}) | {"batch_size": graphs}


OF_BLOCKS = ("norm", "pos_enc", "random_walk", "edge_features")  # keys of the Graph Transformer


class ModelConfig(Section):
    """Graph Transformer of Dwivedi and Bresson; the defaults are the paper's end-to-end model. Or a stack of attention
    layers (`models.conv_net`)."""

    kind: Literal["graph_transformer", "transformer_conv", "gat_conv", "gatv2_conv"] = "graph_transformer"
    dim: int = Field(default=128, ge=MIN_DIM, le=65_536)
    heads: int = Field(default=1, ge=1, le=65_536)
    out_heads: int = Field(default=1, ge=1, le=65_536)  # of the last layer, which averages them; not of blocks
    blocks: int = Field(default=10, ge=1, le=10_000)
    norm: Literal["layer", "batch"] = "layer"
    pos_enc: int = Field(default=0, ge=0, le=1_024)  # Laplacian eigenvectors added to the input; 0: none
    random_walk: int = Field(default=0, ge=0, le=1_024)  # steps of the random-walk encoding added to the input; 0: none
    edge_features: Literal["none", "bias", "stream"] = "none"  # form in which they enter (see models.graph_transformer)
    dropout: Probability = 0.0  # in training, on embedding, attention output and FFN
    attention_dropout: Probability = 0.0  # in training, on the softmax weights
    input_dropout: Probability = 0.0  # in training, on float features
    # Weights; auto: shipped ones where they fit, else random; null: random.
    checkpoint: Annotated[str, Field(min_length=1)] | None = "auto"

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @model_validator(mode="after")
    def _heads_divide_dim(self) -> Self:
        both = f"model.dim = {self.dim} and model.heads = {self.heads}"
        if self.dim % self.heads:
            raise ValueError(f"{both}: dim must be a multiple of heads")
        if self.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"{both}: a head has {self.head_dim} columns; allowed are 1 to {MAX_HEAD_DIM}")
        return self

    @model_validator(mode="after")
    def _keys_of_the_kind(self) -> Self:
        keys = ("out_heads",) if self.kind == "graph_transformer" else OF_BLOCKS
        refuse(
            f"{given} and model.kind = {self.kind!r}: only {default!r} is allowed"
            for given, default in self.changed("model", *keys)
        )
        return self


class AttentionConfig(Section):
    """Attention backend, and the precision of attention and of the layers around it."""

    backend: Annotated[str, AfterValidator(_backend)] = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"  # auto: float16 on a GPU, float32 on the CPU
    reorder: Literal["none", "communities", "auto"] = "none"  # order of the rows inside attention


class RuntimeConfig(Section):
    """Device, execution and number of passes. auto is the fastest available choice, which the report names."""

    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    cuda_graph: bool | Literal["auto"] = "auto"  # capture the forward pass once and replay it
    dense: Literal["auto", "plain", "compiled", "fused"] = "auto"  # non-attention layers (see models.fast)
    warmup: Passes = 3  # at least one: the first pass on a GPU may compile and tune
    repeats: Passes = 20
    seed: Seed = 0

    @model_validator(mode="before")
    @classmethod
    def _no_partition(cls, settings: Any) -> Any:
        """Of a config or weights from before 29 November 2026: auto and halo mean what several ranks do now."""
        if not isinstance(settings, dict) or "partition" not in settings:
            return settings
        if settings["partition"] not in ("auto", "halo"):
            raise ValueError(
                f"runtime.partition = {settings['partition']!r}: no longer a key, since several ranks always exchange "
                "the halo; leave it out (for one GPU, start without torchrun)"
            )
        return {name: value for name, value in settings.items() if name != "partition"}


class TrainingConfig(Section):
    """Optimiser, schedule and end of training. Weights and the optimiser's state are always float32."""

    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"  # sgd has a momentum of 0.9
    lr: float = Field(default=0.001, gt=0, le=1e6)  # the largest one of the schedule
    weight_decay: float = Field(default=0.01, ge=0, le=1e6)  # of matrices; biases and norms have none
    clip_norm: float | None = Field(default=1.0, gt=0, allow_inf_nan=False)  # bound of the gradient's norm; null: none
    schedule: Literal["constant", "cosine"] = "cosine"  # after the warm-up; cosine falls to 0 at the last epoch
    warmup_epochs: int = Field(default=0, ge=0)  # the learning rate rises linearly
    epochs: Passes = 200
    # neighbor: a step takes data.batch_size training nodes of one graph and at each hop up to fan_out edges of a node.
    sampler: Literal["none", "neighbor"] = "none"
    fan_out: Annotated[tuple[Count, ...], Field(strict=False, min_length=1)] = (15, 10, 5)
    patience: Passes | None = None  # stop after so many epochs without a better metric
    ema: Probability = 0.0  # decay, a step, of an average of the weights, which is validated and kept; 0: none
    loss: Literal["auto", "l1", "l2"] = "auto"  # auto: by the metric; l1 and l2 are of regression
    precision: Literal["auto", "float32", "float16", "bfloat16"] = "auto"  # auto: bfloat16 on a GPU, else float32
    seeds: Annotated[tuple[Seed, ...], Field(strict=False)] = ()  # a run each
    checkpoint_seconds: float = Field(default=30.0, ge=0, allow_inf_nan=False)  # time between two checkpoints

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if self.warmup_epochs >= self.epochs:
            both = f"training.warmup_epochs = {self.warmup_epochs} and training.epochs = {self.epochs}"
            raise ValueError(f"{both}: the warm-up must be shorter")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"training.seeds = {list(self.seeds)}: each seed once")
        if self.sampler == "none" and [*self.changed("training", "fan_out")]:
            raise ValueError(f"training.fan_out = {list(self.fan_out)} and training.sampler = 'none': use neighbor")
        return self


class Config(Section):
    data: DataConfig
    model: ModelConfig = ModelConfig()
    attention: AttentionConfig = AttentionConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    training: TrainingConfig = TrainingConfig()

    def load_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `data.load`: the graphs of all batches, with what the model reads of them."""
        return self.data.load_arguments() | {
            "seed": self.runtime.seed,
            "edge_features": self.model.edge_features != "none",
            "random_walk": self.model.random_walk,
        }

    @model_validator(mode="before")
    @classmethod
    def _passes_of_the_data_set(cls, settings: Any) -> Any:
        """Take defaults of runtime.warmup and runtime.repeats from the registry: large graphs get fewer passes."""
        match settings:
            case {"data": {"name": str(name)}} if name in data.names():
                entry, runtime = data.info(name), settings.get("runtime", {})
                if isinstance(runtime, dict):
                    return settings | {"runtime": {"warmup": entry.warmup, "repeats": entry.repeats} | runtime}
        return settings

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        name, form = self.data.name, self.model.edge_features
        problems = []
        if form != "none" and not self.data.reads_file and not data.info(name).edge_feature_dim:
            having = ", ".join(one for one in data.names() if data.info(one).edge_feature_dim)
            problems.append(f"model.edge_features = {form!r} and data.name = {name!r}: these have them: {having}")
        if self.model.kind != "graph_transformer" and self.runtime.dense in ("fused", "compiled"):
            problems.append(
                f"runtime.dense = {self.runtime.dense!r} and model.kind = {self.model.kind!r}: it is of the Graph "
                "Transformer's blocks; use auto or plain"
            )
        if self.model.kind != "graph_transformer" and not self.data.reads_file and data.info(name).task == "graph":
            problems.append(f"model.kind = {self.model.kind!r} and data.name = {name!r}: it classifies nodes")
        if self.data.self_loops and form != "none":
            problems.append(f"data.self_loops = True and model.edge_features = {form!r}: self-loops have no features")
        if self.runtime.dense == "fused" and self.model.norm != "layer":
            problems.append("runtime.dense = 'fused' and model.norm = 'batch': the fused kernel takes 'layer'")
        if self.data.batches != 1:
            several = f"data.batches = {self.data.batches!r}: batches differ in size"
            if self.runtime.dense == "compiled":
                problems.append(f"runtime.dense = 'compiled' and {several}; use auto, plain or fused")
            if self.runtime.cuda_graph is True and (self.model.pos_enc or form == "stream"):
                problems.append(
                    f"runtime.cuda_graph = True and {several}, and a CUDA graph for all of them takes models without "
                    "pos_enc and edge_features = 'stream'; use auto or false"
                )
        refuse(problems)
        return self


class TrainConfig(Config):
    """What `scripts/train.py` takes. attention.dtype, runtime.warmup and runtime.repeats are of inference only."""

    def load_arguments(self) -> dict[str, Any]:
        """As of `Config`, for all graphs: training makes the batches."""
        return super().load_arguments() | {"batch_size": None}

    @model_validator(mode="after")
    def _trains(self) -> Self:
        graphs, model = self.data, self.model
        wrong = {
            "runtime.dense = 'fused': this kernel is for inference; use auto": self.runtime.dense == "fused",
            f"model.checkpoint = {model.checkpoint!r}: training starts from random weights; allowed are auto and null "
            "(to continue a run: --resume)": model.checkpoint not in ("auto", None),
            "data.batch_size = 'auto': training needs a number of graphs": graphs.batch_size == "auto",
            f"data.order = {graphs.order!r}: training shuffles; use dataset": graphs.order != "dataset",
            f"data.split = {graphs.split!r}: training takes all splits; use null": graphs.split is not None,
        }
        if self.training.sampler == "neighbor":
            collection = not graphs.reads_file and data.info(graphs.name).num_graphs is not None
            wrong[f"training.sampler = 'neighbor' and data.name = {graphs.name!r}: a collection; use none"] = collection
            for given, default in model.changed("model", *OF_BLOCKS[1:]):
                wrong[f"{given} and training.sampler = 'neighbor': samples have none; use {default!r}"] = True
        refuse(problem for problem, is_wrong in wrong.items() if is_wrong)
        return self

    def recipe_sha(self) -> str:
        """Twelve hexadecimal digits that runs have in common whose scores may be averaged: of all values but seeds,
        paths, the machine, and what a row of results has in columns of its own (data, backend, precision).

        Defaults are left out, so that a new key changes nothing.
        """
        other = {"runtime": True, "data": {"root", "path", "source"}, "model": {"checkpoint"}}
        other |= {"attention": {"backend", "dtype"}, "training": {"precision", "seeds", "checkpoint_seconds"}}
        changed = self.model_dump(mode="json", exclude=other, exclude_defaults=True)
        return digits({section: values for section, values in changed.items() if values})

    @property
    def seeds(self) -> tuple[int, ...]:
        """training.seeds, or runtime.seed alone."""
        return self.training.seeds or (self.runtime.seed,)
