"""The kernels that go edge by edge (cuda/edges), and products of edge features (cuda/features)."""
