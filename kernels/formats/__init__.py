"""Sparse formats of A: CSR in, plans out, rows in any order."""
