"""The rules, one family of torch functions a file; importing this package registers all of them."""

from meshpar.rules import (
    pointwise,
    read,
)

__all__ = ["pointwise", "read"]
