"""Inference of a configured model over a graph or a collection, on one process or on several ranks, and the records of
a training run: the work of `scripts/infer.py`, and the rows of `scripts/train.py`."""
