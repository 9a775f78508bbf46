"""The steps of `make reproduce-figures`: suite.yaml."""

from pathlib import Path
from typing import Any

from configs.load import read_yaml

STEPS: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_suffix(".yaml"))
PAPER = [name for name, step in STEPS.items() if step.get("in") == "paper"]  # the default
