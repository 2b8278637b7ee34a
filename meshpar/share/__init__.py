"""Passing tensors and configs from ranks to the first of them, through shared memory or a shared folder."""

from meshpar.share.gathers import get_configs_parallel, get_tensors_parallel
from meshpar.share.workspace import NFSWorkspace

__all__ = ["NFSWorkspace", "get_configs_parallel", "get_tensors_parallel"]
