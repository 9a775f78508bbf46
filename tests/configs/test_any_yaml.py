"""Any text as a configuration or a --set value: it loads, or a ConfigError names the file or the key.

What loads is bounded: no number of it is NaN, infinite or too large for a 64-bit integer.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs import Config, ConfigError, TrainConfig, load_config
from configs.bench_schema import BenchConfig
from configs.end_to_end_schema import EndToEndConfig
from configs.layers_bench_schema import LayersBenchConfig
from configs.parallel_bench_schema import ParallelBenchConfig
from configs.plan_bench_schema import PlanBenchConfig
from configs.training_bench_schema import TrainingBenchConfig

ROOT = Path(__file__).resolve().parents[2] / "configs"
DOORS = {  # schema by a file that it loads
    "infer/all-keys.yaml": Config,
    "train/cora.yaml": TrainConfig,
    "bench/single.yaml": BenchConfig,
    "end_to_end/smoke.yaml": EndToEndConfig,
    "training_bench/single.yaml": TrainingBenchConfig,
    "plan_bench/graphs.yaml": PlanBenchConfig,
    "bench/layers.yaml": LayersBenchConfig,
    "parallel_bench/single.yaml": ParallelBenchConfig,
}
KEYS = [
    (door, section, key)
    for door, schema in DOORS.items()
    for section, field in schema.model_fields.items()
    for key in field.annotation.model_fields
]
ODD = [
    *(None, True, False, 0, -1, 1, 3, 10**9, 2**31, 2**63, 2**64, 10**30, -(10**30)),
    *(0.0, -0.5, 0.5, 1e308, -1e308, 1e-320, math.inf, -math.inf, math.nan),
    *("", " ", "auto", "none", "null", "1", "1e9", "nan", "../../x", "a/b", "a\x00b", "ä" * 300, "\u202e", "1:30"),
    *("0x10", "010", "2024-13-45", "all", "cora", "fused3s"),
    *([], [None], [True], [0], [1, 1], [10**30], [math.nan], ["cora", "cora"], [[]], [{}], ["1x99999999999"], ["0x0"]),
    *(["plain"] * 2000, {}, {"a": 1}, {"": None}, {"fused3s": []}, {"fused3s": ["plain", "plain"]}, {"x": {"y": {}}}),
]
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(10**40), 10**40), st.floats(), st.text(max_size=20)
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for inner in value.values() for number in numbers(inner)]
    if isinstance(value, (list, tuple)):
        return [number for inner in value for number in numbers(inner)]
    return [value] if isinstance(value, (int, float)) else []


def outcome(path: Path, schema: type, *overrides: str) -> str | None:
    """The text of the ConfigError; None if the configuration loads."""
    text = None
    try:
        config = load_config(path, overrides, schema)
    except ConfigError as error:
        text = str(error)
    if text is not None:
        assert str(path) in text
        assert len(text) < 1_000_000
        return text
    for number in numbers(config.model_dump()):
        assert math.isfinite(number)
        assert isinstance(number, float) or abs(number) <= 2**63
    return None


def written(value: Any) -> str:
    return yaml.safe_dump(value, allow_unicode=True)


@pytest.mark.parametrize(("door", "section", "key"), KEYS, ids=[".".join(parts).replace("/", "-") for parts in KEYS])
def test_an_odd_value_loads_or_the_error_names_its_key(tmp_path, door, section, key):
    shipped = yaml.safe_load((ROOT / door).read_text())
    path = tmp_path / "my.yaml"
    for value in ODD:
        path.write_text(written(shipped | {section: (shipped.get(section) or {}) | {key: value}}))
        error = outcome(path, DOORS[door])
        assert error is None or f"{section}.{key}" in error, (value, error)


@pytest.mark.parametrize("door", DOORS)
@UNHURRIED
@given(data=st.data())
def test_any_value_of_any_key(tmp_path, door, data):
    schema = DOORS[door]
    shipped = yaml.safe_load((ROOT / door).read_text())
    section = data.draw(st.sampled_from([*schema.model_fields]))
    key = data.draw(st.sampled_from([*schema.model_fields[section].annotation.model_fields]))
    value = data.draw(VALUES)
    path = tmp_path / "my.yaml"
    path.write_text(written(shipped | {section: (shipped.get(section) or {}) | {key: value}}), encoding="utf-8")
    error = outcome(path, schema)
    assert error is None or f"{section}.{key}" in error or "not valid YAML" in error


@pytest.mark.parametrize("schema", dict.fromkeys(DOORS.values()), ids=lambda schema: schema.__name__)
@UNHURRIED
@given(value=VALUES, text=st.text(max_size=60))
def test_any_yaml(tmp_path, schema, value, text):
    path = tmp_path / "my.yaml"
    for content in (written(value), text, json.dumps({"data": value, text: value})):
        path.write_bytes(content.encode(errors="surrogatepass"))
        outcome(path, schema)


@UNHURRIED
@given(text=st.text(max_size=40))
def test_any_override(text):
    path = ROOT / "infer" / "cora.yaml"
    for override in (text, f"model.dim={text}", f"data.{text}=1", f"{text}.dim=1"):
        outcome(path, Config, override)
