  // Heads of the values of a score term, 1 or H, and its numbers; then members of further score terms
  // (score_terms.cuh): none. A line `float slope;` here is p.slope in a term.
  int row_value_heads;
  int column_value_heads;
  int edge_value_heads;
  int head_value_heads;
  float score_number[8];
