"""Reading only one's own rows: of zarr arrays, NetCDF by xarray, HDF5, memory maps, whatever slices like NumPy.

Invariant: a rank asks its source for nothing but its own piece, in slices alone, and what it gets is the piece of the
canonical layout. No communication: every rank knows from the global shape what is its own.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from meshpar import pieces
from meshpar.batch import check_mesh, placements_of
from meshpar.errors import SpecError, explain
from meshpar.spec import DOMAIN

Index = int | slice | Sequence[int]


def rows_layout(num_dims: int, mesh: DeviceMesh) -> str:
    """Give the layout of an array that none was named for: rows (dim -2), columns (-1), depth (-3), no samples."""
    tokens = ["_"] * num_dims
    for axis, dim in DOMAIN.items():
        if axis in pieces.axes_of(mesh) and num_dims >= max(2, -dim):
            tokens[dim] = axis
    return " ".join(tokens)


def shard_slices(shape: Sequence[int], mesh: DeviceMesh, layout: str | None = None) -> tuple[slice, ...]:
    """Give this rank's own part of an array of a global shape: a slice for each dim.

    Args:
        shape: global shape, e.g. (C, H, W).
        mesh: mesh of `make_mesh`.
        layout: layout string, for each dim the axis that shards it; by default the domain axes alone: rows (dim -2),
            and columns (-1) and depth (-3) where the mesh has axes for them. Name `data` to share out samples too.

    Raises:
        SpecError: a layout that does not fit.

    Example:
        >>> import meshpar
        >>> shard_slices((3, 37, 49), meshpar.make_mesh("domain=1"))
        (slice(0, 3, None), slice(0, 37, None), slice(0, 49, None))
    """
    check_mesh("shard_slices", mesh)
    sizes = [operator.index(n) for n in shape]
    spans = [(0, n) for n in sizes]
    placements = placements_of(rows_layout(len(sizes), mesh) if layout is None else layout, mesh, len(sizes))
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            start, stop = spans[placement.dim]
            a, b = pieces.my_chunk(mesh, axis, stop - start)
            spans[placement.dim] = (start + a, start + b)
    return tuple(slice(a, b) for a, b in spans)


def read_rows(
    source: Any,
    mesh: DeviceMesh,
    index: Index | tuple[Index, ...] = (),
    *,
    layout: str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Read this rank's own part of `source[index]`, and nothing else.

    Args:
        source: an array with a `shape` that slices like NumPy: a zarr array, an xarray variable of a NetCDF file (which
            is decoded: scale, offset, NaN for what is missing), an h5py dataset, a memory map, an array.
        mesh: mesh of `make_mesh`.
        index: which of the first dims to read: an integer (the dim is gone), a slice, or a list of integers; all of
            the dims that are not named.
        layout: of `source[index]`; by default the domain axes alone, see `shard_slices`.
        dtype: of the result; by default that of the source, in the byte order of this machine.

    Returns:
        A plain tensor in memory of its own, this rank's piece: local shape (..., H/domain, W). Batches of such pieces
        go into `shard_batch(x, mesh, rows="local")`.

    Raises:
        SpecError: a source, an index or a layout that cannot be used, or values that are no numbers.

    Example:
        >>> import numpy as np, meshpar
        >>> years = np.zeros((240, 37, 49), dtype=">f4")
        >>> read_rows(years, meshpar.make_mesh("domain=1"), [3, 7]).shape
        torch.Size([2, 37, 49])
    """
    check_mesh("read_rows", mesh)
    picks, shape = _picked(source, index)
    return _read(source, mesh, picks, shape, layout, dtype)


def read_sharded(
    source: Any,
    mesh: DeviceMesh,
    index: Index | tuple[Index, ...] = (),
    *,
    layout: str | None = None,
    dtype: torch.dtype | None = None,
) -> DTensor:
    """Give `source[index]` as a DTensor of which each rank reads its own piece; arguments as in `read_rows`.

    Name `data` in the layout to share out samples too: the index is that of the global batch then.

    Communication:
        None.

    Example:
        >>> import numpy as np, meshpar
        >>> mesh = meshpar.make_mesh("data=1")
        >>> read_sharded(np.zeros((240, 37, 49)), mesh, [3, 7], layout="data domain _").placements
        (Shard(dim=0), Shard(dim=1), Replicate())
    """
    check_mesh("read_sharded", mesh)
    picks, shape = _picked(source, index)
    text = rows_layout(len(shape), mesh) if layout is None else layout
    piece = _read(source, mesh, picks, shape, text, dtype)
    return pieces.whole(piece, mesh, placements_of(text, mesh, len(shape)), shape)


_Pick = int | range | list[int]


def _picked(source: Any, index: Index | tuple[Index, ...]) -> tuple[list[_Pick], list[int]]:
    """Read an index: for each dim of the source the positions asked for; and the global shape of the result."""
    shape = getattr(source, "shape", None)
    if shape is None or not hasattr(source, "__getitem__") or isinstance(source, Tensor):
        raise SpecError(
            explain(
                "read_rows: not an array that can be read in slices.",
                got=f"a {type(source).__name__}",
                needs="an array with a shape, e.g. of zarr, xarray, h5py or NumPy",
                fix='one variable of the file, e.g. dataset["air_temperature"]; shard(x, mesh) for a tensor',
            )
        )
    given = index if isinstance(index, tuple) else (index,)
    if len(given) > len(shape):
        raise SpecError(_index_text(f"{len(given)} indices for {len(shape)} dims", shape))
    picks: list[_Pick] = [_pick(i, n, shape) for i, n in zip(given, shape, strict=False)]
    picks += [range(n) for n in shape[len(given) :]]
    return picks, [len(p) for p in picks if not isinstance(p, int)]


def _pick(index: Any, n: int, shape: Sequence[int]) -> _Pick:
    if isinstance(index, slice):
        return range(n)[index]
    if isinstance(index, Sequence) or (hasattr(index, "tolist") and getattr(index, "ndim", 0) == 1):
        if getattr(getattr(index, "dtype", None), "kind", "") == "b" or any(isinstance(i, bool) for i in index):
            raise SpecError(_index_text("a mask", shape))
        return [_position(i, n, shape) for i in index]
    return _position(index, n, shape)


def _position(index: Any, n: int, shape: Sequence[int]) -> int:
    try:
        i = operator.index(index)
    except TypeError:
        raise SpecError(_index_text(f"an index of {type(index).__name__}", shape)) from None
    if isinstance(index, bool) or not -n <= i < n:
        raise SpecError(_index_text(f"index {index!r} of a dim of {n}", shape))
    return i % n


def _index_text(got: str, shape: Sequence[int]) -> str:
    return explain(
        "read_rows: this index cannot be read.",
        got=f"{got}; the source has shape {tuple(shape)}",
        needs="for the first dims an integer, a slice, or a list of integers that are there",
        fix="e.g. index=[3, 7], or index=(slice(0, 4), 2)",
    )


def _read(
    source: Any,
    mesh: DeviceMesh,
    picks: list[_Pick],
    shape: list[int],
    layout: str | None,
    dtype: torch.dtype | None,
) -> Tensor:
    own = iter(shard_slices(shape, mesh, layout))
    picks = [p if isinstance(p, int) else p[next(own)] for p in picks]
    return _to_tensor(_fetched(source, picks), dtype)


def _fetched(source: Any, picks: list[_Pick]) -> Any:
    """Read positions of each dim by slices alone: lists mean other things to each kind of source."""
    import numpy as np

    runs = [[p] if isinstance(p, int) else _runs(p) for p in picks]

    def read(before: tuple[Any, ...], dim: int) -> Any:
        if dim == len(picks):
            found = source[before] if before else source[()]
            array = found if isinstance(found, np.ma.MaskedArray) else np.asarray(found)
            num_dims = sum(not isinstance(run, int) for run in before)
            assert array.ndim == num_dims, f"{type(source).__name__} gave {array.ndim} dims for {before}"
            return array
        if isinstance(picks[dim], int):
            return read((*before, picks[dim]), dim + 1)
        at = sum(not isinstance(p, int) for p in picks[:dim])
        parts = []
        for run in runs[dim]:
            assert isinstance(run, range)
            turned = run[::-1] if run.step < 0 else run
            part = read((*before, slice(turned.start, turned.stop, turned.step)), dim + 1)
            parts.append(np.flip(part, at) if run.step < 0 else part)
        if len(parts) == 1:
            return parts[0]
        join = np.ma.concatenate if any(isinstance(p, np.ma.MaskedArray) for p in parts) else np.concatenate
        return join(parts, axis=at)

    return read((), 0)


def _runs(positions: range | list[int]) -> list[range]:
    """Cut positions into ranges, as few as they are; one of none for no positions.

    Example:
        >>> _runs([3, 4, 5, 9, 2])
        [range(3, 6), range(9, 10), range(2, 3)]
    """
    if isinstance(positions, range):
        return [positions if len(positions) else range(0)]
    runs: list[range] = []
    for i in positions:
        if runs and i == runs[-1].stop:
            runs[-1] = range(runs[-1].start, i + 1)
        else:
            runs.append(range(i, i + 1))
    return runs or [range(0)]


def _to_tensor(array: Any, dtype: torch.dtype | None) -> Tensor:
    """Make a tensor of numbers of any byte order, in memory of its own."""
    import numpy as np

    if isinstance(array, np.ma.MaskedArray):
        if np.ma.is_masked(array) and array.dtype.kind not in "fc":
            raise SpecError(_values_text(f"masked values of dtype {array.dtype}, which has no NaN", "fill them first"))
        array = array.filled(np.nan) if array.dtype.kind in "fc" else array.data
    kind = array.dtype.kind
    if kind in "mM":
        if dtype != torch.int64:
            fix = "dtype=torch.int64 for nanoseconds (since 1970); or keep time stamps as they are, beside the tensors"
            raise SpecError(_values_text(f"times, {array.dtype}", fix))
        array = array.astype("timedelta64[ns]" if kind == "m" else "datetime64[ns]").view(np.int64)
    if kind not in "mMbiufc" or array.dtype.itemsize > 16 or array.dtype.char in "gG":
        fix = "read with decode_times=False" if kind == "O" else "give an array of numbers"
        raise SpecError(_values_text(f"values of dtype {array.dtype}", fix))
    native = np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True)
    made = torch.from_numpy(native)
    return made if dtype is None else made.to(dtype)


def _values_text(got: str, fix: str) -> str:
    return explain("read_rows: values that no tensor holds.", got=got, needs="numbers, or booleans", fix=fix)
