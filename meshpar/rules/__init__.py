"""The rules, one family of torch functions a file; importing this package registers all of them."""

from meshpar.rules import (
    adaptive,
    along,
    conv,
    linear,
    moments,
    pointwise,
    pool,
    random,
    read,
    reduce,
)

__all__ = [
    "adaptive",
    "along",
    "conv",
    "linear",
    "moments",
    "pointwise",
    "pool",
    "random",
    "read",
    "reduce",
]
