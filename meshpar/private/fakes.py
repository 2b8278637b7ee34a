"""A world that is not there, for plans: tensors without values, a group without ranks.

Invariant: every change to torch is undone when its block ends; a job of several ranks never meets one.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as _c10d
import torch.utils.checkpoint
from torch._C._distributed_c10d import _register_process_group, _unregister_all_process_groups
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes


def fake_mode() -> Any:
    """Give the mode in which tensors have shapes and no values (public when `torch.compiler` names it)."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def run_kernel(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the kernel of an op of ours as it is, where fake tensors would only ask it for a shape.

    Public when `torch.library` can say so.
    """
    return op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def start_fake_group(rank: int, num_ranks: int) -> None:
    """Start a process group of which this process is the only one that is there: its collectives give own values.

    The backend is public by its name alone.
    """
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    importlib.import_module("torch.distributed._tools.fake_collectives")
    dist.init_process_group(dist.Backend.FAKE, store=dist.HashStore(), rank=rank, world_size=num_ranks)  # type: ignore[attr-defined]


@contextlib.contextmanager
def world_set_aside() -> Iterator[None]:
    """Be without the process groups of this process inside the block (public when torch has several worlds)."""
    world, first = _c10d._world, _c10d._world.default_pg
    if first is None:
        yield
        return
    named = (
        *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config"),
        *("pg_to_tag", "tags_to_pg", "pg_coalesce_state"),
    )
    tables = {name: dict(getattr(world, name)) for name in named}
    count = world.group_count
    for name in named:
        getattr(world, name).clear()
    world.group_count = 0
    _c10d._update_default_pg(None)
    _unregister_all_process_groups()
    try:
        yield
    finally:
        for name, table in tables.items():
            getattr(world, name).update(table)
        world.group_count = count
        for group, name in tables["pg_names"].items():
            _register_process_group(name, group)
        _c10d._update_default_pg(first)


@contextlib.contextmanager
def shapes_unseen() -> Iterator[None]:
    """Let DTensor work out global shapes out of sight of the modes of the caller (no public name is planned)."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    found = propagator._propagate_tensor_meta_non_cached

    def unseen(schema: Any) -> Any:
        with _disable_current_modes():
            return found(schema)

    setattr(propagator, "_propagate_tensor_meta_non_cached", unseen)  # noqa: B010 - mypy knows it as a method
    try:
        yield
    finally:
        del propagator._propagate_tensor_meta_non_cached


@contextlib.contextmanager
def quick_chunks() -> Iterator[None]:
    """Let `fully_shard` cut hollow parameters for thousands of ranks with one empty piece, not one a rank.

    Public when `fully_shard` keeps this rank's piece alone.
    """
    name = "_chunk_with_empty"
    found = getattr(_fsdp_param, name)

    def quick(x: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
        chunks = list(torch.chunk(x, num_chunks, dim=dim))
        return chunks + [x.new_empty(0)] * (num_chunks - len(chunks))

    setattr(_fsdp_param, name, quick)
    try:
        yield
    finally:
        setattr(_fsdp_param, name, found)
