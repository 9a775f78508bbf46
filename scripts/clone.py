"""Puts the root of the clone on the import path: `import clone` stands first in every script."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# Torch's profiler prints when it starts and stops, unless it finds a higher level when torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
