"""Row orders that save gathers; the search needs SciPy and Numba."""
