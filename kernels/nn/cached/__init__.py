"""What layers keep for each tensor of a caller: plans, self-loops, bound edge data."""
