"""Constants of the kernels of `fused3s`, and the columns that heads get."""

import re

from ..runtime.source import read_source

TILE = (16, 16)
COMMON_DIM = 128  # head dimension assumed by a schedule if it is unknown
SLICE = 16  # columns: two n-tiles


def tile_columns(dim: int) -> int:
    """Columns of a head over KV tiles, after `attend` has padded an odd `dim`."""
    return dim + (-dim % 8 if dim % 2 else 0)


def _term_bits() -> dict[str, int]:
    """The bits of enum EdgeTerm (cuda/score/score_terms.cuh) by snake_case name: kKeyFeatures is key_features."""
    body = re.search(r"enum EdgeTerm {(.*?)}", read_source("score/score_terms.cuh"), re.DOTALL)[1]
    members = re.findall(r"\bk(\w+) = (\d+)", body)
    return {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower(): int(bit) for name, bit in members}


TERM_BITS = _term_bits()
TYPES, KEY_FEATURES, VALUE_FEATURES = (TERM_BITS[name] for name in ("types", "key_features", "value_features"))
DROPOUT, EXPRESSION, ADDITIVE, KEY_FACTOR = (
    TERM_BITS[name] for name in ("dropout", "expression", "additive", "key_factor")
)
WIDE_KEYS, WIDE_VALUES, WIDE_FACTORS = (TERM_BITS[f"wide_{name}"] for name in ("keys", "values", "factors"))
GIVEN_WEIGHTS = TERM_BITS["given_weights"]
