"""Schema of a configuration: five frozen sections, no unknown keys, no silent conversion of types.

A YAML file states only the values that it changes; the other values are the defaults below, and for runtime.warmup and
runtime.repeats those of the data set's registry entry. Properties of the data set (feature width, number of classes,
node or graph level) are not configured.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from configs.paths import check_folder_name, check_label

MOST_GRAPHS = 10**9  # of a batch, and batches
BATCH_NODES = 200_000  # of a batch that fills a GPU
MAX_HEAD_DIM = 256  # largest head dimension that the attention kernels hold in registers
MIN_DIM = 4  # the readout has a layer of width dim / 4
FUSED_DIMS = (64, 80, 96, 128, 160, 192, 256)  # widths that the fused dense block supports (see models.fast)


class Section(BaseModel):
    # strict: "4" is not 4 and 1 is not true, so that a typo is an error and not a conversion.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def sha(self) -> str:
        """Twelve hexadecimal digits of the resolved values, independent of the file or override they came from."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


class DataConfig(Section):
    """The graph and its source (see `data.load`)."""

    name: str = Field(min_length=1)
    source: Literal["auto", "official", "file", "synthetic"] = "auto"
    root: str = Field(default="datasets", min_length=1)  # downloads go here; relative to the current directory
    path: str | None = None  # the user's own graph file; without it, source: file reads <root>/<name>.npz
    # Graphs per batch, for data sets of many small graphs; auto: about 200,000 nodes, for batches: all, whose default
    # it is.
    batch_size: int | Literal["auto"] = 1024
    batches: int | Literal["all"] = 1  # batches that inference goes over; training goes over all
    order: Literal["dataset", "random"] = "dataset"  # order in which graphs are taken
    split: Literal["train", "val", "test"] | None = None  # null: the choice of the published run

    @field_validator("name")
    @classmethod
    def _name_is_a_label(cls, name: str) -> str:
        check_label("data.name", name)
        return name

    @field_validator("root")
    @classmethod
    def _root_is_a_folder(cls, root: str) -> str:
        check_folder_name("data.root", root)
        return root

    @model_validator(mode="before")
    @classmethod
    def _batch_size_of_all(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and settings.get("batches") == "all":
            return {"batch_size": "auto"} | settings
        return settings

    @field_validator("batch_size", mode="before")
    @classmethod
    def _batch_size_counted(cls, size: Any) -> Any:
        if size != "auto" and (type(size) is not int or not 1 <= size <= MOST_GRAPHS):
            raise ValueError(f"data.batch_size = {size!r}: allowed are 1 to {MOST_GRAPHS}, and auto")
        return size

    @field_validator("batches", mode="before")
    @classmethod
    def _batches_counted(cls, batches: Any) -> Any:
        if batches != "all" and (type(batches) is not int or not 1 <= batches <= MOST_GRAPHS):
            raise ValueError(f"data.batches = {batches!r}: allowed are 1, 2, 3, ... and all")
        return batches

    @model_validator(mode="after")
    def _batches_agree(self) -> Self:
        if self.batch_size == "auto" and self.batches != "all":
            raise ValueError(
                f"data.batch_size = 'auto' and data.batches = {self.batches!r}: auto is for batches: all; a number of "
                "graphs is needed"
            )
        return self

    @model_validator(mode="after")
    def _source_agrees(self) -> Self:
        if self.source in ("official", "synthetic") and self.path is not None:
            raise ValueError(
                f"data.source = {self.source!r} and data.path = {self.path!r}: this source reads no file; "
                "use data.source: file (or auto), or drop data.path"
            )
        if not self.reads_file and not (Path(self.root) / f"{self.name}.npz").is_file():
            check_choice("data.name", self.name, _dataset_names())
        self._check_selection(self.reads_file)
        return self

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

    def _check_selection(self, reads_file: bool) -> None:
        is_single = not reads_file and self.name in _dataset_names() and not _is_collection(self.name)
        for key, default in (("batches", 1), ("order", "dataset"), ("split", None)):
            if (value := getattr(self, key)) == default:
                continue
            against = None
            if is_single:
                against = f"data.name = {self.name!r}: a single graph"
            elif key == "batches":
                if self.source == "synthetic" and value == "all":
                    raise ValueError(
                        "data.batches = 'all' and data.source = 'synthetic': a surrogate is made for a number of "
                        "graphs; allowed are 1, 2, 3, ..."
                    )
            elif self.source == "synthetic":
                against = "data.source = 'synthetic': a surrogate has neither an order nor splits"
            elif reads_file and key == "split":
                file = f"data.path = {self.path!r}" if self.path else "data.source = 'file'"
                against = f"{file}: a file has no splits"
            if against:
                shown = "null" if default is None else repr(default)
                raise ValueError(f"data.{key} = {value!r} and {against}; only data.{key}: {shown} is allowed")


class ModelConfig(Section):
    """Graph Transformer of Dwivedi and Bresson; the defaults are the paper's end-to-end model."""

    dim: int = Field(default=128, ge=MIN_DIM, le=65_536)
    heads: int = Field(default=1, ge=1, le=65_536)
    blocks: int = Field(default=10, ge=1, le=10_000)
    norm: Literal["layer", "batch"] = "layer"
    pos_enc: int = Field(default=0, ge=0, le=1_024)  # Laplacian eigenvectors added to the input; 0: none
    edge_features: Literal["none", "bias", "stream"] = "none"  # form in which they enter (see models.graph_transformer)
    dropout: float = Field(default=0.0, ge=0, lt=1)  # in training, on embedding, attention output and FFN
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)  # in training, on the softmax weights
    input_dropout: float = Field(default=0.0, ge=0, lt=1)  # in training, on float features
    checkpoint: str | None = "auto"  # weights; auto: shipped ones where they fit, else random; null: random

    @field_validator("checkpoint")
    @classmethod
    def _checkpoint_named(cls, checkpoint: str | None) -> str | None:
        if checkpoint == "":
            raise ValueError("model.checkpoint = '': allowed are a file, auto, and null for random weights")
        return checkpoint

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @model_validator(mode="after")
    def _heads_divide_dim(self) -> Self:
        both = f"model.dim = {self.dim} and model.heads = {self.heads}"
        if self.dim % self.heads:
            raise ValueError(f"{both}: dim must be a multiple of heads")
        if self.head_dim > MAX_HEAD_DIM:
            raise ValueError(
                f"{both}: a head gets dim / heads = {self.head_dim} columns; allowed are 1 to {MAX_HEAD_DIM}"
            )
        return self


class AttentionConfig(Section):
    """Attention backend, and the precision of attention and of the layers around it."""

    backend: str = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"  # auto: float16 on a GPU, float32 on the CPU
    reorder: Literal["none", "communities", "auto"] = "none"  # order of the rows inside attention

    @field_validator("backend")
    @classmethod
    def _backend_known(cls, backend: str) -> str:
        check_choice("attention.backend", backend, _backend_names())
        return backend

    @model_validator(mode="after")
    def _backend_reorders(self) -> Self:
        if self.reorder != "none" and self.backend not in ("auto", *(able := _reordering_backends())):
            raise ValueError(
                f"attention.reorder = {self.reorder!r} and attention.backend = {self.backend!r}: only the backend "
                f"{', '.join(able)} reorders; use it (or auto), or attention.reorder: none"
            )
        return self


class RuntimeConfig(Section):
    """Device, execution and number of passes. auto is the fastest available choice, which the report names."""

    device: str = "auto"
    cuda_graph: Literal[True, False, "auto"] = "auto"  # capture the forward pass once and replay it
    dense: Literal["auto", "plain", "compiled", "fused"] = "auto"  # non-attention layers (see models.fast)
    warmup: int = Field(default=3, ge=1, le=1_000_000)  # at least one: the first pass on a GPU may compile and tune
    repeats: int = Field(default=20, ge=1, le=1_000_000)
    partition: Literal["auto", "halo", "heads", "allgather"] = "auto"  # of one graph on several GPUs (see parallel/)
    seed: int = Field(default=0, ge=0, lt=2**63)

    @field_validator("device")
    @classmethod
    def _device_known(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError(f"runtime.device = {device!r}: allowed are auto, cpu, cuda, and cuda:0, cuda:1, ...")
        return device


class TrainingConfig(Section):
    """Optimiser, schedule and end of training. Weights and the optimiser's state are always float32."""

    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"  # sgd has a momentum of 0.9
    lr: float = Field(default=0.001, gt=0, allow_inf_nan=False)  # the largest one of the schedule
    weight_decay: float = Field(default=0.01, ge=0, allow_inf_nan=False)  # of matrices; biases and norms have none
    clip_norm: float | None = Field(default=1.0, gt=0, allow_inf_nan=False)  # bound of the gradient's norm; null: none
    schedule: Literal["constant", "cosine"] = "cosine"  # after the warm-up; cosine falls to 0 at the last epoch
    warmup_epochs: int = Field(default=0, ge=0)  # the learning rate rises linearly
    epochs: int = Field(default=200, ge=1, le=1_000_000)
    patience: int | None = Field(default=None, ge=1, le=1_000_000)  # stop after so many epochs without a better metric
    precision: Literal["auto", "float32", "float16", "bfloat16"] = "auto"  # auto: bfloat16 on a GPU, else float32
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], Field(strict=False)] = ()  # a run each
    checkpoint_seconds: float = Field(default=30.0, ge=0, allow_inf_nan=False)  # time between two checkpoints

    @model_validator(mode="after")
    def _warmup_ends(self) -> Self:
        if self.warmup_epochs >= self.epochs:
            raise ValueError(
                f"training.warmup_epochs = {self.warmup_epochs} and training.epochs = {self.epochs}: the warm-up must "
                "be shorter"
            )
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"training.seeds = {list(self.seeds)}: each seed once")
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
        }

    @model_validator(mode="before")
    @classmethod
    def _passes_of_the_data_set(cls, settings: Any) -> Any:
        """Take defaults of runtime.warmup and runtime.repeats from the registry: large graphs get fewer passes."""
        if not isinstance(settings, dict):
            return settings
        section, runtime = settings.get("data"), settings.get("runtime", {})
        name = section.get("name") if isinstance(section, dict) else None
        if not isinstance(runtime, dict) or name not in _dataset_names():
            return settings
        return settings | {"runtime": _default_passes(name) | runtime}

    @model_validator(mode="after")
    def _graph_has_edge_features(self) -> Self:
        name, form = self.data.name, self.model.edge_features
        if form == "none" or self.data.reads_file or name not in _dataset_names():  # a file may hold any
            return self
        having = [one for one in _dataset_names() if _has_edge_features(one)]
        if name not in having:
            raise ValueError(
                f"model.edge_features = {form!r} and data.name = {name!r}: this data set has no edge features; these "
                f"have: {', '.join(having)}"
            )
        return self

    @model_validator(mode="after")
    def _runtime_fits(self) -> Self:
        problems = []
        if self.runtime.device == "cpu" and self.runtime.cuda_graph is True:
            problems.append("runtime.cuda_graph = True and runtime.device = 'cpu': only an NVIDIA GPU has CUDA graphs")
        if self.runtime.partition == "heads" and self.model.heads == 1:
            problems.append(
                "runtime.partition = 'heads' and model.heads = 1: each rank needs a head; allowed are auto, halo and "
                "allgather"
            )
        if self.runtime.dense == "fused":
            allowed = {
                "runtime.device": (self.runtime.device, self.runtime.device != "cpu", "an NVIDIA GPU"),
                "model.norm": (self.model.norm, self.model.norm == "layer", "'layer'"),
                "model.dim": (self.model.dim, self.model.dim in FUSED_DIMS, ", ".join(map(str, FUSED_DIMS))),
                "attention.dtype": (
                    self.attention.dtype,
                    self.attention.dtype != "float32",
                    "'auto', 'float16' and 'bfloat16'",
                ),
            }
            problems += [
                f"runtime.dense = 'fused' and {key} = {value!r}: the fused kernel takes {takes}"
                for key, (value, fits, takes) in allowed.items()
                if not fits
            ]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="after")
    def _backend_can_run(self) -> Self:
        name = self.attention.backend
        if name == "auto":
            return self
        problems = []
        if self.runtime.device == "cpu" and (reason := _unavailable_on_cpu(name)):
            problems.append(f"attention.backend = {name!r} and runtime.device = 'cpu': {reason}")
        if self.model.edge_features != "none" and name not in (able := _backends_with_edge_data()):
            problems.append(
                f"attention.backend = {name!r} and model.edge_features = {self.model.edge_features!r}: this backend "
                f"takes no edge data; allowed are auto, {', '.join(able)}"
            )
        if self.attention.dtype != "auto" and (reason := _unsupported(name, self.attention.dtype, self.model.head_dim)):
            problems.append(f"attention.backend = {name!r} and attention.dtype = {self.attention.dtype!r}: {reason}")
        if problems:
            raise ValueError("; ".join(problems))
        return self


class TrainConfig(Config):
    """What `scripts/train.py` takes. attention.dtype, runtime.warmup and runtime.repeats are of inference only."""

    def load_arguments(self) -> dict[str, Any]:
        """As of `Config`, for all graphs: training makes the batches."""
        return super().load_arguments() | {"batch_size": None}

    @model_validator(mode="after")
    def _trains(self) -> Self:
        problems = []
        if self.runtime.dense == "fused":
            problems.append(
                "runtime.dense = 'fused': this kernel is for inference; allowed are plain, compiled, and auto, which "
                "takes fused layers where they can run"
            )
        if self.model.checkpoint not in ("auto", None):
            problems.append(
                f"model.checkpoint = {self.model.checkpoint!r}: training starts from random weights; allowed are auto "
                "and null (to continue a run: --resume)"
            )
        if self.data.batch_size == "auto":
            problems.append("data.batch_size = 'auto': training needs a number of graphs")
        for key, default in (("order", "dataset"), ("split", None)):
            if (value := getattr(self.data, key)) != default:
                shown = "null" if default is None else default
                problems.append(f"data.{key} = {value!r}: training takes all splits; only {shown} is allowed")
        name, precision = self.attention.backend, self.training.precision
        if "auto" not in (name, precision) and (reason := _unsupported(name, precision, self.model.head_dim)):
            problems.append(f"attention.backend = {name!r} and training.precision = {precision!r}: {reason}")
        if name != "auto" and not _trainable(name):
            problems.append(f"attention.backend = {name!r}: it computes the forward pass only; use auto")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def seeds(self) -> tuple[int, ...]:
        """training.seeds, or runtime.seed alone."""
        return self.training.seeds or (self.runtime.seed,)


def did_you_mean(word: str, allowed: Sequence[str]) -> str:
    """A hint such as " did you mean 'cora'?" for a misspelt word; empty if no allowed word is close."""
    close = difflib.get_close_matches(word.lower(), allowed, n=1, cutoff=0.6)
    return f" did you mean {close[0]!r}?" if close else ""


def check_choice(key: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        hint = did_you_mean(value, allowed)
        raise ValueError(f"{key} = {value!r}: not known;{hint} allowed are {', '.join(allowed)}")


# The registries are imported on use, so that `import configs` stays light.


def _dataset_names() -> Sequence[str]:
    import data

    return tuple(data.names())


def _is_collection(name: str) -> bool:
    import data

    return data.info(name).num_graphs is not None


def _has_edge_features(name: str) -> bool:
    import data

    return data.info(name).edge_feature_dim > 0


def _default_passes(name: str) -> dict[str, int]:
    import data

    entry = data.info(name)
    return {"warmup": entry.warmup, "repeats": entry.repeats}


def _backend_names() -> Sequence[str]:
    from baselines import REGISTRY

    return ("auto", *REGISTRY)


def _reordering_backends() -> list[str]:
    from baselines import REGISTRY

    return [name for name, backend in REGISTRY.items() if backend.reorders]


def _backends_with_edge_data() -> list[str]:
    from baselines import REGISTRY

    return [name for name, backend in REGISTRY.items() if backend.takes_edges]


def _trainable(backend: str) -> bool:
    from baselines import REGISTRY

    return REGISTRY[backend].trains


def _unavailable_on_cpu(backend: str) -> str | None:
    import torch

    from baselines import REGISTRY

    return REGISTRY[backend].unavailable(torch.device("cpu"))


def _unsupported(backend: str, dtype: str, head_dim: int) -> str | None:
    import torch

    from baselines import REGISTRY

    return REGISTRY[backend].unsupported(getattr(torch, dtype), head_dim)
