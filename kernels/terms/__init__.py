"""What a call adds to the scores: edge data, dropout and score terms."""
