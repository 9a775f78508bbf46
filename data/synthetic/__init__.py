"""Seeded synthetic graphs: surrogates of the data sets."""
