"""Used by everything that runs: the terminal, timers, rows of results with their provenance, places of files."""
