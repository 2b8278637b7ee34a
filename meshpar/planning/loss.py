"""The loss of a step that is run for its own sake: of a plan, or of a table.

Invariant: every floating output has a gradient.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshpar.errors import SpecError, explain
from meshpar.private import pytree


def mean_square(out: Any) -> Tensor:
    """Give the sum of the mean squares of all floating tensors of a tree.

    Raises:
        SpecError: there is none.
    """
    leaves = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point()]
    if not leaves:
        needs, fix = "a model that gives tensors of floating point numbers", "loss=a function of what the model gives"
        raise SpecError(explain("loss: nothing to make it of.", got=f"a {type(out).__name__}", needs=needs, fix=fix))
    total: Tensor = sum((x.square().mean() for x in leaves[1:]), leaves[0].square().mean())
    return total
