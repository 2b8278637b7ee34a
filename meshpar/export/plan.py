"""What the files of a checkpoint will be, to the byte, before any is written: their names, headers, offsets, and index.

Invariant: pure values. From the same names, dtypes and shapes in the same order every rank makes the same plan. Files
are split as `huggingface_hub` does: greedily in the order of the tensors; one that is too large for a file goes alone.
Within a file tensors lie as `safetensors` lays them, by the size of their elements and then by name, so that each is
aligned; a file is the same bytes as `safetensors.torch.save_file` would write.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshpar.errors import SpecError, explain

DTYPES = (
    *(("BOOL", "bool", 1), ("F4", "float4_e2m1fn_x2", 1), ("U8", "uint8", 1), ("I8", "int8", 1)),
    *(("F8_E5M2", "float8_e5m2", 1), ("F8_E4M3", "float8_e4m3fn", 1), ("F8_E8M0", "float8_e8m0fnu", 1)),
    *(("F8_E4M3FNUZ", "float8_e4m3fnuz", 1), ("F8_E5M2FNUZ", "float8_e5m2fnuz", 1)),
    *(("I16", "int16", 2), ("U16", "uint16", 2), ("F16", "float16", 2), ("BF16", "bfloat16", 2)),
    *(("I32", "int32", 4), ("U32", "uint32", 4), ("F32", "float32", 4)),
    *(("C64", "complex64", 8), ("F64", "float64", 8), ("I64", "int64", 8), ("U64", "uint64", 8)),
)
"""The dtypes as the format and torch name them, with the bytes of an element; in the order of the format."""

_PLACE = {name: (i, item_bytes) for i, (name, _, item_bytes) in enumerate(DTYPES)}
_NAMES = {getattr(torch, theirs): name for name, theirs, _ in DTYPES if hasattr(torch, theirs)}

INDEX = "model.safetensors.index.json"
"""The file that tells which file has which tensor, where there are several."""

SINGLE = "model.safetensors"
"""The file that has all tensors, where there is one."""

_UNITS = {
    "": 1,
    **{f"{u}B": 1000**i for i, u in enumerate("KMGT", 1)},
    **{f"{u}iB": 1024**i for i, u in enumerate("KMGT", 1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?i?B)?\s*", re.IGNORECASE)
_METADATA = {"format": "pt"}
_HEADER_BYTES = 100_000_000  # the largest header that readers take


@dataclass(frozen=True)
class Entry:
    """Hold what a file says of a tensor, less where it lies: its name, dtype (as the format names it), global shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        """Count the bytes of an element."""
        return _PLACE[self.dtype][1]

    @property
    def num_bytes(self) -> int:
        """Count the bytes of the tensor."""
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True)
class Placed:
    """Hold a tensor and the byte of its file at which it begins."""

    entry: Entry
    offset: int


@dataclass(frozen=True)
class File:
    """Hold a file: its name, how it begins, what follows without a gap, and its size."""

    name: str
    header: bytes
    tensors: tuple[Placed, ...]
    num_bytes: int


@dataclass(frozen=True)
class Plan:
    """Hold the files of a checkpoint, the text of its index where there are several, and the bytes of all tensors."""

    files: tuple[File, ...]
    index: bytes | None
    total_bytes: int


def dtype_name(dtype: torch.dtype) -> str | None:
    """Name a dtype as the format does; None where it has no such."""
    return _NAMES.get(dtype)


def torch_dtype(name: str) -> torch.dtype:
    """Give the dtype of torch for a name of the format."""
    dtype: torch.dtype = getattr(torch, next(theirs for ours, theirs, _ in DTYPES if ours == name))
    return dtype


def size_in_bytes(size: int | str) -> int:
    """Give the bytes of a size: a number, or a text like "10GB", "512 MiB", "1000".

    Raises:
        SpecError: it is no such text, or not above 0.

    Example:
        >>> size_in_bytes("10GB"), size_in_bytes("1.5 KiB"), size_in_bytes(7)
        (10000000000, 1536, 7)
    """
    found = 0
    if isinstance(size, int) and not isinstance(size, bool):
        found = size
    elif isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        units = {unit.lower(): factor for unit, factor in _UNITS.items()} | {"b": 1}
        factor = units.get((match[2] or "").lower())
        found = int(float(match[1]) * factor) if factor else 0
    if found <= 0:
        needs = "bytes above 0, or a text in KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (of 1024)"
        raise SpecError(explain("max_shard_size: no size.", got=repr(size), needs=needs, fix='max_shard_size="10GB"'))
    return found


def split(entries: Iterable[Entry], max_bytes: int) -> list[list[Entry]]:
    """Share out tensors over files as `huggingface_hub` does.

    Example:
        >>> sizes = [6, 6, 2, 6, 2, 2]
        >>> files = split([Entry(str(i), "U8", (n,)) for i, n in enumerate(sizes)], 10)
        >>> [[entry.num_bytes for entry in file] for file in files]
        [[6], [6, 2], [6, 2, 2]]
    """
    files: list[list[Entry]] = []
    now: list[Entry] = []
    filled = 0
    for entry in entries:
        if entry.num_bytes > max_bytes:  # alone, and ahead of the file that is being filled
            files.append([entry])
            continue
        if filled + entry.num_bytes > max_bytes:
            files.append(now)
            now, filled = [], 0
        now.append(entry)
        filled += entry.num_bytes
    return [*files, now] if now or not files else files


def make_plan(entries: Sequence[Entry], max_bytes: int) -> Plan:
    """Plan the files of a checkpoint.

    Args:
        entries: the tensors, in the order of the state dict.
        max_bytes: how many bytes of tensors a file may have.

    Raises:
        SpecError: names that no file can have.
    """
    strange = [repr(e.name) for e in entries if e.name == "__metadata__" or not _is_text(e.name)]
    if strange:
        needs, fix = "names of Unicode text other than '__metadata__'", "rename these parameters"
        raise SpecError(explain("export: names that a file cannot have.", got=strange[:5], needs=needs, fix=fix))
    parts = split(entries, max_bytes)
    total_bytes = sum(e.num_bytes for e in entries)
    if len(parts) == 1:
        return Plan((_file(SINGLE, parts[0]),), None, total_bytes)
    names = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    weight_map = {entry.name: name for name, part in zip(names, parts, strict=True) for entry in part}
    told = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    files = tuple(_file(name, part) for name, part in zip(names, parts, strict=True))
    return Plan(files, (json.dumps(told, indent=2) + "\n").encode(), total_bytes)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _file(name: str, entries: Iterable[Entry]) -> File:
    told: dict[str, Any] = {"__metadata__": _METADATA}
    begins: list[tuple[Entry, int]] = []
    end = 0
    for entry in sorted(entries, key=lambda e: (-_PLACE[e.dtype][0], e.name.encode())):
        shape = list(entry.shape)
        if entry.dtype == "F4":  # two to a byte: torch counts bytes, the format counts numbers
            shape[-1] *= 2
        told[entry.name] = {"dtype": entry.dtype, "shape": shape, "data_offsets": [end, end + entry.num_bytes]}
        begins.append((entry, end))
        end += entry.num_bytes
    text = json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_BYTES:
        needs, fix = f"at most {_HEADER_BYTES} bytes of header", "a smaller max_shard_size"
        got = f"{len(text)} bytes for {len(begins)} tensors of {name}"
        raise SpecError(explain("export: a header that readers refuse.", got=got, needs=needs, fix=fix))
    header = len(text).to_bytes(8, "little") + text
    placed = tuple(Placed(entry, len(header) + begin) for entry, begin in begins)
    return File(name, header, placed, len(header) + end)
