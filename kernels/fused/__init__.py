"""The backend `fused3s`: the choice between its kernels, and their launches."""
