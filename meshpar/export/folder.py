"""The folder of a checkpoint: what may be replaced, and how new files take the place of old ones.

Invariant: at every moment a reader finds the old checkpoint, or none, or the new one, never some of each. Files are
written in a folder of their own inside, and put in their places by renames: first what a reader begins with goes (the
index, or the only file), then the other files change, and what a reader begins with comes last. What goes is kept until
then, and comes back where a step fails. Only rank 0 does any of this.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshpar.disk import sync_folder
from meshpar.errors import CheckpointError, explain
from meshpar.export.plan import INDEX, SINGLE

STAGING = ".meshpar-export-"
"""How the names of the folders begin in which files are written."""

_OLD = "old"
_AT_A_TIME = 8 << 20
_BEGINS = (INDEX, SINGLE, "pytorch_model.bin.index.json", "pytorch_model.bin")
_WEIGHTS = re.compile(r"model-\d{5}-of-\d{5}\.safetensors|pytorch_model-\d{5}-of-\d{5}\.bin")


@dataclass
class Staging:
    """Hold the folder that will have the checkpoint, and the one in it where files are written.

    Args:
        target: the folder.
        path: the one inside.
        lock: a handle of the folder, locked until the export ends; None where its file system has no locks.
        made: the folders that were made for it, the outermost first.
    """

    target: Path
    path: Path
    lock: int | None
    made: tuple[Path, ...] = ()


def weights_in(folder: Path) -> list[str]:
    """Name the weights of a checkpoint in a folder, and their index; what a reader begins with first."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return [name for name in _BEGINS if name in names] + [name for name in names if _WEIGHTS.fullmatch(name)]


def begin(target: Path, *, overwrite: bool) -> Staging:
    """Make the folder of a checkpoint where there is none, lock it, and make the one in it where files are written.

    What killed exports have left is removed.

    Raises:
        CheckpointError: the folder is occupied, or another export is at work in it.
    """
    missing = [path for path in (target, *target.parents) if not path.exists()]
    made: list[Path] = []
    lock = None
    try:
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                made.append(path)
        if not target.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target))
        lock = _lock(target)
        held = weights_in(target)
        if held and not overwrite:
            needs, fix = "a folder without weights", "another folder, or overwrite=True, which replaces them"
            got = f"{target} has {', '.join(held[:3])}{' and more' if len(held) > 3 else ''}"
            raise CheckpointError(explain("export: the folder is occupied.", got=got, needs=needs, fix=fix))
        if lock is not None:
            for left in target.glob(f"{STAGING}*"):
                shutil.rmtree(left)
        path = target / f"{STAGING}{secrets.token_hex(8)}"
        path.mkdir()
    except BaseException:
        _unlock(lock)
        _remove_empty(made)
        raise
    return Staging(target, path, lock, tuple(made))


def _lock(target: Path) -> int | None:
    handle = os.open(target, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        needs, fix = "one export at a time in a folder", "wait for it, or take another folder"
        got = f"another export is at work in {target}"
        raise CheckpointError(explain("export: the folder is in use.", got=got, needs=needs, fix=fix)) from error
    except OSError:  # no locks here
        os.close(handle)
        return None
    return handle


def _unlock(lock: int | None) -> None:
    if lock is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked meanwhile may hold the handle, too
        os.close(lock)


def _remove_empty(made: Sequence[Path]) -> None:
    for path in reversed(made):
        with contextlib.suppress(OSError):
            path.rmdir()


def abandon(staging: Staging) -> None:
    """Remove what was written, and let the folder go; nothing here may fail.

    Old files that could not be put back are left.
    """
    left = [entry.name for entry in (staging.path / _OLD).iterdir()] if (staging.path / _OLD).is_dir() else []
    if not left:
        shutil.rmtree(staging.path, ignore_errors=True)
    _remove_empty(staging.made)
    _unlock(staging.lock)
    staging.lock = None


def check_sizes(staging: Staging, sizes: dict[str, int]) -> None:
    """Check that the files are there with their sizes.

    Raises:
        CheckpointError: one is not.
    """
    wrong = []
    for name, size in sizes.items():
        with contextlib.suppress(FileNotFoundError):
            have = (staging.path / name).stat().st_size
            if have == size:
                continue
            wrong.append(f"{name}: {have} bytes, {size} bytes were written")
            continue
        wrong.append(f"{name}: missing, {size} bytes were written")
    if wrong:
        needs, fix = "files as they were written", "look at the file system; export again"
        raise CheckpointError(explain("export: files are not as written.", got=wrong[:5], needs=needs, fix=fix))


def commit(staging: Staging) -> None:
    """Put the files in their places, for those that were there; see the module for the order.

    Raises:
        OSError: a step failed; the old files are back in their places.
        CheckpointError: a step failed, and so did the way back; it says where the old files are.
    """
    target, path = staging.target, staging.path
    new = sorted(entry.name for entry in path.iterdir())
    first = INDEX if INDEX in new else SINGLE
    old = path / _OLD
    old.mkdir()
    gone = weights_in(target)
    gone += [name for name in new if name not in gone and (target / name).exists()]
    moved: list[tuple[Path, Path]] = []
    try:
        begins = [name for name in gone if name in _BEGINS]
        for names in (begins, [name for name in gone if name not in begins]):
            for name in names:
                _move(target / name, old / name, moved)
            if names:
                sync_folder(target)
        for name in sorted(new, key=lambda name: name == first):
            if name == first:
                sync_folder(target)
            _move(path / name, target / name, moved)
        sync_folder(target)
    except BaseException as error:
        _put_back(moved, old, error)
        raise
    for made in staging.made:
        with contextlib.suppress(OSError):
            sync_folder(made.parent)
    shutil.rmtree(path, ignore_errors=True)
    _unlock(staging.lock)
    staging.lock = None


def _put_back(moved: Sequence[tuple[Path, Path]], old: Path, error: BaseException) -> None:
    for source, place in reversed(moved):
        with contextlib.suppress(OSError):
            place.rename(source)
    left = sorted(entry.name for entry in old.iterdir())
    if left:
        got = [f"{type(error).__name__}: {error}", f"{len(left)} old files are in {old}: {', '.join(left[:3])}"]
        needs, fix = "renames in the folder", "move them back by hand before the next export, which removes them"
        raise CheckpointError(explain("export: stopped half-way.", got=got, needs=needs, fix=fix)) from error


def _move(source: Path, place: Path, moved: list[tuple[Path, Path]]) -> None:
    source.rename(place)
    moved.append((source, place))


def is_large(num_bytes: int) -> bool:
    """Tell whether bytes are many enough for the system to be told to begin with them."""
    return num_bytes >= _AT_A_TIME // 8


def write_all(handle: int, data: bytes | memoryview, at: int) -> None:
    """Write bytes at a place of a file, all of them."""
    if not is_large(len(data)) and os.pwrite(handle, data, at) == len(data):
        return  # the usual end, and quick: rows of columns are many
    view = memoryview(data)
    while view:
        done = os.pwrite(handle, view[:_AT_A_TIME], at)
        start_writing(handle, at, done)
        view, at = view[done:], at + done


def start_writing(handle: int, at: int, num_bytes: int) -> None:
    """Let the system begin to bring many bytes of a file down to the disk, which it else does at the end alone."""
    if is_large(num_bytes) and hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(handle, at, num_bytes, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[int]:
    """Make a file and give its handle; in the end it is on the disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        yield handle
        os.fsync(handle)
    finally:
        os.close(handle)
