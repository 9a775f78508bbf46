"""A score term is one struct: two more compile in all kernels with edits of cuda/score_terms.cuh and its members."""

from dataclasses import dataclass

import pytest

from kernels.runtime import jit
from kernels.runtime.jit import compile_ptxas, read_source

pytest.importorskip("cupy", reason="CuPy, which brings NVRTC's interface, is not installed")

DISTANCE, SOFT_CAP, BIAS, CLAMP = 128, 256, 1, 8
BITS = "  kDropout = 64,  // dropout.cuh\n"
MEMBERS = "  // Members of further score terms"
LIST = "MultiplierTerm, BiasTerm, ClampTerm>"
BEFORE_LIST = "// The terms of one score,"
TERMS = """
// s = s - slope * |i - j|
template <Element kIn>
struct DistanceTerm {
  static constexpr int kBit = kDistance;
  static constexpr bool kHasValue = false, kUsesPlace = true;

  template <typename Params>
  __device__ static __forceinline__ float apply(float score, float, ScorePlace at, const Params& p) {
    return fmaf(-p.slope * kScoreUnit<kIn>, fabsf(static_cast<float>(at.row - at.column)), score);
  }
  template <typename Params>
  __device__ static __forceinline__ float gradient(float gradient, float, float, ScorePlace, const Params&) {
    return gradient;
  }
};

// s = c * tanh(s / c)
template <Element kIn>
struct SoftCapTerm {
  static constexpr int kBit = kSoftCap;
  static constexpr bool kHasValue = false, kUsesPlace = false;

  template <typename Params>
  __device__ static __forceinline__ float apply(float score, float, ScorePlace, const Params& p) {
    const float cap = p.soft_cap * kScoreUnit<kIn>;
    return cap * (1.0f - 2.0f / (1.0f + exp_score<Element::kFloat>(2.0f * score / cap)));
  }
  template <typename Params>
  __device__ static __forceinline__ float gradient(float gradient, float score, float, ScorePlace at, const Params& p) {
    const float y = apply(score, 0.0f, at, p) / (p.soft_cap * kScoreUnit<kIn>);
    return gradient * (1.0f - y * y);
  }
};

"""


@dataclass(frozen=True)
class Instance:
    source: str
    name: str


def with_two_terms(source: str) -> str:
    text = read_source(source)
    for before, after in (
        (BITS, f"{BITS}  kDistance = {DISTANCE},\n  kSoftCap = {SOFT_CAP},\n"),
        (MEMBERS, f"  float slope;\n  float soft_cap;\n{MEMBERS}"),
        (LIST, LIST.replace("ClampTerm", "DistanceTerm, SoftCapTerm, ClampTerm")),
        (BEFORE_LIST, TERMS + BEFORE_LIST),
    ):
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("fused3s.cu", "fused3s<Element::kHalf, Element::kFloat, 64, 1, 4, {terms}>"),
        ("fused3s_edges.cu", "fused3s_edges<Element::kHalf, Element::kHalf, 16, 8, {terms}>"),
        ("fused3s_edges_backward.cu", "gradients_over_rows<Element::kHalf, Element::kHalf, 16, 8, {terms}>"),
        ("fused3s_edges_backward.cu", "gradients_over_columns<Element::kFloat, 16, 8, {terms}>"),
    ],
)
def test_new_terms_compile(monkeypatch, source, name):
    terms = (DISTANCE, DISTANCE | SOFT_CAP | BIAS | CLAMP)
    instances = [Instance(source, name.format(terms=bits)) for bits in terms]
    text = with_two_terms(source)
    monkeypatch.setattr(jit, "read_source", lambda source: text)
    for instance, report in compile_ptxas(instances, "sm_90").items():
        assert report.spill_bytes == 0, instance.name
