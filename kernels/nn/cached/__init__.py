"""Caches of the layers, by the caller's tensors: plans, self-loops, bound edge data."""
