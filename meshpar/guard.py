"""A guard at the door of DTensor, for what meets it outside of the mode.

Some torch functions give wrong numbers on sharded DTensors without an error (torch 2.13: losses with a gradient n times
too large, convolutions without halos, `item()` of one rank's part, the same random numbers on every shard). Inside the
mode our rules stand before them; a call outside of it, in a training script or in the recomputation of a checkpointed
lambda, would still pass. The guard turns those into errors that say what to do.

Invariant: it speaks only of sharded tensors on a mesh of `make_mesh`; DTensors of other meshes, the shards of
`fully_shard` among them, go the way they went before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshpar import private
from meshpar.errors import ShardingError, explain

OURS = tuple(
    ("data", *depth, "domain", *width, "tensor") for depth in ((), ("domain_d",)) for width in ((), ("domain_w",))
)
"""The axes by which a mesh of `make_mesh` is known."""

WRONG_OUTSIDE = (
    torch.ops.aten.convolution.default,
    torch.ops.aten.pixel_shuffle.default,
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
    torch.ops.aten.huber_loss.default,
    torch.ops.aten.soft_margin_loss.default,
    torch.ops.aten.binary_cross_entropy.default,
    torch.ops.aten.binary_cross_entropy_with_logits.default,
    torch.ops.aten.native_dropout.default,
    torch.ops.aten.bernoulli_.float,
    torch.ops.aten.bernoulli.default,
    torch.ops.aten.normal_.default,
    torch.ops.aten.uniform_.default,
    torch.ops.aten.rand_like.default,
    torch.ops.aten.randn_like.default,
    torch.ops.aten.randint_like.default,
    torch.ops.aten.randint_like.low_dtype,
    private.ITEM,
)
"""What DTensor does without an error and not right on sharded tensors; tests/sabotage/test_guard.py shows each."""


@functools.cache
def install() -> None:
    """Put the guard in place, once in a process."""
    for op in WRONG_OUTSIDE:
        private.set_dtensor_handler(op, Guarded(private.dtensor_handler(op)))


@dataclass(frozen=True)
class Guarded:
    """Be the handler of one op.

    Args:
        before: the handler that DTensor had for it, if any; what is not ours goes there.
    """

    before: Callable[..., Any] | None

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Refuse sharded activations; run the op as before on everything else."""
        given = (*args, *kwargs.values())
        if any(_is_sharded_activation(x) for x in given):
            raise ShardingError(
                explain(
                    f"{op}: called on sharded activations outside of the rules, where DTensor gives wrong numbers.",
                    got=[f"{tuple(x.shape)} in {x.placements}" for x in given if isinstance(x, DTensor)],
                    needs="the rules of meshpar in force",
                    fix="call it inside `with meshpar.spmd():`, or gather(x) first; in a checkpointed function, "
                    "make its body a module of the model",
                )
            )
        if self.before is not None:
            return self.before(op, args, kwargs)
        with private.without_dtensor_handler(op):
            return op(*args, **kwargs)


def _is_sharded_activation(x: object) -> bool:
    if not isinstance(x, DTensor) or x.device_mesh.mesh_dim_names not in OURS:
        return False
    return any(not p.is_replicate() and x.device_mesh.size(i) > 1 for i, p in enumerate(x.placements))
