"""Configs as bytes: a tree of plain values without its tensors, and the tensors one after the other.

Invariant: what is packed here can be unpacked with `weights_only=True`, so unpacking never runs code; each tensor comes
back with a memory of its own size and no more, whatever storage it was a view of.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshpar.errors import ShareError, SpecError, explain

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""The types of values that may stand in a config beside tensors: those that `weights_only` loads."""

_ALIGNED = 64
"""The bytes that the start of a tensor is a multiple of."""

Path = tuple[Any, ...]


@dataclass(frozen=True)
class Parcel:
    """Hold a value as it is laid out: the bytes of its tree, then those of its tensors."""

    head: bytes
    tensors: tuple[Tensor, ...]
    offsets: tuple[int, ...]
    size_bytes: int


def plain_tensor(x: Any, where: str) -> Tensor:
    """Give a tensor as it can be passed on: on the CPU, contiguous, without its gradient.

    Raises:
        SpecError: it is no dense tensor with values.
    """
    kind = ""
    if not isinstance(x, Tensor) or type(x.detach()) is not Tensor:
        kind = f"a {type(x).__name__}"
    elif x.layout != torch.strided or x.is_quantized or x.is_meta or x.is_nested:
        odd = [name for name in ("quantized", "meta", "nested") if getattr(x, f"is_{name}")]
        kind = f"a {(odd or [str(x.layout)])[0]} tensor"
    if kind:
        needs = "a dense torch.Tensor with values"
        fix = "pass the piece (x.to_local()) or the whole (x.full_tensor()) of a DTensor; make others dense"
        raise SpecError(explain(f"{where}: cannot be passed on.", got=kind, needs=needs, fix=fix))
    return x.detach().cpu().resolve_conj().resolve_neg().contiguous()  # type: ignore[no-any-return]


def map_tree(tree: Any, leaf: Callable[[Any, Path], Any], path: Path = ()) -> Any:
    """Build a tree of dicts, lists and tuples anew, with a function of (value, path) applied to all else."""
    if type(tree) in (dict, collections.OrderedDict):
        return type(tree)((key, map_tree(value, leaf, (*path, key))) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(map_tree(value, leaf, (*path, i)) for i, value in enumerate(tree))
    return leaf(tree, path)


def passable(config: Any, where: str, take: Callable[[Tensor, Path], Any]) -> Any:
    """Build a config anew with a function of (tensor, path) applied to its tensors, made ready to be passed on.

    Raises:
        SpecError: it holds something else than tensors and plain values, each named with its path.
    """
    wrong: list[str] = []

    def leaf(value: Any, path: Path) -> Any:
        name = where + "".join(f"[{key!r}]" for key in path)
        wrong.extend(f"{name}: a key of type {type(key).__name__}" for key in path[-1:] if not _plain(key))
        if isinstance(value, Tensor):
            return take(plain_tensor(value, name), path)
        if not _plain(value):
            wrong.append(f"{name}: a {type(value).__name__}")
        return value

    built = map_tree(config, leaf)
    if wrong:
        needs = "dicts, lists and tuples of tensors, numbers, strings, bytes, dtypes, devices and None"
        fix = "turn it into those: reading runs no code, so objects of other classes cannot come back"
        raise SpecError(explain(f"{where}: cannot be passed on.", got=wrong[:5], needs=needs, fix=fix))
    return built


def _plain(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and all(map(_plain, value)))


def pack(config: Any, where: str) -> Parcel:
    """Lay out a config.

    Raises:
        SpecError: it holds something that cannot be passed on.
    """
    tensors: dict[int, Tensor] = {}
    places: list[tuple[Path, int]] = []
    originals: dict[int, int] = {}

    def note(value: Any, path: Path) -> Any:
        if isinstance(value, Tensor):
            places.append((path, originals.setdefault(id(value), len(originals))))
        return value

    map_tree(config, note)  # the same tensor in two places is passed once
    index = iter(places)

    def take(x: Tensor, _path: Path) -> None:
        tensors.setdefault(next(index)[1], x)

    tree = passable(config, where, take)
    ordered = [tensors[i] for i in range(len(tensors))]
    about = [(x.dtype, tuple(x.shape), x.numel() * x.element_size()) for x in ordered]
    buffer = io.BytesIO()
    torch.save({"tree": tree, "places": places, "tensors": about}, buffer)
    head = buffer.getvalue()
    offsets, at = [], len(head)
    for _, _, num_bytes in about:
        at = _round_up(at)
        offsets.append(at)
        at += num_bytes
    return Parcel(head, tuple(ordered), tuple(offsets), at)


def unpack(buffer: Any, head_bytes: int, size_bytes: int) -> Any:
    """Give the config that lies in a buffer; its tensors are views of the buffer, and keep it alive.

    Raises:
        ShareError: the buffer does not hold what `pack` has laid out.
    """
    told = safe_load(io.BytesIO(bytes(buffer[:head_bytes])), "a segment")
    tensors, at = [], head_bytes
    for dtype, shape, num_bytes in told["tensors"]:
        at = _round_up(at)
        if math.prod(shape) * dtype.itemsize != num_bytes or at + num_bytes > size_bytes:
            got = f"a tensor {tuple(shape)} of {num_bytes} bytes at {at} of {size_bytes}"
            needs, fix = "what a rank of this job wrote", "start again"
            raise ShareError(explain("a segment: is damaged.", got=got, needs=needs, fix=fix))
        if num_bytes:
            data = torch.frombuffer(buffer, dtype=torch.uint8, count=num_bytes, offset=at)
            tensors.append(data.view(dtype).view(shape))
        else:
            tensors.append(torch.empty(shape, dtype=dtype))
        at += num_bytes
    placed = {tuple(path): tensors[i] for path, i in told["places"]}
    return map_tree(told["tree"], lambda value, path: placed.get(path, value))


def safe_load(file: Any, where: str) -> Any:
    """Load what `torch.save` wrote, on the CPU, without running code of it.

    Raises:
        ShareError: it is cut off or damaged, or holds something else than tensors and plain values.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        got = "a pickle with something else than tensors and plain values in it; nothing of it was run"
        told = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "lobal" in line][:1]
        fix = "remove the file, and find out who wrote it"
        text = explain(f"{where}: refused.", got=[got, *told], needs="what a rank of this job wrote", fix=fix)
        raise ShareError(text) from error
    except Exception as error:
        got = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        fix = "write it again; a run that was killed leaves no half-written file under the final name"
        needs = "a complete file of torch.save"
        raise ShareError(explain(f"{where}: cannot be read.", got=got, needs=needs, fix=fix)) from error


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED
