"""The values that a model starts from: parameters and buffers of its own, equal on all ranks.

Invariant: the model that was given keeps its tensors; after `make_equal` every rank holds the values of rank 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar import private
from meshpar.errors import SpecError, explain
from meshpar.peers import naming

BUCKET_BYTES = 64 * 2**20
"""Size of the messages by which initial values travel."""


def own_tensors(module: nn.Module) -> None:
    """Give a rewritten module parameters and buffers of its own; ties stay ties."""
    memo: dict[int, Tensor] = {}
    odd = [f"{name}: a {type(p).__name__}" for name, p in module.named_parameters() if type(p) is not nn.Parameter]
    if odd:
        raise SpecError(
            explain(
                "parallelize: parameters of a kind that cannot be made parallel.",
                got=odd[:5],
                needs="plain parameters, initialised, as on one process",
                fix="initialise lazy modules by a forward first; give the model before any other wrapper",
            )
        )
    for owner in module.modules():
        for name, p in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if id(p) not in memo:
                memo[id(p)] = _twin(p)
            setattr(owner, name, memo[id(p)])
        for name, b in list(owner.named_buffers(recurse=False, remove_duplicate=False)):
            if id(b) not in memo:
                memo[id(b)] = b.detach().clone()
            setattr(owner, name, memo[id(b)])


def _twin(p: nn.Parameter) -> nn.Parameter:
    # Contiguous, whatever the model has (channels_last): `fully_shard` takes no other.
    twin = nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format), requires_grad=p.requires_grad)
    twin.__dict__.update(p.__dict__)
    return twin


def make_equal(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give all ranks the parameters and buffers of rank 0; those on the meta device wait for `materialize`.

    Communication:
        A digest of the structure (an all-gather of 8 bytes), then broadcasts in buckets over all ranks of the mesh.

    Raises:
        SpecError: the ranks hold different models; on all ranks, before the broadcasts.
        PeerError: a rank died, or did not come within the timeout of the group.
    """
    _same_structure(module, mesh)
    tensors = [t for t in _distinct([*module.parameters(), *module.buffers()]) if not t.is_meta]
    bucket: list[Tensor] = []
    waiting = 0
    for t in sorted(tensors, key=lambda t: str(t.dtype)):
        if bucket and (bucket[0].dtype != t.dtype or waiting > BUCKET_BYTES):
            _broadcast(bucket, mesh)
            bucket, waiting = [], 0
        bucket.append(t)
        waiting += t.numel() * t.element_size()
    if bucket:
        _broadcast(bucket, mesh)


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(t): t for t in tensors}.values())


def _broadcast(tensors: list[Tensor], mesh: DeviceMesh) -> None:
    with torch.no_grad():
        flat = torch.cat([t.detach().reshape(-1) for t in tensors]).to(mesh.device_type)
        with naming(None, "mesh", "|parallelize"):
            dist.broadcast(torch.view_as_real(flat) if flat.is_complex() else flat, src=int(mesh.mesh.min()))
        for t, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.copy_(part.view_as(t))


def _same_structure(module: nn.Module, mesh: DeviceMesh) -> None:
    names = [*module.named_parameters(), *module.named_buffers()]
    told = repr([(name, tuple(t.shape), str(t.dtype), t.is_meta) for name, t in names])
    digest = int.from_bytes(hashlib.sha256(told.encode()).digest()[:7], "big")
    mine = torch.tensor([digest, len(names)], dtype=torch.int64, device=mesh.device_type)
    everyone = torch.empty(2 * mesh.size(), dtype=torch.int64, device=mesh.device_type)
    with naming(None, "mesh", "|parallelize"):
        private.all_gather(everyone, mine, None)
    rows = everyone.view(-1, 2).tolist()
    odd = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if odd:
        raise SpecError(
            explain(
                "parallelize: the ranks hold different models.",
                got=f"ranks {odd} differ from rank 0 in names, shapes or dtypes; rank 0 has {rows[0][1]} tensors, "
                f"rank {odd[0]} has {rows[odd[0]][1]}",
                needs="the same model on every rank (its values may differ: rank 0's are taken)",
                fix="build the model from the same configuration on all ranks",
            )
        )
