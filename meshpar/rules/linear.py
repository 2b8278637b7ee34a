"""Products with weights over an unsharded dim: `F.linear`, and matrices from the right.

Invariant: rows and samples stay where they are; a contraction over a sharded dim is not taken here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshpar import pieces
from meshpar.rules.spatial import settle
from meshpar.spmd import gather_call, rule


@rule(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply the last dim by a weight.

    Args:
        input: global shape (..., in_features), sharded along any dims but the last.
        weight: plain, shape (out_features, in_features); all ranks hold it whole.
        bias: plain, shape (out_features,), or None.

    Returns:
        Global shape (..., out_features), placements of the input.

    Communication:
        None. A sharded last dim is gathered, and said.

    Raises:
        RuntimeError: features that do not fit, as torch does.
    """
    if not isinstance(input, DTensor) or input.dim() == 0:
        why = "the weight is an activation, the input is not"
        return gather_call(F.linear, (input, weight, bias), {}, why=why)  # type: ignore[no-any-return]
    _check(input, weight, bias)
    x = settle(input, range(input.dim() - 1), "F.linear")
    mesh, placements = x.device_mesh, x.placements
    w = pieces.companion(weight, mesh, placements)
    b = None if bias is None else pieces.companion(bias, mesh, placements)
    out = F.linear(pieces.local(x), w, b)
    return pieces.whole(out, mesh, placements, (*x.shape[:-1], *weight.shape[:-1]))


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise torch's own error for features that do not fit: an empty piece might not."""
    if x.shape[-1] != weight.shape[-1] or (bias is not None and bias.shape != weight.shape[:1]) or weight.dim() > 2:
        meta = [None if t is None else torch.empty(t.shape, dtype=t.dtype, device="meta") for t in (x, weight, bias)]
        F.linear(meta[0], meta[1], meta[2])  # type: ignore[arg-type]
