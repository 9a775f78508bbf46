"""`scripts/infer.py` and the records of `scripts/train.py`: a configured model over a graph or a collection, on one
process or on several ranks."""
