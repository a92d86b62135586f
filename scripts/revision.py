"""The commit that a report names."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def revision() -> str:
    """``RLK_COMMIT`` where it is set (as for a copy without the history), else the repository's HEAD, else unknown."""
    if said := os.environ.get("RLK_COMMIT"):
        return said
    git, here = ["git", "rev-parse", "--short", "HEAD"], Path(__file__).parent
    try:
        head = subprocess.run(git, capture_output=True, text=True, cwd=here, check=False).stdout.strip()
    except OSError:  # no git here
        head = ""
    return head or "unknown"
