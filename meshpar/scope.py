"""`spmd()`: torch functions under the rules, outside of a model; eager, or in a graph that Dynamo traces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshpar.registry import Policy
from meshpar.spmd import Spmd
from meshpar.traced import Traced, number_of_new


@contextlib.contextmanager
def spmd(*, on_gather: str = "warn", mesh: DeviceMesh | None = None) -> Iterator[None]:
    """Put torch functions under the rules: for losses, metrics, anything done with activations outside of a model.

    Args:
        on_gather: what to do about an op without a rule: "warn", "error" or "allow".
        mesh: ranks that random numbers must agree on; all of the job by default.

    Example:
        >>> with spmd():
        ...     pass
    """
    if torch.compiler.is_compiling():
        with Traced(number_of_new(on_gather, mesh)):
            yield
    else:
        with Spmd(Policy(on_gather=on_gather, mesh=mesh)):
            yield
