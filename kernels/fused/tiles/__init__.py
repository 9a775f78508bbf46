"""The kernels over KV tiles, on tensor cores (cuda/tiles)."""
