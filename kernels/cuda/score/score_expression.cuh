// The expression of a call's score term: this one, of none. terms/score_source.py writes those of terms; they take the
// place of this file.
#pragma once
struct ScoreExpression {
  static constexpr int kRowValues = 0, kColumnValues = 0, kEdgeValues = 0, kHeadValues = 0;
  static constexpr bool kUsesScore = true;

  // The score from scale * <q, k>, `s`, and its values.
  template <typename Values, typename Numbers>
  __device__ static __forceinline__ float apply(float s, const Values&, const Numbers&) {
    return s;
  }

  // Returns the gradient of s, from that of the score, `g`; those of the values to the last argument.
  template <typename Values, typename Numbers>
  __device__ static __forceinline__ float gradient(float g, float, const Values&, const Numbers&, Values&) {
    return g;
  }
};
