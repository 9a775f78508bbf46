"""Kernels for the layers between two attentions of a Graph Transformer.

block.py            output projection, norms, FFN and the next QKV projection in one kernel; compute capability 9.0
block_training.py   the same for training, and its backward pass
residual_norm.py    bias, dropout, residual and norm of a training step if that kernel cannot run
"""
