"""The folders of checkpoints: their names, which of them are complete, and how one becomes so.

Invariant: a folder under its final name is complete: it was written and synced under another name, and renamed. At no
moment is there none complete once there was one: older ones go only when a newer one is there, and go under another
name first. What is newest is decided by the number in the name, which counts saves, not steps: who goes back to an
earlier step and trains on keeps what was saved last.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshpar.disk import sync_folder
from meshpar.errors import CheckpointError, explain

MANIFEST = "meshpar.json"
"""The file that tells what a folder holds, and the size of each of its files."""

FORMAT = 1
"""The version of the layout of a folder."""

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_SAVING, _REMOVING = ".saving-", ".removing-"


@dataclass(frozen=True)
class Saved:
    """Hold where a complete checkpoint lies, of which step, and which save it was."""

    path: Path
    step: int
    number: int


def list_checkpoints(folder: str | os.PathLike[str]) -> list[Saved]:
    """List the complete checkpoints of a folder, the newest last; none where there is no such folder.

    Example:
        >>> list_checkpoints("/no/such/folder")
        []
    """
    found = []
    for path in sorted(Path(folder).glob("*-step-*")):
        match = _NAME.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            found.append(Saved(path, int(match[2]), int(match[1])))
    return sorted(found, key=lambda saved: saved.number)


def latest_checkpoint(folder: str | os.PathLike[str]) -> Saved | None:
    """Give the newest complete checkpoint of a folder, None where there is none."""
    found = list_checkpoints(folder)
    return found[-1] if found else None


def begin(folder: Path, step: int) -> tuple[Path, Saved]:
    """Make the folder under whose name a checkpoint is written, and say what it will be called.

    What killed saves have left is removed: a save is the only one of its folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name.removeprefix(_SAVING).removeprefix(_REMOVING))
        number = max(number, int(match[1]) + 1) if match else number
        if match and path.name.startswith((_SAVING, _REMOVING)):
            shutil.rmtree(path)
    name = f"{number:06d}-step-{step}"
    temporary = folder / f"{_SAVING}{name}"
    temporary.mkdir()
    return temporary, Saved(folder / name, step, number)


def commit(temporary: Path, saved: Saved, manifest: dict[str, Any]) -> None:
    """Make a folder complete: list its files, sync, and rename it."""
    files = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
    told = {"format": FORMAT, "step": saved.step, "number": saved.number, **manifest, "files": files}
    write_synced(temporary / MANIFEST, json.dumps(told, indent=1).encode())
    sync_folder(temporary)
    temporary.rename(saved.path)
    sync_folder(saved.path.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file, down to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest checkpoints."""
    for saved in list_checkpoints(folder)[:-keep]:
        going = folder / f"{_REMOVING}{saved.path.name}"
        saved.path.rename(going)
        shutil.rmtree(going)


def find(folder: Path, step: int | None) -> Path:
    """Give the checkpoint to load: the folder itself, the newest in it, or the newest of a step.

    Raises:
        CheckpointError: there is none; the text says what is there instead.
    """
    if (folder / MANIFEST).is_file():
        return folder
    found = [saved for saved in list_checkpoints(folder) if step is None or saved.step == step]
    if found:
        return found[-1].path
    fix = "check the path; save_checkpoint makes such a folder"
    if not folder.exists():
        got = "no such folder"
    elif not folder.is_dir():
        got = "a file"
    elif steps := sorted({saved.step for saved in list_checkpoints(folder)}):
        got, fix = f"no step {step}, but steps {steps}", f"step={steps[-1]}"
    else:
        names = sorted(path.name for path in folder.iterdir())
        half = [name for name in names if name.startswith(_SAVING)]
        got = "an empty folder" if not names else f"{len(names)} other entries, e.g. {names[:3]}"
        if half:
            got, fix = f"a save that did not end: {half}", "start from the beginning: no save was ever complete"
        elif ".metadata" in names:
            got, fix = (
                "a checkpoint of torch.distributed.checkpoint itself",
                "read it with torch.distributed.checkpoint",
            )
    needs = "a folder of save_checkpoint, on every rank"
    raise CheckpointError(explain(f"load_checkpoint: no checkpoint in {folder}.", got=got, needs=needs, fix=fix))


def read_manifest(path: Path) -> dict[str, Any]:
    """Read what a checkpoint holds, and check that its files are there with their sizes.

    Raises:
        CheckpointError: files are missing or have other sizes, or the manifest is not one.
    """
    what = f"load_checkpoint: {path} is damaged."
    try:
        told = json.loads((path / MANIFEST).read_text())
        files, version = told["files"], told["format"]
    except (ValueError, KeyError, TypeError) as error:
        needs, fix = f"a {MANIFEST} as save_checkpoint writes it", "load an older one"
        raise CheckpointError(explain(what, got=f"{type(error).__name__}: {error}", needs=needs, fix=fix)) from error
    if version != FORMAT:
        needs = f"format {FORMAT}"
        raise CheckpointError(
            explain(what, got=f"format {version!r}", needs=needs, fix="use the meshpar that wrote it")
        )
    wrong = []
    for name, size in files.items():
        file = path / name
        have = file.stat().st_size if file.is_file() else None
        if have != size:
            wrong.append(f"{name}: {'missing' if have is None else f'{have} bytes'}, {size} bytes were written")
    if wrong:
        needs, fix = "the files as they were written", f"load an older one: {_others(path)}"
        raise CheckpointError(explain(what, got=wrong[:5], needs=needs, fix=fix))
    return dict(told)


def _others(path: Path) -> str:
    steps = [f"step={saved.step}" for saved in list_checkpoints(path.parent) if saved.path != path]
    return ", ".join(steps[-3:]) or "there is none"
