"""Markdown tables."""
