"""Plans of `fused3s`, built on the GPU (cuda/plan)."""
