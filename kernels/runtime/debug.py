"""Environment variables for debugging launches, read at import.

FUSED3S_DEBUG=1  print each kernel when it is loaded, and each launch, on standard error
FUSED3S_PDL=0    no programmatic dependent launch: a result that changes with it points to a missing griddepcontrol.wait
"""

import os
import sys

ENABLED = os.environ.get("FUSED3S_DEBUG", "0") not in ("", "0")
ALLOWS_OVERLAP = os.environ.get("FUSED3S_PDL", "1") != "0"


def report(text: str) -> None:
    print(f"fused3s: {text}", file=sys.stderr, flush=True)
