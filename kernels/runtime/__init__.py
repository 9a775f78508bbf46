"""Compilation and launch of the CUDA sources."""
