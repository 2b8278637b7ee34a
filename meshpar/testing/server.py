"""The processes behind `run_ranks`: a server that forks and ends ranks, and a rank that answers calls.

The server imports torch once and forks each rank (a fork is quick, an import is not). Invariant: it stays one
thread without a process group, it alone reaps, so a pid it signals is never another process's, and when the
caller closes its end or dies, it kills and reaps every rank.
"""

import ctypes
import datetime
import faulthandler
import functools
import importlib
import io
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import IO, Any, NoReturn

import torch
import torch.distributed as dist

_DUMP_S = 0.3  # for a hung rank to write where it hangs
_MAX_FILES = 256  # open in a rank: groups that calls have left behind, about 8 files and 6 threads a mesh
_SEED = 0
_DEATH_S = 1.0  # for a rank whose socket is closed to become a zombie


class Pickler(pickle.Pickler):
    """Pickle a plain tensor as its bytes: torch's own way writes a small archive, ten times slower."""

    def reducer_override(self, obj: Any) -> Any:
        """Give the bytes of a plain tensor; leave the rest to torch."""
        if type(obj) is not torch.Tensor or obj.device.type != "cpu" or obj.layout != torch.strided:
            return NotImplemented
        whole = obj.is_contiguous() and obj.untyped_storage().nbytes() == obj.numel() * obj.element_size()
        if not whole or obj.requires_grad or obj.is_quantized or obj.is_conj() or obj.is_neg() or vars(obj):
            return NotImplemented
        try:
            data = bytearray(obj.reshape(-1).view(torch.uint8).numpy())
        except RuntimeError:  # numpy is not installed
            return NotImplemented
        return _tensor, (data, obj.dtype, obj.shape)


def _tensor(data: bytearray, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def serve(handle: int, preload: list[str]) -> None:
    """Fork and end ranks as the caller asks, until it closes its end."""
    for name in preload:
        importlib.import_module(name)
    control = Connection(handle)
    dumps: dict[int, IO[bytes]] = {}  # by pid of a rank that has not been reaped
    try:
        while True:
            match control.recv():
                case "start", num_ranks, timeout_s:
                    handles = [recv_handle(control) for _ in range(num_ranks)]
                    pids = []
                    for rank in range(num_ranks):
                        dump = tempfile.TemporaryFile()  # noqa: SIM115
                        if (pid := os.fork()) == 0:
                            control.close()
                            for other in handles:
                                if other != handles[rank]:
                                    os.close(other)
                            _be_rank(rank, num_ranks, Connection(handles[rank]), dump, timeout_s)
                        pids.append(pid)
                        dumps[pid] = dump
                    for other in handles:
                        os.close(other)
                    control.send(pids)
                case "end", pids, dead, hung:
                    control.send(_reap(dumps, pids, dead, hung))
    except (EOFError, OSError):
        _reap(dumps, list(dumps), [], [])


def _reap(
    dumps: dict[int, IO[bytes]], pids: list[int], dead: list[int], hung: list[int]
) -> tuple[list[int], list[str]]:
    """Let the hung ranks write where they are, end all, and return their exit codes and what was written."""
    codes = {}
    give_up = time.monotonic() + _DEATH_S
    while (left := [pid for pid in dead if pid not in codes]) and time.monotonic() < give_up:
        for pid in left:  # its socket is closed: it is about to be a zombie
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    for pid in hung:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(_DUMP_S if hung else 0.0)
    left = [pid for pid in pids if pid not in codes]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    for pid in left:
        codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    texts = []
    for pid in pids:
        with dumps.pop(pid) as file:
            file.seek(0)
            block = file.read().decode(errors="replace").strip().split("\n\n")[-1]  # the main thread is the last
        lines = [line for line in block.splitlines()[1:] if __file__ not in line and "<string>" not in line]
        texts.append("\n".join(f"    {line.strip()}" for line in lines[:12]))
    return [codes[pid] for pid in pids], texts


def _be_rank(rank: int, num_ranks: int, conn: Connection, dump: IO[bytes], timeout_s: float) -> NoReturn:
    """Join the world, then answer calls until the caller closes its end."""
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the server
        faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True)
        torch.set_num_threads(1)
        _answer(conn, functools.partial(_join, rank, num_ranks, conn, timeout_s))
        world = dist.group.WORLD
        while True:
            path = pickle.loads(conn.recv_bytes())
            call = conn.recv_bytes()
            if path != sys.path:
                sys.path[:] = path
                importlib.invalidate_caches()
            _answer(conn, functools.partial(_call, call), world)
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _join(rank: int, num_ranks: int, conn: Connection, timeout_s: float) -> None:
    timeout = datetime.timedelta(seconds=timeout_s)
    if rank == 0:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, num_ranks, is_master=True, timeout=timeout, wait_for_workers=False
        )
        conn.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", conn.recv(), num_ranks, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)


def _call(call: bytes) -> Any:
    """Start every call at the same random state on all ranks, whatever the last one drew on some of them."""
    fn, args, kwargs = pickle.loads(call)
    random.seed(_SEED)
    torch.manual_seed(_SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(_SEED)
    return fn(*args, **kwargs)


def _answer(conn: Connection, call: Callable[[], Any], world: object = None) -> None:
    """Send what the call returns, or what it raises."""
    raised = trace = ""
    try:
        buffer = io.BytesIO()
        Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(call())
        body = buffer.getvalue()
    except BaseException as error:
        raised = "".join(traceback.format_exception_only(error)).strip()
        trace = "".join(traceback.format_exception(error))
        try:
            body = pickle.dumps(error)
            pickle.loads(body)
        except Exception:
            body = b""
    reusable = world is None or (dist.is_initialized() and dist.group.WORLD is world)
    if sys.platform == "linux":
        reusable &= len(os.listdir("/proc/self/fd")) <= _MAX_FILES
    sys.stdout.flush()
    sys.stderr.flush()
    conn.send((raised, trace, reusable))
    conn.send_bytes(body)
