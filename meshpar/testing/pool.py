"""Run a function on a pool of gloo ranks that stays alive between calls.

Each rank alone holds one end of a socket to the caller: when it dies, the caller reads the end of file.
Invariant: a pool that is kept is idle and in step (every rank has answered, all returned or all raised, and
they still have the default group they were given); any other pool is ended before the call returns.
"""

import atexit
import contextlib
import io
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from typing import Any, TypeVar

from meshpar import private
from meshpar.errors import MeshparError
from meshpar.testing.server import Pickler

T = TypeVar("T")

MAX_RANKS = 16
PROCESS_GROUP_TIMEOUT_S = 30.0
_START_TIMEOUT_S = 120.0
_RAISE_GRACE_S = 2.0  # for the other ranks, once one has raised
_DEATH_GRACE_S = 0.2  # for the other ranks, once one has died
_DUMP_S = 0.3  # for a hung rank to write where it hangs
# By the server, once for all ranks. torch's own, which each rank would import at its first DTensor op (2 s); the others
# where the caller has them.
_PRELOAD = ("torch.distributed.tensor", "torch.distributed.fsdp", private.DYNAMO)
_PRELOAD_ALSO = ("numpy", "pytest", "hypothesis")


class RankError(MeshparError, RuntimeError):
    """Tell what went wrong on which rank.

    `exceptions` maps a rank to the exception it raised, where that could be pickled; `tracebacks` maps each
    rank that raised to its traceback, as text. The lowest rank's exception is also the `__cause__`.
    """

    def __init__(
        self,
        message: str,
        exceptions: dict[int, BaseException] | None = None,
        tracebacks: dict[int, str] | None = None,
    ) -> None:
        """Keep what the ranks raised."""
        super().__init__(message)
        self.exceptions = exceptions or {}
        self.tracebacks = tracebacks or {}


@dataclass(frozen=True)
class _Answer:
    """What one rank sends back; the body is its result or exception, pickled (empty if that fails)."""

    raised: str
    trace: str
    reusable: bool
    body: bytes


@dataclass(frozen=True)
class _Pool:
    """The ranks of one world size: their pids and sockets, in rank order."""

    pids: tuple[int, ...]
    conns: tuple[Connection, ...]


@dataclass(frozen=True)
class _Server:
    """The process that forks the ranks, and the pools it holds by world size."""

    process: subprocess.Popen[bytes]
    control: Connection
    pools: dict[int, _Pool] = field(default_factory=dict)


_SERVERS: dict[int, _Server] = {}  # by the pid of the caller: a fork of the caller starts its own
_LOCK = threading.RLock()


def run_ranks(fn: Callable[..., T], num_ranks: int, *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> list[T]:
    """Run `fn(*args, **kwargs)` on ranks 0 to num_ranks - 1 and return their results.

    The default process group is gloo over 127.0.0.1, one thread a rank. The processes are kept for the next
    call, and so is what `fn` leaves in them; the random numbers of torch, numpy and Python start anew in every
    call, the same ones on all ranks. A mesh made anew in every call adds threads and open files, so
    that the pool must start anew now and then: make meshes in a function under functools.cache.

    Args:
        fn: a function that can be imported by its name, or a functools.partial of one.
        num_ranks: 1 to 16.
        *args: given to fn; tensors are copied.
        timeout_s: the most seconds that all ranks may take to answer, starting the processes aside.
        **kwargs: given to fn.

    Returns:
        The results in rank order; tensors are copies.

    Raises:
        TypeError: fn or its arguments cannot be pickled by reference; nothing has been sent.
        ValueError: num_ranks is not 1 to 16.
        RankError: a rank raised, died, or did not answer in time.

    Example:
        >>> import os
        >>> from meshpar.testing import run_ranks
        >>> run_ranks(os.path.join, 2, "a", "b")
        ['a/b', 'a/b']
    """
    __tracebackhide__ = True  # pytest: show the test, not the pool
    if not 1 <= num_ranks <= MAX_RANKS:
        msg = f"run_ranks: num_ranks must be 1 to {MAX_RANKS}; got {num_ranks}"
        raise ValueError(msg)
    call = _dumps_call(fn, args, kwargs)
    path = pickle.dumps(sys.path)
    with _LOCK:
        server = _running_server()
        pool = server.pools.get(num_ranks) or _start_pool(server, num_ranks)
        with _ended_if_interrupted(server, num_ranks):
            for conn in pool.conns:
                with contextlib.suppress(OSError):  # a rank that died while idle: the gather reads its end of file
                    conn.send_bytes(path)
                    conn.send_bytes(call)
            answers = _gather(server, num_ranks, timeout_s)
    return [pickle.loads(answer.body) for answer in answers]


def shutdown_pool(num_ranks: int | None = None) -> None:
    """End every process that `run_ranks` has started; the next call starts anew. Runs by itself at exit.

    Args:
        num_ranks: end the ranks of calls on so many alone, and all once no others are left.
    """
    with _LOCK:
        if num_ranks is not None and _ended_alone(num_ranks):
            return
        server = _SERVERS.pop(os.getpid(), None)
        if server is None:
            return
        server.control.close()  # the server reads the end of file, kills and reaps its ranks, and exits
        for pool in server.pools.values():
            for conn in pool.conns:
                conn.close()
        try:
            server.process.wait(10)
        except subprocess.TimeoutExpired:
            server.process.kill()  # its ranks asked the kernel to end with it
            server.process.wait()


atexit.register(shutdown_pool)


def _ended_alone(num_ranks: int) -> bool:
    """End the ranks of one world size where others stay."""
    server = _SERVERS.get(os.getpid())
    if server is None or server.process.poll() is not None or not set(server.pools) - {num_ranks}:
        return False
    if num_ranks in server.pools:
        _end_pool(server, num_ranks, [], [])
    return True


class _CallPickler(Pickler):
    """Refuse what pickles here by its name but has no such name on the ranks."""

    def reducer_override(self, obj: Any) -> Any:
        if getattr(obj, "__module__", None) == "__main__" and hasattr(obj, "__qualname__"):
            msg = f"{obj.__qualname__} is defined in __main__, which the ranks do not import"
            raise pickle.PicklingError(msg)
        return super().reducer_override(obj)


def dumps_by_name(value: Any) -> bytes:
    """Pickle a value; refuse what is defined in `__main__`."""
    buffer = io.BytesIO()
    _CallPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _dumps_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle the call, or say which part of it cannot be."""
    try:
        return dumps_by_name((fn, args, kwargs))
    except Exception as error:
        parts = {"fn": fn, **{f"argument {i}": arg for i, arg in enumerate(args)}, **kwargs}
        bad = undumpable(parts, dumps_by_name)
        msg = (
            f"run_ranks: {', '.join(bad) or 'the call'} cannot be sent to the ranks.\n"
            f"  got:    fn={getattr(fn, '__qualname__', type(fn).__qualname__)}; {error}\n"
            "  needs:  functions and classes at the top level of an importable module, not __main__\n"
            "  fix:    move it there, bind values with functools.partial, make process groups inside fn"
        )
        raise TypeError(msg) from error


def undumpable(parts: Mapping[str, Any], dumps: Callable[[Any], bytes]) -> list[str]:
    """Name the parts of a call that cannot be pickled."""
    bad = []
    for name, part in parts.items():
        try:
            dumps(part)
        except Exception:
            bad.append(name)
    return bad


def _running_server() -> _Server:
    server = _SERVERS.get(os.getpid())
    if server is not None and server.process.poll() is None:
        return server
    shutdown_pool()
    ours, theirs = socket.socketpair()
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    if sys.dont_write_bytecode:
        env["PYTHONDONTWRITEBYTECODE"] = "1"
    preload = [*_PRELOAD, *(name for name in _PRELOAD_ALSO if name in sys.modules)]
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        f"from meshpar.testing.server import serve; serve({theirs.fileno()}, {preload!r})"
    )
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            env=env,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is the caller's, who ends the ranks
        )
    server = _SERVERS[os.getpid()] = _Server(process, Connection(ours.detach()))
    return server


def _ask(server: _Server, request: tuple[Any, ...], handles: Sequence[int] = ()) -> Any:
    """Send the server a request, with file descriptors, and return its reply."""
    try:
        server.control.send(request)
        for handle in handles:
            send_handle(server.control, handle, server.process.pid)
        if not server.control.poll(_START_TIMEOUT_S):
            raise EOFError
        return server.control.recv()
    except (EOFError, OSError) as error:
        shutdown_pool()
        code = server.process.returncode
        msg = f"run_ranks: the server that starts the ranks has ended (exit code {code}); see its stderr"
        raise RuntimeError(msg) from error
    except BaseException:  # Ctrl-C: the reply that is still to come would be taken for that of the next request
        server.process.kill()
        shutdown_pool()
        raise


def _start_pool(server: _Server, num_ranks: int) -> _Pool:
    """Fork the ranks and let them meet at a store on a port that the system chose for rank 0."""
    pairs = [socket.socketpair() for _ in range(num_ranks)]
    conns = tuple(Connection(ours.detach()) for ours, _ in pairs)
    try:
        request = ("start", num_ranks, PROCESS_GROUP_TIMEOUT_S)
        pids = _ask(server, request, [theirs.fileno() for _, theirs in pairs])
    except BaseException:
        for conn in conns:
            conn.close()
        raise
    finally:
        for _, theirs in pairs:
            theirs.close()
    pool = server.pools[num_ranks] = _Pool(tuple(pids), conns)
    with _ended_if_interrupted(server, num_ranks):
        with contextlib.suppress(OSError, EOFError):  # a rank died: _gather will see it
            port = conns[0].recv()
            for conn in conns[1:]:
                conn.send(port)
        _gather(server, num_ranks, _START_TIMEOUT_S)
    return pool


@contextlib.contextmanager
def _ended_if_interrupted(server: _Server, num_ranks: int) -> Iterator[None]:
    """End the pool when the caller is interrupted (Ctrl-C, a test's timeout): its ranks are still at work."""
    try:
        yield
    except RankError:
        raise
    except BaseException:
        if num_ranks in server.pools:
            _end_pool(server, num_ranks, [], [])
        raise


def _end_pool(server: _Server, num_ranks: int, dead: list[int], hung: list[int]) -> tuple[list[int], list[str]]:
    """End the ranks; return their exit codes, and where the hung ones hung."""
    pool = server.pools.pop(num_ranks)
    for conn in pool.conns:
        conn.close()
    codes, dumps = _ask(server, ("end", pool.pids, [pool.pids[r] for r in dead], [pool.pids[r] for r in hung]))
    return codes, dumps


def _gather(server: _Server, num_ranks: int, timeout_s: float) -> list[_Answer]:
    """Wait for an answer of every rank; keep the invariant of the module, and raise what the ranks raised."""
    __tracebackhide__ = True  # pytest: show the test, not the pool
    pool = server.pools[num_ranks]
    start = time.monotonic()
    deadline = start + timeout_s
    silent = {conn: rank for rank, conn in enumerate(pool.conns)}
    answers: dict[int, _Answer] = {}
    dead: list[int] = []
    while silent:
        for conn in (ready := wait(list(silent), max(0.0, deadline - time.monotonic()))):
            assert isinstance(conn, Connection)
            rank = silent.pop(conn)
            try:
                raised, trace, reusable = conn.recv()
                answers[rank] = _Answer(raised, trace, reusable, conn.recv_bytes())
            except (EOFError, OSError):
                dead.append(rank)
        if not ready:
            break
        if dead or any(answer.raised for answer in answers.values()):
            deadline = min(deadline, time.monotonic() + (_DEATH_GRACE_S if dead else _RAISE_GRACE_S))
    hung = sorted(silent.values())
    failed = {rank: answers[rank] for rank in sorted(answers) if answers[rank].raised}
    codes, dumps = [0] * num_ranks, [""] * num_ranks
    in_step = len(failed) in (0, num_ranks) and all(answer.reusable for answer in answers.values())
    if dead or hung or not in_step:
        codes, dumps = _end_pool(server, num_ranks, dead, hung)
    if not (dead or hung or failed):
        return [answers[rank] for rank in range(num_ranks)]
    seconds = time.monotonic() - start
    lines = [f"run_ranks: failed on {num_ranks} ranks after {seconds:.1f} s (limit {timeout_s:g} s)."]
    for rank in range(num_ranks):
        if rank in failed:
            lines.append(f"  rank {rank}: raised {failed[rank].raised}")
        elif rank in answers:
            lines.append(f"  rank {rank}: returned")
        elif rank in dead:
            lines.append(f"  rank {rank}: died with exit code {codes[rank]}")
        else:
            lines.append(f"  rank {rank}: had not answered; it was at\n{dumps[rank]}")
    exceptions = {rank: error for rank, answer in failed.items() if (error := _load_exception(answer))}
    if failed:
        first = min(failed)
        lines.append(f"Traceback of rank {first}:\n{failed[first].trace}")
    error = RankError("\n".join(lines), exceptions, {rank: answer.trace for rank, answer in failed.items()})
    raise error from (exceptions[min(exceptions)] if exceptions else None)


def _load_exception(answer: _Answer) -> BaseException | None:
    try:
        error = pickle.loads(answer.body)
    except Exception:  # it needs a module that the caller cannot import: its text is in the message
        return None
    return error if isinstance(error, BaseException) else None
