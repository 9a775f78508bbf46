"""The integration with PyTorch: autograd, operators for torch.compile, autocast, shapes of a call."""
