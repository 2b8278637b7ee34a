"""What several ranks hold is given to the first of them, through shared memory or a shared folder.

Invariant: the call raises on all ranks or on none, whichever of them fails and where; whoever waits is told. Nothing of
it is left when the block ends, nor when a process is killed.
"""

from __future__ import annotations

import hashlib
import operator
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshpar.errors import ShareError, SpecError, explain
from meshpar.share.channel import ENTER, HAND, LEAVE, Channel, Note, open_channel
from meshpar.share.packing import Parcel, pack, plain_tensor, safe_load
from meshpar.share.segments import read_segment, rooms, whereabouts, write_segment
from meshpar.share.workspace import write_state

_LONGEST_S = 1e8  # gloo counts milliseconds in 64 bits, Python's time spans end at some 8e13 s
_SHOWN_CHARS = 500
_VISIBLE_S = 60.0  # the time that a network file system may take to show a file that is there


@contextmanager
def get_tensors_parallel(
    tensor: Tensor, ranks: Sequence[int], group: dist.ProcessGroup | None = None, *, timeout_s: float = 1800.0
) -> Iterator[list[Tensor]]:
    """Give the first of some ranks the tensors of all of them, through shared memory.

    Args:
        tensor: what this rank passes on; any shape and dtype, other ones on other ranks, too.
        ranks: global ranks, in the order in which their tensors come; the same on each of them. They are processes of
            one host. Ranks that are not among them may make the call or not.
        group: a process group that they belong to; None is all ranks.
        timeout_s: the most seconds that one of them may come later than the others. The block may take longer.

    Returns:
        A context: on the first rank, its own tensor as it is and the others on the CPU, the first rank's to keep and to
        change; on others an empty list. After the block the list is empty, and memory goes that nobody holds.

    Communication:
        A few notes between the first rank and each other one, over a gloo group of these ranks. All leave the block
        together.

    Raises:
        SpecError: ranks or tensors that cannot be passed on.
        ShareError: no shared memory, too little memory, or a rank that raised inside its block; on all the others.
        PeerError: a rank died, or did not come.

    Example:
        >>> import torch
        >>> with get_tensors_parallel(torch.ones(2, 3), [0]) as tensors:
        ...     [tuple(x.shape) for x in tensors]
        [(2, 3)]
    """
    op = "get_tensors_parallel"

    def prepare() -> Parcel:
        return pack(plain_tensor(tensor, f"{op}: tensor"), "tensor")

    with _passed(op, tensor, prepare, ranks, group, None, timeout_s) as values:
        yield values


@contextmanager
def get_configs_parallel(
    config: Any,
    ranks: Sequence[int],
    group: dist.ProcessGroup | None = None,
    workspace_path: str | os.PathLike[str] | None = None,
    *,
    timeout_s: float = 1800.0,
) -> Iterator[list[Any]]:
    """Give the first of some ranks the configs of all of them.

    Args:
        config: dicts, lists and tuples of tensors, numbers, strings, bytes, dtypes and None; or None for none.
        ranks: global ranks, in the order in which their configs come; the same on each of them. Ranks that are not
            among them may make the call or not.
        group: a process group that they belong to; None is all ranks.
        workspace_path: a folder that all of them share, for ranks of several hosts; None is shared memory.
        timeout_s: the most seconds that one of them may come later than the others. The block may take longer.

    Returns:
        A context: on the first rank, its own config as it is (None, too), then those of the others that are not None,
        with tensors on the CPU; on others an empty list. After the block the list is empty.

    Communication:
        As `get_tensors_parallel`.

    Raises:
        SpecError: ranks or configs that cannot be passed on.
        ShareError: no shared memory, too little memory or space, a file that is not what a rank of this call wrote, or
            a rank that raised inside its block; on all the others.
        PeerError: a rank died, or did not come.

    Example:
        >>> with get_configs_parallel({"layers": 2}, [0]) as configs:
        ...     configs
        [{'layers': 2}]
    """
    op = "get_configs_parallel"

    def prepare() -> Parcel | None:
        return None if config is None else pack(config, "config")

    with _passed(op, config, prepare, ranks, group, workspace_path, timeout_s) as values:
        yield values


@contextmanager
def _passed(
    op: str,
    value: Any,
    prepare: Callable[[], Parcel | None],
    ranks: Sequence[int],
    group: dist.ProcessGroup | None,
    folder: str | os.PathLike[str] | None,
    timeout_s: float,
) -> Iterator[list[Any]]:
    order = _checked_ranks(op, ranks, group, timeout_s)
    if (dist.get_rank() if dist.is_initialized() else 0) not in order:
        yield []
        return
    channel = open_channel(op, order, timeout_s)
    try:
        with _leaving(channel):
            values = _collect(channel, value, prepare, folder)
        try:
            with _leaving(channel):
                yield values
            if not channel.is_elsewhere:
                channel.step(LEAVE, dict)
        finally:
            values.clear()
    finally:
        channel.close()


@contextmanager
def _leaving(channel: Channel) -> Iterator[None]:
    """Tell the others of whatever is raised here, Ctrl-C, too, unless they know: it was raised by a step of theirs."""
    try:
        yield
    except BaseException as error:
        if not channel.has_failed and not channel.is_elsewhere:
            channel.give_up(error)
        raise


def _checked_ranks(op: str, ranks: Sequence[int], group: dist.ProcessGroup | None, timeout_s: float) -> tuple[int, ...]:
    """Give the ranks, or say what is wrong with them; the same on all ranks, as the list is."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    given = list(ranks) if isinstance(ranks, Iterable) else [ranks]
    order = [_as_rank(rank) for rank in given]
    # A rank that a group was not made of has no list of its members: it is one of those that may call or not.
    outside: bool = group is dist.GroupMember.NON_GROUP_MEMBER  # type: ignore[comparison-overlap]
    members = [0] if not dist.is_initialized() else order if outside else dist.get_process_group_ranks(group)
    if outside and dist.get_rank() in order:
        members = [rank for rank in order if rank != dist.get_rank()]
    wrong = [
        f"{r!r}: not a rank of this job of {size}" for r, n in zip(given, order, strict=True) if n not in range(size)
    ]
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= _LONGEST_S:
        wrong.append(f"timeout_s={timeout_s!r}: not a number of seconds")
    wrong += [f"{rank}: twice" for rank in sorted({rank for rank in order if order.count(rank) > 1})]
    wrong += [f"{rank}: not in the group {members}" for rank in order if rank in range(size) and rank not in members]
    if wrong or not order:
        needs, fix = "global ranks of the group, each once, the receiving one first", "ranks=list(range(world_size))"
        got = [f"ranks={str(given)[:200]}", *wrong[:5]]
        raise SpecError(explain(f"{op}: cannot pass anything on.", got=got, needs=needs, fix=fix))
    return tuple(order)


def _as_rank(rank: Any) -> int:
    """Give a rank as an int, and -1 for what is none: True, 1.0, a tensor that holds several."""
    try:
        return -1 if isinstance(rank, bool) else operator.index(rank)
    except (TypeError, ValueError, RuntimeError):
        return -1


def _collect(
    channel: Channel, value: Any, prepare: Callable[[], Parcel | None], path: str | os.PathLike[str] | None
) -> list[Any]:
    """Bring everything to the first rank; the list of the others is empty."""
    folder: str | None = None
    parcel: Parcel | None = None
    values: list[Any] = []
    handle, made = -1, None

    def enter() -> Note:
        nonlocal parcel, folder
        folder = _as_folder(channel.op, path)
        parcel = prepare()
        where = None if folder is None else _shortened(folder)
        facts = {"call": channel.op, "ranks": _shortened(str(list(channel.ranks))), "workspace_path": where}
        size_bytes = 0 if parcel is None or channel.is_first else parcel.size_bytes
        return {"facts": facts, "where": whereabouts(), "rooms": rooms(), "size_bytes": size_bytes}

    def admit(notes: list[Note]) -> Note:
        nonlocal made
        _check_same(channel, notes)
        if folder is None:
            _check_reach(channel, notes)
            _check_room(channel, notes)
            return {}
        name = f"gather-{uuid.uuid4().hex}"  # never a name that a crashed run, or another job, has used
        made = Path(folder) / name
        made.mkdir(parents=True)
        return {"name": name}

    def hand() -> Note:
        nonlocal handle
        if parcel is None or channel.is_first:
            return {"told": None}
        if folder is None:
            handle, told = write_segment(parcel)
            return {"told": told}
        file = Path(folder) / answer["name"] / f"rank_{channel.here}.pth"
        return {"told": {"size_bytes": _patiently(lambda: write_state(file, value), file.parent)}}

    def take(notes: list[Note]) -> Note:
        values.append(value)
        for rank, note in zip(channel.ranks[1:], notes[1:], strict=True):
            if (told := note["told"]) is None:
                continue
            values.append(read_segment(told, rank) if made is None else _read_file(made, rank, told["size_bytes"]))
        return {}

    try:
        answer = channel.step(ENTER, enter, admit)
        channel.step(HAND, hand, take)
    finally:
        if handle >= 0:
            os.close(handle)
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
    return values


def _as_folder(op: str, path: Any) -> str | None:
    folder: Any = None if path is None else os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    if folder is not None and (not isinstance(folder, str) or not folder):
        got, needs = f"workspace_path={path!r}"[:200], "a path, as a string or a Path, or None for shared memory"
        raise SpecError(explain(f"{op}: not a folder.", got=got, needs=needs, fix="a path that all ranks see"))
    return folder


def _shortened(text: str) -> str:
    """Give a text that fits into a note, and tells apart what differs."""
    if len(text) <= _SHOWN_CHARS:
        return text
    return f"{text[:_SHOWN_CHARS]}... ({hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:16]})"


def _check_same(channel: Channel, notes: list[Note]) -> None:
    first = notes[0]["facts"]
    wrong = [
        f"{name}={note['facts'][name]!r} on rank {rank}, {first[name]!r} on rank {channel.ranks[0]}"
        for rank, note in zip(channel.ranks, notes, strict=True)
        for name in first
        if note["facts"][name] != first[name]
    ]
    if wrong:
        needs, fix = "the same call on each of them", "give the same arguments on every rank"
        raise SpecError(explain(f"{channel.op}: the ranks differ.", got=wrong[:5], needs=needs, fix=fix))


def _check_reach(channel: Channel, notes: list[Note]) -> None:
    """Check that the first rank can open the memory of the others."""
    places = [note["where"] for note in notes]
    reach = ("boot", "pids", "user")
    if all(place[name] == places[0][name] for place in places for name in reach):
        return
    got = [
        f"rank {rank}: host {place['host']}, process ids {place['pids']}, user {place['user']}"
        for rank, place in zip(channel.ranks, places, strict=True)
    ]
    needs = "ranks of one host, in one container, of one user"
    fix = "get_configs_parallel(..., workspace_path=a folder that all of them share)"
    what = f"{channel.op}: shared memory does not reach all ranks."
    raise ShareError(explain(what, got=got[:6], needs=needs, fix=fix))


def _check_room(channel: Channel, notes: list[Note]) -> None:
    """Check that what all ranks will write fits into the memory that is left, before anything is written."""
    wrong = []
    for name in dict.fromkeys(name for note in notes for name in note["rooms"]):
        users = [note for note in notes if name in note["rooms"]]
        want, have = sum(note["size_bytes"] for note in users), min(note["rooms"][name] for note in users)
        if want > have:
            wrong.append(f"{name}: {have} bytes are free, {want} bytes are to be written")
    if wrong:
        needs, fix = "all of it to fit at once", "pass less at a time, or get_configs_parallel with workspace_path="
        raise ShareError(explain(f"{channel.op}: shared memory is too small.", got=wrong, needs=needs, fix=fix))


def _read_file(folder: Path, rank: int, size_bytes: int) -> Any:
    """Read the file of a rank, which is there: it was renamed before the rank said so."""
    file = folder / f"rank_{rank}.pth"

    def read() -> Any:
        with file.open("rb") as opened:
            if (found := os.fstat(opened.fileno()).st_size) != size_bytes:
                got, needs, fix = f"{found} bytes", f"{size_bytes} bytes", "look at the file system, and start again"
                raise ShareError(explain(f"{file}: is not what rank {rank} wrote.", got=got, needs=needs, fix=fix))
            return safe_load(opened, str(file))

    return _patiently(read, folder)


def _patiently(act: Callable[[], Any], folder: Path) -> Any:
    """Act, again and again where a network file system does not show yet what another rank has made."""
    end = time.monotonic() + _VISIBLE_S
    while True:
        try:
            return act()
        except (FileNotFoundError, ShareError) as error:
            missing = isinstance(error, FileNotFoundError) or isinstance(error.__cause__, FileNotFoundError)
            if not missing:
                raise
            if time.monotonic() > end:
                got, needs = f"{error}; after {_VISIBLE_S:g} s", "a folder that all ranks share"
                fix = "give a path on a shared file system"
                what = f"{folder}: a rank does not see what another has made."
                raise ShareError(explain(what, got=got.splitlines(), needs=needs, fix=fix)) from error
        time.sleep(0.05)
