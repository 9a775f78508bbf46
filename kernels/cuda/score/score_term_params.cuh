  // Heads of the values of an expression (score_terms.cuh), 1 or H, and its numbers.
  int row_value_heads;
  int column_value_heads;
  int edge_value_heads;
  int head_value_heads;
  float score_number[8];
  float additive_slope;  // additive_score.cuh
  int num_factors;       // key_factor.cuh
