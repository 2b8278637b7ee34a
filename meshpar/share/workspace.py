"""A shared folder through which ranks pass configs and weights: one state file a rank.

Invariant: a file under its final name is complete (written aside, synced, renamed), and reading one never runs code.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshpar.disk import sync_folder
from meshpar.errors import ShareError, SpecError, explain
from meshpar.share.packing import passable, safe_load

_ASIDE = ".writing"


class NFSWorkspace:
    """Pass configs and weights through a folder that all ranks share.

    There is no communication and no barrier in it: the callers synchronise, after the workspace is made and between a
    write and the reads of it. A folder is for one job at a time.

    Args:
        workspace_path: the folder; rank 0 makes it. None: the workspace is not initialized, and cannot be used.

    Raises:
        ShareError: the folder cannot be made, or the old state of this rank not be removed.

    Example:
        >>> import tempfile
        >>> import torch
        >>> workspace = NFSWorkspace(tempfile.mkdtemp())
        >>> workspace.write_configs_and_weights({"layers": 2}, {"w": torch.ones(2, 3)})
        >>> config, weights = workspace.read_configs_and_weights_from_rank(0)
        >>> config, tuple(weights["w"].shape)
        ({'layers': 2}, (2, 3))
        >>> workspace.read_configs_and_weights_from_rank(1)
        (None, None)
    """

    def __init__(self, workspace_path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if workspace_path is None else Path(workspace_path)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        if self.path is None:
            return
        try:
            if self.rank == 0:
                self.path.mkdir(parents=True, exist_ok=True)
            self._remove_own()
        except OSError as error:
            needs, fix = "a folder that every rank can write into", "check the path and its permissions"
            text = explain(f"workspace {self.path}: cannot be used.", got=str(error), needs=needs, fix=fix)
            raise ShareError(text) from error

    @property
    def is_initialized(self) -> bool:
        """Tell whether there is a folder."""
        return self.path is not None

    def write_configs_and_weights(self, config_json: Any, weights: Mapping[str, Tensor]) -> None:
        """Write the state of this rank, in the place of an older one.

        Args:
            config_json: dicts, lists and tuples of plain values.
            weights: tensors by name.

        Raises:
            SpecError: the workspace has no folder, or there is something else in the arguments.
            ShareError: the folder is not there, too small for the bytes, or refuses them; the older state is as it was.
        """
        write_state(self._file(self.rank), {"config": config_json, "weights": dict(weights)})

    def read_configs_and_weights_from_rank(self, target_rank: int) -> tuple[Any, dict[str, Tensor] | None]:
        """Read the state of a rank.

        Returns:
            Its config and its weights, on the CPU; (None, None) where it has written none.

        Raises:
            SpecError: the workspace has no folder.
            ShareError: the file is damaged, or holds something else than plain values and tensors.
        """
        file = self._file(target_rank)
        try:
            with file.open("rb") as opened:
                state = safe_load(opened, str(file))
        except FileNotFoundError:
            return None, None
        except OSError as error:
            needs, fix = "a file that this rank can read", "check the permissions"
            raise ShareError(explain(f"{file}: cannot be read.", got=str(error), needs=needs, fix=fix)) from error
        if type(state) is not dict or set(state) != {"config", "weights"}:
            got, needs, fix = f"a {type(state).__name__}", "a file of write_configs_and_weights", "another folder"
            raise ShareError(explain(f"{file}: is no state of a rank.", got=got, needs=needs, fix=fix))
        return state["config"], state["weights"]

    def _file(self, rank: int) -> Path:
        if self.path is None:
            needs, fix = "a folder", "NFSWorkspace(workspace_path)"
            got = "workspace_path=None"
            raise SpecError(explain("workspace: is not initialized.", got=got, needs=needs, fix=fix))
        return self.path / f"rank_{rank}_state.pth"

    def _remove_own(self) -> None:
        """Remove what an earlier run of this rank has left: its state, and files that it was killed in writing."""
        mine = self._file(self.rank)
        mine.unlink(missing_ok=True)
        for path in mine.parent.glob(f"{mine.name}.*{_ASIDE}"):
            path.unlink(missing_ok=True)


def write_state(file: Path, state: Any) -> int:
    """Write a state aside, sync it, and rename it; give its size in bytes.

    Raises:
        SpecError: it holds something else than tensors and plain values.
        ShareError: there is no room, or the folder refuses it; nothing is left of it.
    """
    held = 0

    def alone(x: Tensor, _path: Any) -> Tensor:  # torch.save writes the whole storage of a view
        nonlocal held
        held += x.numel() * x.element_size()
        return x if x.untyped_storage().nbytes() == x.numel() * x.element_size() else x.clone()

    ready = passable(state, "state", alone)
    aside = file.with_name(f"{file.name}.{uuid.uuid4().hex}{_ASIDE}")
    what = f"{file}: cannot be written."
    try:
        free = shutil.disk_usage(file.parent).free
        if held > free:
            needs, fix = f"{held} bytes", "another folder"
            raise ShareError(explain(what, got=f"{free} bytes are free", needs=needs, fix=fix))
        with aside.open("xb") as opened:
            torch.save(ready, opened)
            opened.flush()
            os.fsync(opened.fileno())
            size_bytes = opened.tell()
        aside.replace(file)
        sync_folder(file.parent)
    except (OSError, RuntimeError) as error:
        if isinstance(error, ShareError):
            raise
        needs = f"a folder that this rank can write {held} bytes into"
        fix = "make the workspace on rank 0 before other ranks write, and check permissions and space"
        raise ShareError(explain(what, got=str(error).splitlines()[0], needs=needs, fix=fix)) from error
    finally:
        aside.unlink(missing_ok=True)
    return size_bytes
