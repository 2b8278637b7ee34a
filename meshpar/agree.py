"""What ranks tell each other before they act: whether they hold the same thing, and whether all are there.

Invariant: every rank of the mesh hears the same answers and so comes to the same verdict; an error is raised on all of
them. Digests and shapes travel, never data.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshpar import private, record, runtime
from meshpar.errors import PeerError, SpecError, explain
from meshpar.mesh import coordinates, ranks_of
from meshpar.peers import who_is_gone
from meshpar.trees import leaves

SAMPLES = ("data",)
"""The axes whose ranks load different samples."""

SHOWN = 5
"""How many differences an error lists."""


def heard(mine: Tensor, group: dist.ProcessGroup | None, num_ranks: int, axis: str, op: str) -> Tensor:
    """Give the rows of all ranks of a group, one below the other.

    Args:
        mine: one row of integers, as long on every rank.
        group: process group; None is all ranks.
        num_ranks: its size.
        axis: its name, for the record and errors.
        op: what asks, for the record and errors.

    Communication:
        One all-gather.

    Raises:
        PeerError: a rank died or did not come within the timeout of the group.
    """
    everyone = torch.empty(num_ranks * mine.numel(), dtype=mine.dtype, device=mine.device)
    record.note(record.here(op), "batch", axis, mine.numel() * mine.element_size() * (num_ranks - 1))
    try:
        private.all_gather(everyone, mine, group)
    except RuntimeError as error:
        told = str(error).splitlines()
        gone = who_is_gone(error)
        raise PeerError(
            explain(
                f"{op}: not all ranks came.",
                got=[f"rank {dist.get_rank()} waited for the other ranks (axis {axis})", *gone, *told[:1]],
                needs="every rank to take the same number of steps, with a batch in each",
                fix="look for the first error among the ranks; go over the data with meshpar.in_step(loader, mesh), or "
                "DataSampler, and no rank ends its loop before the others",
            )
        ) from error
    return everyone.view(num_ranks, -1)


def hear_all(mine: Tensor, mesh: DeviceMesh, op: str) -> Tensor:
    """Give the rows of all ranks of a mesh, in the order of its ranks.

    Communication:
        One all-gather; one an axis where the mesh is not the whole job.
    """
    mine = mine.reshape(-1).to(runtime.local_device(mesh.device_type))
    if mesh.size() == 1:
        return mine.view(1, -1)
    if mesh.size() == dist.get_world_size():
        return heard(mine, None, mesh.size(), "mesh", op)[mesh.mesh.flatten().to(mine.device)]
    num = mine.numel()
    for index in reversed(range(mesh.ndim)):
        if mesh.size(index) > 1:
            axis = (mesh.mesh_dim_names or ())[index]
            mine = heard(mine.reshape(-1), mesh.get_group(index), mesh.size(index), axis, op)
    return mine.view(mesh.size(), num)


def hear_texts(text: str, mesh: DeviceMesh, op: str) -> list[str]:
    """Give the texts of all ranks of a mesh, in the order of its ranks.

    Communication:
        The lengths, then the texts, by `hear_all`.
    """
    data = text.encode()
    sizes = hear_all(torch.tensor([len(data)], dtype=torch.int64), mesh, op).flatten().tolist()
    room = torch.zeros(max(sizes), dtype=torch.uint8)
    room[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = hear_all(room, mesh, op).cpu()
    return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]


def same_everywhere(what: str, facts: Mapping[str, Any], mesh: DeviceMesh, *, fix: str) -> None:
    """Check that all ranks of a mesh have the same facts.

    Raises:
        SpecError: they differ; on all ranks.
    """
    if mesh.size() == 1:
        return
    texts = hear_texts(json.dumps(dict(facts)), mesh, what)
    told = [json.loads(text) for text in texts]
    ranks = ranks_of(mesh)
    wrong = [
        f"{name}={row[name]!r} on rank {rank}, {told[0][name]!r} on rank {ranks[0]}"
        for rank, row in zip(ranks, told, strict=True)
        for name in facts
        if row[name] != told[0][name]
    ]
    if wrong:
        needs = "the same on every rank"
        raise SpecError(explain(f"{what}: the ranks differ.", got=wrong[:SHOWN], needs=needs, fix=fix))


@dataclass(frozen=True)
class Told:
    """Hold what a rank tells of one leaf of its batch.

    Args:
        path: where it stands in the batch.
        kind: type, dtype and shape.
        digest: of its bytes.
        axes: along which ranks may hold different parts.
    """

    path: str
    kind: str
    digest: str
    axes: tuple[str, ...]


def told_of(path: str, x: Any, axes: Collection[str]) -> Told:
    """Tell of a leaf: its kind, and a digest of its bytes."""
    if isinstance(x, DTensor):
        kind = f"DTensor {tuple(x.shape)} {x.dtype} in {x.placements}"
        return Told(path, kind, "", tuple(axes))
    if isinstance(x, Tensor):
        kind = f"{type(x).__name__} {tuple(x.shape)} {x.dtype} {x.layout}".removesuffix(" torch.strided")
        return Told(path, kind, _digest(*map(_bytes_of, _dense_parts(x))), tuple(axes))
    if hasattr(x, "__array__") and hasattr(x, "dtype") and getattr(x.dtype, "kind", "O") != "O":
        import numpy as np

        array = np.asarray(x)
        data = np.ascontiguousarray(array)
        kind = f"{type(x).__name__} {tuple(array.shape)} {array.dtype}"
        return Told(path, kind, _digest(data.tobytes()), tuple(axes))
    plain = isinstance(x, str | bytes | int | float | complex | type(None) | datetime.date | datetime.timedelta)
    return Told(path, type(x).__name__, _digest(repr(x).encode()) if plain else "", tuple(axes))


def _dense_parts(x: Tensor) -> Iterable[Tensor]:
    if x.is_sparse:
        x = x.coalesce()
        return x.indices(), x.values()
    return (x.int_repr() if x.is_quantized else x.to_dense() if x.layout != torch.strided else x,)


def _bytes_of(x: Tensor) -> Any:
    if x.is_meta or x.numel() == 0:
        return b""
    flat = x.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
    return flat.view(torch.uint8).numpy()


def _digest(*parts: Any) -> str:
    total = hashlib.blake2b(digest_size=16)
    for part in parts:
        total.update(part)
    return total.hexdigest()


def compare(op: str, mine: list[Told], mesh: DeviceMesh) -> None:
    """Check that ranks hold the same leaves wherever they should.

    Communication:
        What each rank tells of its leaves, about 100 bytes a leaf, to all ranks of the mesh.

    Raises:
        SpecError: ranks differ; on all ranks of the mesh, and it names those that do.
    """
    if mesh.size() == 1:
        return
    texts = hear_texts(json.dumps([[t.path, t.kind, t.digest, t.axes] for t in mine]), mesh, op)
    ranks = ranks_of(mesh)
    names = mesh.mesh_dim_names or ()
    everyone = {rank: {row[0]: row for row in json.loads(text)} for rank, text in zip(ranks, texts, strict=True)}
    axes_of = {path: row[3] for rows in everyone.values() for path, row in rows.items()}
    wrong: list[str] = []
    for path, axes in axes_of.items():
        first: dict[tuple[int, ...], int] = {}
        for rank in ranks:
            where = coordinates(mesh, rank)
            key = tuple(c for axis, c in zip(names, where, strict=True) if axis in axes)
            reference = first.setdefault(key, rank)
            found, expected = everyone[rank].get(path), everyone[reference].get(path)
            if found != expected:
                place = ", ".join(f"{axis} {c}" for axis, c in zip((a for a in names if a in axes), key, strict=True))
                wrong.append(f"{place or 'mesh'}, {path or 'batch'}: {_difference(rank, found, reference, expected)}")
    if wrong:
        more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        raise SpecError(
            explain(
                f"{op}: ranks that should hold the same samples do not.",
                got=[*wrong[:SHOWN], *more],
                needs="the same on all ranks of one data coordinate",
                fix='seed and index what loads the data by meshpar.coordinate(mesh, "data"), as DataSampler does; '
                "random augmentations too",
            )
        )


def _difference(rank: int, found: list[Any] | None, reference: int, expected: list[Any] | None) -> str:
    if found is None or expected is None:
        return f"rank {rank if found is None else reference} has none, rank {reference if found is None else rank} has"
    if found[1] != expected[1]:
        return f"rank {rank} has {found[1]}, rank {reference} has {expected[1]}"
    return f"rank {rank} has other values than rank {reference} ({found[1]})"


def check_same_samples(batch: Any, mesh: DeviceMesh) -> None:
    """Check that all ranks of one data coordinate hold the same batch, bit by bit.

    Args:
        batch: what this rank loaded: tensors, arrays, numbers, strings, dates, in any tree.
        mesh: mesh of `make_mesh`.

    Communication:
        About 100 bytes for each tensor, to all ranks. The digest reads every byte of the batch on the CPU.

    Raises:
        SpecError: ranks of one data coordinate differ in values, shapes, dtypes or structure; on all ranks.

    Example:
        >>> import meshpar, torch
        >>> check_same_samples({"x": torch.zeros(2, 3), "name": "a"}, meshpar.make_mesh("data=1"))
    """
    compare("check_same_samples", [told_of(path, x, SAMPLES) for path, x in leaves(batch)], mesh)


def teller(found: list[Told]) -> Callable[[Any, str], None]:
    """Give a function that tells of the leaves that are no tensors, into a list."""
    return lambda x, path: found.append(told_of(path, x, SAMPLES))
