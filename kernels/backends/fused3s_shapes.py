"""Constants of the kernels of `fused3s`."""

import re

from ..runtime.source import read_source

TILE = (16, 16)
COMMON_DIM = 128  # head dimension assumed by a schedule if it is unknown
SLICE = 16  # columns: two n-tiles


def _term_bits() -> dict[str, int]:
    """The bits of enum EdgeTerm (cuda/score_terms.cuh) by snake_case name: kKeyFeatures is key_features."""
    body = re.search(r"enum EdgeTerm {(.*?)}", read_source("score_terms.cuh"), re.DOTALL)[1]
    members = re.findall(r"\bk(\w+) = (\d+)", body)
    return {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower(): int(bit) for name, bit in members}


TERM_BITS = _term_bits()
BIAS, MULTIPLIER, TYPES = TERM_BITS["bias"], TERM_BITS["multiplier"], TERM_BITS["types"]
KEY_FEATURES, VALUE_FEATURES = TERM_BITS["key_features"], TERM_BITS["value_features"]
CLAMP, DROPOUT = TERM_BITS["clamp"], TERM_BITS["dropout"]
EXPRESSION, ADDITIVE = TERM_BITS["expression"], TERM_BITS["additive"]
