"""Configurations: shipped ones load; errors name file, key, value and the allowed values."""

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

import data
from configs import Config, ConfigError, TrainConfig, load_config

ROOT = Path(__file__).resolve().parents[2]
INFER = ROOT / "configs" / "infer"
TRAIN = ROOT / "configs" / "train"
SHIPPED = sorted([*INFER.glob("*.yaml"), *TRAIN.glob("*.yaml")])
ALL_KEYS = INFER / "all-keys.yaml"


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "my.yaml"
        path.write_text(text)
        return path

    return write


def problems(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    "path", [path for path in SHIPPED if path != ALL_KEYS], ids=lambda path: f"{path.parent.stem}/{path.stem}"
)
def test_shipped_config_loads_and_states_only_what_it_changes(path):
    config = load_config(path)
    defaults = Config(data={"name": config.data.name}).model_dump()
    for section, values in yaml.safe_load(path.read_text()).items():
        for key, value in values.items():
            assert (section, key) == ("data", "name") or defaults[section][key] != value


@pytest.mark.parametrize("path", sorted(TRAIN.glob("*.yaml")), ids=lambda path: path.stem)
def test_training_configs_train(path):
    assert load_config(path, schema=TrainConfig).seeds == (0,)
    assert load_config(path, ["training.seeds=[4, 2]"], schema=TrainConfig).seeds == (4, 2)


def test_numbers_with_an_exponent_need_no_dot(write):
    path = write("data: {name: cora}\ntraining: {lr: 1e-3, weight_decay: 5E-4}")
    training = load_config(path, ["training.clip_norm=2e+1"]).training
    assert (training.lr, training.weight_decay, training.clip_norm) == (0.001, 0.0005, 20.0)


def test_backends_without_gradients_cannot_train(write):
    path = write("data: {name: cora}\nattention: {backend: fused3s_paper}")
    assert load_config(path).attention.backend == "fused3s_paper"
    with pytest.raises(ConfigError, match=r"attention\.backend = 'fused3s_paper': it computes the forward pass only"):
        load_config(path, schema=TrainConfig)


def test_all_keys_are_shown_with_their_defaults():
    config = load_config(ALL_KEYS)
    assert config == Config(data={"name": "cora"})
    shown = {section: list(values) for section, values in yaml.safe_load(ALL_KEYS.read_text()).items()}
    assert shown == {section: list(values) for section, values in config.model_dump().items()}


@pytest.mark.parametrize("name", data.names())
def test_every_data_set_loads_by_its_name(name):
    config = load_config(INFER / "cora.yaml", [f"data.name={name}"])
    entry = data.info(name)
    assert (config.data.name, config.data.source) == (name, "auto")
    assert (config.runtime.warmup, config.runtime.repeats) == (entry.warmup, entry.repeats)


def test_passes_of_a_large_graph_are_its_own_unless_set():
    assert load_config(INFER / "reddit.yaml").runtime.repeats == 5
    config = load_config(INFER / "reddit.yaml", ["data.name=igb-medium", "runtime.repeats=9"])
    assert (config.runtime.warmup, config.runtime.repeats) == (1, 9)
    assert Config(data={"name": "mine", "source": "file"}).runtime.repeats == 20


def test_overrides_are_yaml_scalars_and_the_last_one_wins(write):
    path = write("data: {name: cora}\nmodel:\n")
    config = load_config(
        path, ["model.dim=64", "model.heads=2", "model.dim=256", "data.path=null", "runtime.device=cuda:1"]
    )
    assert (config.model.dim, config.model.heads, config.model.head_dim) == (256, 2, 128)
    assert config.data.path is None
    assert config.runtime.device == "cuda:1"


def test_ways_to_run_come_as_they_are_written(write):
    path = write("data: {name: cora}\nruntime: {cuda_graph: off}\n")
    assert load_config(path).runtime.cuda_graph is False
    config = load_config(path, ["runtime.cuda_graph=true", "runtime.dense=fused", "attention.backend=fused3s"])
    assert (config.runtime.cuda_graph, config.runtime.dense) == (True, "fused")
    assert load_config(path, ["attention.backend=fused3s", "attention.reorder=communities"]).attention.reorder


def test_config_is_frozen():
    config = Config(data={"name": "cora"})
    with pytest.raises(ValidationError, match="frozen"):
        config.model.dim = 64


def test_sha_names_the_resolved_values_not_the_way_they_were_given(write):
    path = write("data: {name: cora}\nmodel: {dim: 64}\n")
    assert load_config(path).sha() == load_config(path, ["model.heads=1"]).sha()
    assert load_config(path).sha() != load_config(path, ["model.heads=2"]).sha()


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "model.head=4",
            [
                "model.head = 4",
                "no such key",
                "did you mean 'heads'",
                "dim, heads, blocks, norm, pos_enc, edge_features",
            ],
        ),
        ("modle.dim=64", ["modle", "did you mean 'model'", "data, model, attention, runtime"]),
        ("model.norm=layr", ["model.norm = 'layr'", "did you mean 'layer'", "'layer' or 'batch'"]),
        ("model.dim=big", ["model.dim = 'big'", "valid integer"]),
        ("model.heads='4'", ["model.heads = '4'", "valid integer"]),
        ("model.blocks=0", ["model.blocks = 0", "greater than or equal to 1"]),
        ("model.blocks=true", ["model.blocks = True", "valid integer"]),
        ("model.heads=3", ["model.dim = 128 and model.heads = 3", "multiple of heads"]),
        ("model.dim=3", ["model.dim = 3", "greater than or equal to 4"]),
        ("model.dim=512", ["model.dim = 512 and model.heads = 1", "512 columns; allowed are 1 to 256"]),
        ("model.edge_features=strem", ["model.edge_features = 'strem'", "did you mean 'stream'", "'none', 'bias' or"]),
        ("data.name=coar", ["data.name = 'coar'", "did you mean 'cora'", "pubmed"]),
        ("data.source=offical", ["data.source = 'offical'", "did you mean 'official'"]),
        ("data.order=sorted", ["data.order = 'sorted'", "'dataset' or 'random'"]),
        ("data.split=valid", ["data.split = 'valid'", "'train', 'val' or 'test'"]),
        ("data.name=12", ["data.name = 12", "valid string"]),
        (
            "attention.backend=fused3s_papr",
            ["attention.backend = 'fused3s_papr'", "did you mean 'fused3s_paper'", "dgl"],
        ),
        ("attention.dtype=fp16", ["attention.dtype = 'fp16'", "'float16'"]),
        ("runtime.device=gpu", ["runtime.device = 'gpu'", "auto, cpu, cuda"]),
        ("attention.reorder=rmc", ["attention.reorder = 'rmc'", "'communities'"]),
        ("data.batch_size=0", ["data.batch_size = 0", "allowed are 1 to 1000000000, and auto"]),
        ("data.batch_size=1e3", ["data.batch_size = 1000.0", "and auto"]),
        ("data.batch_size=all", ["data.batch_size = 'all'", "and auto"]),
        ("runtime.cuda_graph=3", ["runtime.cuda_graph = 3", "True, False or 'auto'"]),
        ("runtime.cuda_graph=yess", ["runtime.cuda_graph = 'yess'", "True, False or 'auto'"]),
        ("runtime.dense=fuse", ["runtime.dense = 'fuse'", "did you mean 'fused'", "'compiled'"]),
        ("runtime.warmup=0", ["runtime.warmup = 0", "greater than or equal to 1"]),
        ("runtime=3", ["section.key=value"]),
        ("model.dim", ["section.key=value"]),
        ("model.dim=[1", ["not valid YAML"]),
    ],
)
def test_wrong_value_is_named_with_what_is_allowed(write, override, parts):
    text = problems(write("data:\n  name: cora\n"), override)
    assert "my.yaml" in text
    assert f"--set {override}" in text
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("overrides", "both"),
    [
        (["data.source=synthetic", "data.path=a.npz"], ["data.source = 'synthetic'", "data.path = 'a.npz'"]),
        (
            ["model.edge_features=bias"],
            ["model.edge_features = 'bias'", "data.name = 'cora'", "no edge features; these have: ogbg-molhiv"],
        ),
        (
            ["data.name=zinc", "model.edge_features=stream", "attention.backend=flex_attention"],
            [
                "model.edge_features = 'stream'",
                "attention.backend = 'flex_attention'",
                "takes no edge data; allowed are auto",
            ],
        ),
        (["data.split=test"], ["data.split = 'test'", "data.name = 'cora': a single graph", "only data.split: null"]),
        (["data.order=random"], ["data.order = 'random'", "data.name = 'cora'", "only data.order: 'dataset'"]),
        (["data.name=zinc", "data.split=val", "data.source=synthetic"], ["data.split = 'val'", "data.source = 'synth"]),
        (
            ["data.name=zinc", "data.order=random", "data.source=synthetic"],
            ["data.order = 'random'", "a surrogate has"],
        ),
        (["data.name=zinc", "data.split=val", "data.path=a.npz"], ["data.split = 'val'", "data.path = 'a.npz'"]),
        (["data.name=zinc", "data.split=val", "data.source=file"], ["data.split = 'val'", "data.source = 'file'"]),
        (["data.name=zinc", "data.batch_size=auto"], ["data.batch_size = 'auto'", "data.batches = 1"]),
        (["attention.backend=fused3s_paper", "runtime.device=cpu"], ["'fused3s_paper'", "runtime.device = 'cpu'"]),
        (
            ["attention.reorder=auto", "attention.backend=dgl"],
            ["attention.reorder = 'auto'", "attention.backend = 'dgl'", "only the backend fused3s reorders"],
        ),
        (["runtime.cuda_graph=true", "runtime.device=cpu"], ["runtime.cuda_graph = True", "runtime.device = 'cpu'"]),
        (["runtime.dense=fused", "runtime.device=cpu"], ["runtime.dense = 'fused'", "runtime.device = 'cpu'"]),
        (["runtime.dense=fused", "model.norm=batch"], ["runtime.dense = 'fused'", "model.norm = 'batch'", "'layer'"]),
        (["runtime.dense=fused", "model.dim=72"], ["runtime.dense = 'fused'", "model.dim = 72", "64, 80, 96, 128"]),
        (
            ["runtime.dense=fused", "attention.dtype=float32"],
            ["runtime.dense = 'fused'", "attention.dtype = 'float32'", "'bfloat16'"],
        ),
        (
            ["attention.backend=fused3s_paper", "attention.dtype=float32"],
            ["'fused3s_paper'", "attention.dtype = 'float32'"],
        ),
    ],
)
def test_impossible_combination_names_both_keys(write, overrides, both):
    text = problems(write("data:\n  name: cora\n"), *overrides)
    for part in both:
        assert part in text


def test_all_problems_come_at_once(write):
    text = problems(write("data:\n  nam: cora\nmodel:\n  dim: 64\n  dim: 100\n  norm: none\n"), "runtime.repeats=no")
    assert "5 problems" in text
    for part in ("data.name is missing", "data.nam = 'cora'", "did you mean 'name'", "model.norm", "runtime.repeats"):
        assert part in text
    assert "line 5: dim was already given in line 4" in text


def test_an_error_that_an_override_makes_with_the_file_names_both(write):
    text = problems(write("data: {name: cora}\nmodel: {dim: 64}\n"), "model.heads=3")
    assert "my.yaml with --set model.heads=3: model.dim = 64 and model.heads = 3" in text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("data: [", "not valid YAML"),
        ("- data", "holds a list"),
        ("", "data is missing"),
        ("data: cora", "a section is needed, with the keys name, source"),
        ("data: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_file_that_is_no_configuration(write, text, part):
    assert part in problems(write(text))


def test_missing_file_lists_its_neighbours():
    text = problems(INFER / "coar.yaml")
    assert "no such file" in text
    assert "cora.yaml" in text


def test_an_unregistered_name_is_fine_with_a_file(write, tmp_path):
    path = write("data: {name: mine, source: file, path: mine.mtx}\n")
    assert load_config(path).data.name == "mine"
    (tmp_path / "local.npz").touch()
    assert load_config(write(f"data: {{name: local, root: '{tmp_path}'}}\n")).data.name == "local"


@pytest.mark.parametrize(
    "overrides", [["data.split=val"], ["data.order=random", "data.source=file"], ["data.split=null"]]
)
def test_order_and_split_of_a_collection(write, overrides):
    config = load_config(write("data: {name: zinc}\n"), overrides)
    keys = {key.removeprefix("data."): value for key, value in (override.split("=") for override in overrides)}
    for key, value in keys.items():
        assert getattr(config.data, key) == (None if value == "null" else value)


def test_the_published_run_is_the_default_of_order_and_split():
    section = Config(data={"name": "zinc"}).data
    assert (section.batch_size, section.order, section.split) == (1024, "dataset", None)


@pytest.mark.parametrize(
    ("settings", "batch_size"),
    [
        ({"batches": "all"}, "auto"),
        ({"batches": "all", "batch_size": "auto"}, "auto"),
        ({"batches": "all", "batch_size": 512}, 512),
        ({"batches": 3}, 1024),
    ],
)
def test_all_batches_follow_the_nodes_unless_a_number_of_graphs_is_given(settings, batch_size):
    section = Config(data={"name": "zinc", **settings}).data
    assert section.batch_size == batch_size
    assert Config.model_validate(Config(data={"name": "zinc", **settings}).model_dump()).data == section


def test_batches_of_about_as_many_nodes():
    section = Config(data={"name": "zinc", "batches": "all"}).data
    for graphs, nodes in ((41_127, 1_049_163), (10, 300), (7, 7_000_000), (1_000, 299_000), (1_000, 301_000)):
        size = section.graphs_per_batch(graphs, nodes)
        assert 1 <= size <= graphs
        batches = -(-graphs // size)
        if size < graphs:
            assert nodes / batches < 300_000 or size == 1
            assert nodes / batches > 133_000
        assert graphs > (batches - 1) * size  # the last one is not empty
    assert section.graphs_per_batch(41_127, 1_049_163) == 8_226


def test_training_takes_a_number_of_graphs():
    with pytest.raises(ValueError, match=r"data\.batch_size = 'auto': training needs a number of graphs"):
        TrainConfig(data={"name": "zinc", "batches": "all"})
