"""The steps of `make reproduce-figures`: suite.yaml."""

from pathlib import Path
from typing import Any

import yaml

STEPS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
PAPER = [name for name, step in STEPS.items() if step.get("in") == "paper"]  # the default
