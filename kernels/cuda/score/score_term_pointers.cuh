  // Values of a score term (score_terms.cuh), n of each row, column, edge or head side by side.
  const float* row_values;     // [num_rows][1 or H][n]
  const float* column_values;  // [num_cols][1 or H][n]
  const void* edge_values;     // [nnz][1 or H][n]  kIn
  const float* head_values;    // [1 or H][n]
