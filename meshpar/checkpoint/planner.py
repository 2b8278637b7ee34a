"""Between DCP and the shares of a rank: what is written and read, chunk by chunk.

Invariant: a chunk has explicit offsets and sizes, from `shares`, never from what DTensor believes of uneven or strided
shards. Empty chunks are not written, large ones in parts, so that a reader needs no more memory than a part. What
several ranks hold alike is written once.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from meshpar.shares import Share, narrowed

PART_BYTES = 4 * 2**20
"""The most that is written, and read again, as one: a reader holds it twice while it unpacks it."""


@dataclass(frozen=True)
class Piece:
    """Hold what this rank has of a tensor.

    Args:
        data: its rows, detached.
        size: shape of the whole tensor.
        share: which rows they are.
        writes: whether this rank may write it: not where others have the numbers that count.
    """

    data: Tensor
    size: tuple[int, ...]
    share: Share
    writes: bool = True


def _parts(piece: Piece) -> Iterator[Share]:
    """Cut a share along its first dim into parts that are not too large."""
    offsets, sizes = piece.share.offsets, piece.share.sizes
    if piece.data.numel() == 0 and 0 not in piece.size:
        return
    rows = sizes[0] if sizes else 1
    per_row = piece.data.numel() * piece.data.element_size() // max(rows, 1)
    step = max(PART_BYTES // max(per_row, 1), 1)
    if rows <= step:
        yield piece.share
        return
    for a in range(0, rows, step):
        yield Share((offsets[0] + a, *offsets[1:]), (min(step, rows - a), *sizes[1:]))


def _within(share: Share, outer: Share) -> Share:
    return Share(tuple(a - b for a, b in zip(share.offsets, outer.offsets, strict=True)), share.sizes)


class PieceSaver(DefaultSavePlanner):
    """Plan the writing of pieces by name; what ranks share is dealt out over them by DCP."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """List the chunks of this rank."""
        items = []
        for name, piece in self.state_dict.items():
            if not piece.writes:
                continue
            properties = TensorProperties.create_from_tensor(piece.data)
            for part in _parts(piece):
                chunk = ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
                told = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(piece.size))
                items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=told))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Give the rows of a chunk."""
        piece: Piece = self.state_dict[write_item.index.fqn]
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        part = _within(Share(tuple(chunk.offsets), tuple(chunk.sizes)), piece.share)
        return narrowed(piece.data, part).contiguous()


class PieceLoader(LoadPlanner):
    """Plan the reading of pieces, into their memory.

    Args:
        pieces: where to read to, by the names of the target.
        saved_as: the name under which a tensor was saved, where it is another one (tied weights are saved once).
    """

    def __init__(self, pieces: Mapping[str, Piece], saved_as: Mapping[str, str]) -> None:
        self.pieces, self.saved_as = pieces, saved_as
        self.metadata: Metadata | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Take note of what was saved."""
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """List what this rank reads: the rows of its shares and no others."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, piece in self.pieces.items():
            if piece.data.numel() == 0:
                continue
            source = self.saved_as.get(name, name)
            told = self.metadata.state_dict_metadata[source]
            assert isinstance(told, TensorStorageMetadata)
            chunk = ChunkStorageMetadata(torch.Size(piece.share.offsets), torch.Size(piece.share.sizes))
            target = MetadataIndex(name, chunk.offsets)
            items += [
                dataclasses.replace(item, dest_index=target)
                for item in create_read_items_for_chunk_list(source, told, [chunk])
            ]
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Leave every rank to its own plan."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Take the plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse what is no tensor: nothing else is saved by DCP here."""
        raise AssertionError(read_item)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Give the memory into which rows are read."""
        piece = self.pieces[read_item.dest_index.fqn]
        return narrowed(piece.data, Share(tuple(read_item.dest_offsets), tuple(read_item.lengths)))

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the rows were read to where they belong."""


class _Metadata(pickle.Unpickler):
    """Read the metadata of DCP, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        known = (
            module == "torch.distributed.checkpoint.metadata"
            or (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
            or (module, name) in (("torch", "Size"), ("torch.serialization", "_get_layout"))
            or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
            or (module.startswith("pathlib") and name in ("Path", "PosixPath", "PurePosixPath"))
        )
        if not known:
            text = f"the metadata names {module}.{name}, which no checkpoint needs"
            raise pickle.UnpicklingError(text)
        return super().find_class(module, name)


class Reader(FileSystemReader):
    """Read from a folder as DCP does, but for a hostile pickle, which is refused."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Read which tensors there are, and where their chunks lie."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            told = _Metadata(file).load()
        assert isinstance(told, Metadata)
        told.storage_meta = told.storage_meta or StorageMeta()
        return told
