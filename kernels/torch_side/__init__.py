"""The meeting with PyTorch: autograd, operators for torch.compile, autocast, shapes of a call."""
