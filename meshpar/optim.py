"""The norm of gradients, and clipping by it, over any mix of parameters: plain ones, and DTensors on any meshes.

Invariant: every rank gets the same number, that of one process; a gradient that several ranks hold counts once, and
none is gathered. Ranks always exchange one number a parameter, whether it has a gradient on this rank or not, so that
no rank waits for a message that another does not send.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from meshpar.errors import NonFiniteError, SpecError, explain
from meshpar.lists import sharing_groups
from meshpar.peers import naming


@torch.no_grad()
def grad_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Give the norm of all gradients, as if they were one vector on one process.

    Args:
        parameters: a parameter, or an iterable of them; those without a gradient count as zero.
        norm_type: the p of the p-norm, which may be infinite; 0 counts the parameters whose gradient is not zero, as
            `torch.nn.utils.get_total_norm` does.

    Returns:
        A plain 0-d tensor, the same on every rank; float32, or float64 where any gradient is.

    Communication:
        For each axis that shards any of the gradients one all-reduce, of 8 bytes a parameter.

    Raises:
        SpecError: `parameters` holds something that is no tensor, or `norm_type` is not a number.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(2))
        >>> p.grad = torch.tensor([3.0, 4.0])
        >>> grad_norm([p])
        tensor(5.)
    """
    held = _listed(parameters)
    return _total(held, _checked_norm(norm_type))


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients in place so that their norm is `max_norm` at the most; for `torch.nn.utils.clip_grad_norm_`.

    Args:
        parameters: a parameter, or an iterable of them.
        max_norm: the largest norm to leave.
        norm_type: the p of the p-norm, which may be infinite.
        error_if_nonfinite: whether a norm that is infinite or not a number is an error.

    Returns:
        The norm before, a plain 0-d tensor, the same on every rank; see `grad_norm`.

    Communication:
        That of `grad_norm`.

    Raises:
        NonFiniteError: the norm is not finite and `error_if_nonfinite`; on all ranks, and no gradient is touched.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(2))
        >>> p.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([p], max_norm=1.0), p.grad
        (tensor(5.), tensor([0.6000, 0.8000]))
    """
    held = _listed(parameters)
    if not held:
        warnings.warn("clip_grad_norm_: no parameters, nothing is clipped", stacklevel=3)
    total = _total(held, _checked_norm(norm_type))
    if error_if_nonfinite and not bool(total.isfinite()):
        raise NonFiniteError(
            explain(
                "clip_grad_norm_: the norm of the gradients is not finite.",
                got=f"norm_type={norm_type:g} over {len(held)} parameters",
                needs="gradients without inf or nan",
                fix="skip this step (torch.amp.GradScaler does), or error_if_nonfinite=False",
            )
        )
    factor = (float(max_norm) / (total + 1e-6)).clamp(max=1.0)
    for p in held:
        if p.grad is not None:
            piece = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            piece.mul_(factor.to(piece.device))
    return total


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    odd = sorted({type(p).__name__ for p in held if not isinstance(p, Tensor)})
    if odd:
        raise SpecError(explain("grad_norm: not parameters.", got=odd, needs="tensors", fix="give model.parameters()"))
    return list({id(p): p for p in held}.values())


def _checked_norm(norm_type: float) -> float:
    try:
        p = float(norm_type)
    except (TypeError, ValueError):
        p = math.nan
    if math.isnan(p):
        raise SpecError(
            explain("grad_norm: unknown norm.", got=f"norm_type={norm_type!r}", needs="a number, or inf", fix="2.0")
        )
    return p


def _total(held: list[Tensor], p: float) -> Tensor:
    """Give the norm of the norms of all parameters."""
    if not held:
        return torch.zeros(())
    pieces = [_piece(x) for x in held]
    device = next((x.device for x in pieces if x is not None), held[0].device)
    sums = torch.stack([_summed(x, p).to(device, _wide(device)) for x in pieces])
    groups: dict[dist.ProcessGroup, list[int]] = {}
    axes: dict[dist.ProcessGroup, str] = {}
    for i, x in enumerate(held):
        axes |= sharing_groups(x)
        for group in sharing_groups(x):
            groups.setdefault(group, []).append(i)
    for group, members in groups.items():
        with naming(group, axes[group], "|grad_norm"):
            _reduce(sums, members, group, p)
    norms = sums if p == 0 or math.isinf(p) else sums.pow(1 / p)
    dtypes = [x.real.dtype if x.is_complex() else x.dtype for x in pieces if x is not None]
    answer = torch.float64 if torch.float64 in dtypes else torch.float32
    total: Tensor = torch.linalg.vector_norm(norms, p)
    return total.to(answer)


def _piece(p: Tensor) -> Tensor | None:
    """Give this rank's piece of the gradient of a parameter, in the placements of the parameter."""
    g = p.grad
    if g is None:
        return None
    if isinstance(g, DTensor):
        if isinstance(p, DTensor) and (g.placements != p.placements or g.device_mesh != p.device_mesh):
            g = g.redistribute(p.device_mesh, p.placements)
        elif any(placement.is_partial() for placement in g.placements):
            g = g.redistribute(placements=[Replicate()] * g.device_mesh.ndim)
        g = g.to_local()
    return g.coalesce().values() if g.is_sparse else g


def _summed(x: Tensor | None, p: float) -> Tensor:
    """Give what the ranks that share a gradient add up: the sum of its p-th powers; for an infinite p its extreme."""
    if x is None or x.numel() == 0:
        return torch.tensor(math.inf if p == -math.inf else 0.0)
    low = x.dtype in (torch.float16, torch.bfloat16)  # their norm may be larger than what they can hold
    norm: Tensor = torch.linalg.vector_norm(x, p, dtype=torch.float32 if low else None)
    return norm if p == 0 or math.isinf(p) else norm.to(_wide(norm.device)).pow(p)


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _reduce(sums: Tensor, members: list[int], group: dist.ProcessGroup, p: float) -> None:
    """Add up the sums of some parameters over a group, in place; largest or smallest ones for an infinite p."""
    at = torch.tensor(members, device=sums.device)
    mine = sums[at]
    if not math.isinf(p):
        dist.all_reduce(mine, group=group)
        sums[at] = mine
        return
    # Backends differ in what the larger of a number and nan is: nan travels as a flag.
    sign = 1.0 if p > 0 else -1.0
    is_nan = mine.isnan()
    both = torch.stack([mine.masked_fill(is_nan, 0.0) * sign, is_nan.to(mine.dtype)])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    sums[at] = (both[0] * sign).masked_fill(both[1] > 0, math.nan)
