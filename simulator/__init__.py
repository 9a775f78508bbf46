"""Predicted sizes, bytes and times of one graph on several GPUs, from recorded times of one; nothing is measured."""
