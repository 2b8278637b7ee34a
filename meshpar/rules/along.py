"""Functions that work along one dim: local where no rank boundary crosses it, gathered otherwise.

Invariant: only the size of the named dim may change. `F.normalize` is exact along a sharded dim too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshpar import pieces
from meshpar.private import pytree
from meshpar.rules.pointwise import write_into
from meshpar.rules.spatial import settle
from meshpar.spmd import call, functions, gather_call, name_of, rule

SAME_RANK = {
    "cumsum": 1,
    "cumprod": 1,
    "logcumsumexp": 1,
    "cummax": 1,
    "cummin": 1,
    "sort": 1,
    "argsort": 1,
    "topk": 2,
    "glu": 1,
    "diff": 2,
}
"""Position of the argument `dim`."""

DEFAULT_DIM = {"sort": -1, "argsort": -1, "topk": -1, "glu": -1, "diff": -1}


def _handler(func: Callable[..., Any], name: str, position: int) -> Callable[..., Any]:
    def handler(input: DTensor, *args: Any, **kwargs: Any) -> Any:
        dim: Any = kwargs.get("dim")
        if dim is None:
            dim = args[position - 1] if len(args) >= position else DEFAULT_DIM.get(name)
        others = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        usable = isinstance(dim, int) and not isinstance(dim, bool) and input.dim() and not others
        if not usable or not -input.dim() <= dim < input.dim() or pieces.shard_axes(input, dim):
            return gather_call(func, (input, *args), kwargs, why="it works along a sharded dim")
        x = settle(input, range(input.dim()), name_of(func))
        found = func(pieces.local(x), *args, **kwargs)

        def leave(part: Tensor) -> DTensor:
            shape = list(x.shape)
            shape[dim] = part.shape[dim]
            return pieces.whole(part, x.device_mesh, x.placements, shape)

        if isinstance(found, Tensor):
            return leave(found)
        return type(found)([leave(part) for part in found])

    return handler


for _name, _position in SAME_RANK.items():
    for _function in functions(_name):
        rule(_function)(_handler(_function, _name, _position))


@rule(F.normalize)
def normalize(input: DTensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Any:
    """Divide by the p-norm along a dim, sharded or not."""
    length = call(Tensor.norm, (input, p, dim), {"keepdim": True})
    result = call(Tensor.div, (input, call(Tensor.clamp_min, (length, eps), {})), {})
    return result if out is None else write_into(out, result, "F.normalize")
