// The score expression of a call without a score term. For a term, terms/score_source.py generates a file that replaces
// this one.
#pragma once
struct ScoreExpression {
  static constexpr int kRowValues = 0, kColumnValues = 0, kEdgeValues = 0, kHeadValues = 0;
  static constexpr bool kUsesScore = true;

  // The score from scale * <q, k>, `s`, and its values.
  template <typename Values, typename Numbers>
  __device__ static __forceinline__ float apply(float s, const Values&, const Numbers&) {
    return s;
  }

  // Returns the gradient of s, given the gradient `g` of the score. The last argument receives the gradients of the
  // values.
  template <typename Values, typename Numbers>
  __device__ static __forceinline__ float gradient(float g, float, const Values&, const Numbers&, Values&) {
    return g;
  }
};
