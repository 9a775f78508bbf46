"""Tables and figures, read from the CSVs of `results/`; nothing here needs a GPU."""
