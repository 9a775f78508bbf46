"""Measures kernels and models and records each value with its provenance in one CSV schema (`common.records`)."""
