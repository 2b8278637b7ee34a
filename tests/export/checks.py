"""What tests of exports ask again and again: the same bits, and one error on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar import private
from meshpar.testing import RankError, run_ranks


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare dtype, shape and bits; of DTensors, this rank's pieces."""
    a, b = (private.piece_of(x) if isinstance(x, DTensor) else x for x in (a.detach(), b.detach()))
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def refused(kind: type, fn: Any, *args: Any, num_ranks: int = 2, **told: Any) -> str:
    """Give the text of the error of a kind that a function raises on all ranks alike."""
    with pytest.raises(RankError) as caught:
        run_ranks(fn, num_ranks, *args, **told)
    errors = caught.value.exceptions
    assert sorted(errors) == list(range(num_ranks)), caught.value
    assert {type(e) for e in errors.values()} == {kind}, errors[0]
    assert len({str(e) for e in errors.values()}) == 1
    return str(errors[0])
