"""Configurations: `load_config("configs/infer/cora.yaml", ["model.dim=64"])` returns a validated, frozen `Config`."""

from configs.load import ConfigError, load_config
from configs.schema import Config, TrainConfig

__all__ = ["Config", "ConfigError", "TrainConfig", "load_config"]
