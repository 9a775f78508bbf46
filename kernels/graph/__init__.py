"""Graphs as callers give them: edge lists, CSR patterns, key lists, and the order of their edges."""
