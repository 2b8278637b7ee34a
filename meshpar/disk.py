"""Bringing what was written down to the disk.

Invariant: a call returns once a crash of the machine cannot undo what it was asked for.
"""

from __future__ import annotations

import os
from pathlib import Path


def sync_folder(path: Path) -> None:
    """Bring the names in a folder down to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
