"""Segments: memory without a name that one rank writes and another of the same host opens.

Invariant: a segment (memfd) has no name, so two jobs cannot collide, nothing is left in /dev/shm after a kill, no
resource tracker knows of it and no quota of /dev/shm bounds it. It is reserved before it is written, has its exact
length for good (sealed), and is gone when the last process that maps it lets go.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
from pathlib import Path
from typing import Any

import psutil

from meshpar.errors import ShareError, explain
from meshpar.share.packing import Parcel, unpack

_CHUNK_BYTES = 1 << 30  # Linux writes less than 2 GiB at once


def whereabouts() -> dict[str, str]:
    """Tell what two processes must have in common so that one opens the memory of the other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pids = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        boot, pids = socket.gethostname(), "none"
    return {"host": socket.gethostname(), "boot": boot, "pids": pids, "user": str(os.geteuid())}


def rooms() -> dict[str, int]:
    """Give the bytes that can still be written: of the host, and of the memory cgroups that bound this process."""
    found = {"memory of the host": psutil.virtual_memory().available}
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    here = next((line[3:] for line in lines if line.startswith("0::")), None)
    top = Path("/sys/fs/cgroup")
    while here is not None:
        folder = top / here.lstrip("/")
        try:
            limit, used = (folder / "memory.max").read_text().strip(), int((folder / "memory.current").read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            if limit != "max":
                found[f"cgroup {here}"] = int(limit) - used + int(stat.get("inactive_file", 0))
        except (OSError, ValueError):
            pass
        here = None if here in ("/", "") else os.path.dirname(here)
    return found


def write_segment(parcel: Parcel) -> tuple[int, dict[str, int]]:
    """Write a parcel into a segment of its own.

    Returns:
        The file descriptor that keeps it alive, and what another process needs in order to open it.

    Raises:
        ShareError: the memory cannot be reserved; nothing has been written.
    """
    what = "shared memory: cannot be had."
    if not hasattr(os, "memfd_create"):
        needs, fix = "Linux (memfd_create)", "get_configs_parallel with workspace_path="
        raise ShareError(explain(what, got="no memfd_create on this system", needs=needs, fix=fix))
    handle = -1
    try:
        handle = os.memfd_create("meshpar", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(handle, 0, parcel.size_bytes)  # a SIGBUS or an error at the write otherwise
        _write(handle, parcel.head, len(parcel.head), 0)
        for x, offset in zip(parcel.tensors, parcel.offsets, strict=True):
            if num_bytes := x.numel() * x.element_size():
                _write(handle, (ctypes.c_char * num_bytes).from_address(x.data_ptr()), num_bytes, offset)
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        about = os.fstat(handle)
        pid = int(os.readlink("/proc/self"))  # as those who read this /proc see it
    except OSError as error:
        if handle >= 0:
            os.close(handle)
        have = ", ".join(f"{num_bytes} bytes of {name}" for name, num_bytes in rooms().items())
        got, needs = f"{error}; {have} are free", f"{parcel.size_bytes} bytes"
        fix = "pass less at a time, free memory, or use get_configs_parallel with workspace_path="
        raise ShareError(explain(what, got=got, needs=needs, fix=fix)) from error
    except BaseException:
        if handle >= 0:
            os.close(handle)
        raise
    return handle, {
        "pid": pid,
        "handle": handle,
        "device": about.st_dev,
        "inode": about.st_ino,
        "size_bytes": parcel.size_bytes,
        "head_bytes": len(parcel.head),
    }


def _write(handle: int, data: Any, num_bytes: int, offset: int) -> None:
    view, done = memoryview(data), 0
    while done < num_bytes:
        done += os.pwrite(handle, view[done : done + _CHUNK_BYTES], offset + done)


def read_segment(told: dict[str, int], rank: int) -> Any:
    """Open the segment of another rank, and give the config in it; its tensors live in the segment, without a copy.

    They are the caller's alone, to keep and to write into: the one who wrote them closes the segment and never looks.

    Raises:
        ShareError: it cannot be opened, or is another one.
    """
    what = f"shared memory of rank {rank}: cannot be opened."
    needs = "ranks of one user in one container, that may look into each other's /proc"
    fix = "run them in one container, or use get_configs_parallel with workspace_path="
    try:
        handle = os.open(f"/proc/{told['pid']}/fd/{told['handle']}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ShareError(explain(what, got=str(error), needs=needs, fix=fix)) from error
    try:
        about = os.fstat(handle)
        found = (about.st_dev, about.st_ino, about.st_size)
        if found != (told["device"], told["inode"], told["size_bytes"]):
            raise ShareError(explain(what, got="a file of another process under that name", needs=needs, fix=fix))
        memory = mmap.mmap(handle, told["size_bytes"])
    except OSError as error:
        raise ShareError(explain(what, got=str(error), needs=needs, fix=fix)) from error
    finally:
        os.close(handle)
    return unpack(memory, told["head_bytes"], told["size_bytes"])
