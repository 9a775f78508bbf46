"""A layer as one autograd node: its projections and attention with one backward pass."""
