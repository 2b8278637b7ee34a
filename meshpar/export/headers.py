"""Which tensors a checkpoint of Hugging Face has, and where their bytes lie: headers and the index, read and checked.

Invariant: nothing of a file is believed before it is checked. Its tensors lie side by side from the header to the end,
each as large as its dtype and shape say; an index names files of its own folder. Only JSON is parsed, no code can run.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshpar.errors import CheckpointError, explain
from meshpar.export.plan import DTYPES, INDEX, SINGLE, torch_dtype

MAX_HEADER_BYTES = 100_000_000
"""The longest header that a reader takes, as safetensors has it."""

_SHOWN = 5
_ITEM_BYTES = {name: item_bytes for name, _, item_bytes in DTYPES}


@dataclass(frozen=True)
class Stored:
    """Hold where a tensor lies.

    Args:
        file: path of the file.
        dtype: its dtype, as torch names it.
        shape: its shape.
        begin: the byte of the file at which it begins.
    """

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


@dataclass(frozen=True)
class Checkpoint:
    """Hold the tensors of a checkpoint by name, and the sizes of its files."""

    tensors: dict[str, Stored]
    sizes: dict[str, int]

    def digest(self) -> str:
        """Give what tells this checkpoint from others, wherever its folder is mounted."""
        told = [
            *(f"{os.path.basename(file)} {size}" for file, size in sorted(self.sizes.items())),
            *(
                f"{name} {os.path.basename(t.file)} {t.dtype} {t.shape} {t.begin}"
                for name, t in sorted(self.tensors.items())
            ),
        ]
        return hashlib.blake2b("\n".join(told).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def find_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the headers of a checkpoint: of a folder, of one file, or of the files of an index.

    Raises:
        CheckpointError: there is none, files are missing, or one is damaged.
    """
    root = Path(path)
    if root.is_file():
        return _of_index(root) if root.suffix == ".json" else _of_files([root])
    index, single = root / INDEX, root / SINGLE
    if index.is_file():
        if single.is_file() and set(_weight_map(index).values()) != {SINGLE}:
            got = f"{SINGLE} and an {INDEX} of other files, in {root}"
            needs, fix = "one checkpoint in a folder", "remove the old one, or give the path of the file that is meant"
            raise CheckpointError(explain("load_hf: which checkpoint?", got=got, needs=needs, fix=fix))
        return _of_index(index)
    if single.is_file():
        return _of_files([single])
    files = sorted(root.glob("*.safetensors")) if root.is_dir() else []
    if len(files) == 1:
        return _of_files(files)
    if not root.exists():
        got = "no such folder"
    elif files:
        got = f"{len(files)} files and no index, e.g. {[file.name for file in files[:3]]}"
    else:
        names = sorted(entry.name for entry in root.iterdir()) if root.is_dir() else []
        got = f"{len(names)} other entries, e.g. {names[:3]}" if names else "nothing in it"
    needs, fix = f"{SINGLE}, or {INDEX} and its files", "check the path, on every rank"
    raise CheckpointError(explain(f"load_hf: no checkpoint in {root}.", got=got, needs=needs, fix=fix))


def _damaged(path: Path, got: str | Iterable[str], needs: str) -> CheckpointError:
    fix = "copy the file again, or export it again"
    return CheckpointError(explain(f"load_hf: {path} is damaged.", got=got, needs=needs, fix=fix))


def _of_files(files: Iterable[Path]) -> Checkpoint:
    tensors: dict[str, Stored] = {}
    sizes: dict[str, int] = {}
    for file in files:
        found, sizes[str(file)] = read_header(file)
        tensors.update(found)
    return Checkpoint(tensors, sizes)


def _of_index(index: Path) -> Checkpoint:
    weight_map = _weight_map(index)
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        got = [f"{name}: missing" for name in missing[:_SHOWN]]
        raise _damaged(index, got, "all files that the index names, in its folder")
    found: dict[str, dict[str, Stored]] = {}
    sizes: dict[str, int] = {}
    for file in files:
        found[file.name], sizes[str(file)] = read_header(file)
    wrong = [f"{name}: not in {file}" for name, file in weight_map.items() if name not in found[file]]
    listed = set(weight_map)
    wrong += [
        f"{name}: in {file}, not in the index"
        for file, tensors in found.items()
        for name in tensors
        if name not in listed
    ]
    if wrong:
        raise _damaged(index, wrong[:_SHOWN], "an index of the tensors that its files have")
    return Checkpoint({name: found[file][name] for name, file in weight_map.items()}, sizes)


def _weight_map(index: Path) -> dict[str, str]:
    needs = 'JSON with "weight_map": {name of a tensor: name of a file in this folder}'
    told = _parsed(index, index.read_bytes(), needs)
    found = told.get("weight_map")
    if not isinstance(found, dict) or not found:
        raise _damaged(index, "no weight_map", needs)
    bad = [
        f"{name!r}: {file!r}" for name, file in found.items() if not isinstance(file, str) or not _is_plain_name(file)
    ]
    if bad:
        raise _damaged(index, bad[:_SHOWN], needs)
    return found


def _is_plain_name(name: str) -> bool:
    return name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


def _parsed(path: Path, text: bytes, needs: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            message = "a name that is there twice"
            raise ValueError(message)
        return found

    try:
        told = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {str(error)[:200]}", needs) from error
    if not isinstance(told, dict):
        raise _damaged(path, f"a {type(told).__name__}", needs)
    return told


def read_header(path: Path) -> tuple[dict[str, Stored], int]:
    """Read the header of a file: its tensors, and the size of the file.

    Raises:
        CheckpointError: the header is not one, or does not fit the file.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            got = f"{size} bytes, with a header of {length}" if size >= 8 else f"{size} bytes"
            needs = f"8 bytes, a header of at most {MAX_HEADER_BYTES} bytes, and the tensors"
            raise _damaged(path, got, needs)
        text = file.read(length)
    needs = 'a header in JSON: {name: {"dtype", "shape", "data_offsets"}}'
    if len(text) != length or text[:1] != b"{":
        raise _damaged(path, f"{len(text)} of {length} bytes that begin with {text[:1]!r}", needs)
    told = _parsed(path, text, needs)
    metadata = told.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, "__metadata__ of other things than texts", needs)
    wrong = list(_troubles(told))
    if wrong:
        raise _damaged(path, wrong[:_SHOWN], needs)
    end = 0
    for name, t in sorted(told.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        begin, stop = t["data_offsets"]
        if begin != end:
            how = "overlaps what is before it" if begin < end else "leaves a gap before it"
            raise _damaged(path, f"{name}: bytes {begin} to {stop}, {how}", "tensors side by side, from byte 0")
        end = stop
    start = 8 + length
    if start + end != size:
        got = f"{size} bytes, of which {start} are the header and {end} belong to tensors"
        raise _damaged(path, got, "the bytes of all tensors, and no others")
    return {name: _stored(str(path), t, start) for name, t in told.items()}, size


def _troubles(told: dict[str, Any]) -> Iterator[str]:
    """Say which tensors of a header are not described as they must be."""
    for name, t in told.items():
        if not isinstance(t, dict) or set(t) != {"dtype", "shape", "data_offsets"}:
            yield f"{name}: not a dtype, a shape and data_offsets"
            continue
        dtype, shape, offsets = t["dtype"], t["shape"], t["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
            yield f"{name}: dtype {str(dtype)[:20]!r}"
        elif not _are_sizes(shape) or len(shape) > 64:
            yield f"{name}: shape {str(shape)[:60]}"
        elif not _are_sizes(offsets) or len(offsets) != 2:
            yield f"{name}: data_offsets {str(offsets)[:60]}"
        elif dtype == "F4" and (not shape or shape[-1] % 2):
            yield f"{name}: F4 of shape {tuple(shape)}, which fills no whole bytes"
        else:
            begin, stop = offsets
            needed = _num_bytes(dtype, shape)
            if stop - begin != needed:
                yield f"{name}: {stop - begin} bytes for {tuple(shape)} of {dtype}, which takes {needed}"


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _num_bytes(dtype: str, shape: list[int]) -> int:
    num_bytes = math.prod(shape) * _ITEM_BYTES[dtype]
    return num_bytes // 2 if dtype == "F4" else num_bytes


def _stored(file: str, t: dict[str, Any], start: int) -> Stored:
    shape = list(t["shape"])
    if t["dtype"] == "F4":  # two to a byte: the format counts numbers, torch counts bytes
        shape[-1] //= 2
    return Stored(file, torch_dtype(t["dtype"]), tuple(shape), start + t["data_offsets"][0])
