"""Sparse formats of A: CSR in, BSB and its schedule out, rows in any order."""
