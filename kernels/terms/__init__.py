"""Terms of a call besides q, k and v: edge data, dropout and score terms."""
