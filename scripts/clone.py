"""Puts the root of the clone on the import path: `import clone` stands first in every script."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
