"""Whether this process pretends to be one rank of a world whose other ranks are not there, to plan for it.

Invariant: outside of `pretending()` nothing of this library asks for anything else than without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_ON: list[bool] = []


def is_on() -> bool:
    """Tell whether this process pretends."""
    return bool(_ON)


@contextlib.contextmanager
def pretending() -> Iterator[None]:
    """Pretend inside the block."""
    _ON.append(True)
    try:
        yield
    finally:
        _ON.pop()
