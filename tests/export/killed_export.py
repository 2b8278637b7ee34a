"""A program that exports on ranks that it kills at every file operation, and tells what is left.

The ranks are forks of one process that imports torch once.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import meshpar
from meshpar.errors import CheckpointError
from meshpar.export import two_phase, writers

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")
SIZES = {"one": "1GB", "several": 100}


class Config:
    """What a model says of itself: which one it is."""

    def __init__(self, number: float) -> None:
        self.number = number

    def to_dict(self) -> dict[str, float]:
        """Give its values."""
        return {"number": self.number}


class Model:
    """Something with a configuration."""

    def __init__(self, number: float) -> None:
        self.config = Config(number)


def export(where: Path, number: float, files: str, writer: str = "auto", **options) -> None:
    """Write a checkpoint whose every value is a number."""
    state = {f"w{i}": torch.full((5, 4), number) for i in range(4)}
    meshpar.export_hf(
        state, where, max_shard_size=SIZES[files], overwrite=True, writer=writer, config_of=Model(number), **options
    )


def loaded(where: Path) -> float | None:
    """Load as transformers does; give the number of the checkpoint, or None where there is none to load.

    A mix of two, or files that are not whole, end the program.
    """
    if (where / "model.safetensors").is_file():
        found = load_file(where / "model.safetensors")
    elif (where / "model.safetensors.index.json").is_file():
        names = json.loads((where / "model.safetensors.index.json").read_text())["weight_map"]
        found = {}
        for name in set(names.values()):
            found |= {k: v for k, v in load_file(where / name).items() if names[k] == name}
    else:
        return None
    numbers = {x for tensor in found.values() for x in tensor.flatten().tolist()}
    numbers.add(json.loads((where / "config.json").read_text())["number"])
    assert sorted(found) == ["w0", "w1", "w2", "w3"]
    assert len(numbers) == 1, f"a mix: {numbers} in {sorted(os.listdir(where))}"
    return numbers.pop()


def kill_at(number: int, where: Path) -> None:
    """Let this process be killed at its file operation of a number in a folder."""
    count = 0

    def hit() -> None:
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event, args):
        if event in EVENTS and any(isinstance(a, str | bytes | os.PathLike) and str(where) in str(a) for a in args):
            hit()

    sys.addaudithook(hook)

    def counting(real):
        def counted(handle, *args):
            if str(where) in os.readlink(f"/proc/self/fd/{handle}"):
                hit()
            return real(handle, *args)

        return counted

    os.pwrite, os.write, os.fsync = map(counting, (os.pwrite, os.write, os.fsync))  # these tell no hook


def forked(act) -> int:
    """Run something in a fork; give its pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = 0
        except CheckpointError:
            code = 3
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def code_of(pid: int) -> int:
    """Wait for a process."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_one_process(base: Path, old: str, new: str) -> list[dict]:
    """Kill an export by one process at its first, second, ... file operation, until one comes through."""
    seen = []
    for number in range(1, 1000):
        where = base / f"{old}-{new}-{number}"
        export(where, 1.0, old)
        (where / "tokenizer.json").write_text("{}")

        def act(where=where, number=number):
            kill_at(number, where)
            export(where, 2.0, new)

        code = code_of(forked(act))
        left = [name for name in os.listdir(where) if name.startswith(".")]
        seen.append({"code": code, "found": loaded(where), "left": len(left)})
        export(where, 3.0, new)  # the next one finds its way, and cleans up
        assert loaded(where) == 3.0
        names = sorted(os.listdir(where))
        assert not any(name.startswith(".") for name in names)
        assert "tokenizer.json" in names
        if code != -signal.SIGKILL:
            break
    return seen


def as_rank(rank: int, size: int, store: str, act, timeout_s: float = 20.0) -> None:
    """Be a rank of a job of its own."""
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timeout)
    act()


def kill_a_rank(base: Path, writer: str, victim: int) -> list[dict]:
    """Kill one of two ranks at its file operations, one after the other."""
    seen = []
    for number in range(1, 1000):
        where = base / f"{writer}-{victim}-{number}"
        export(where, 1.0, "several")

        def act(rank: int, where=where, number=number) -> None:
            if rank == victim:
                kill_at(number, where)
            export(where, 2.0, "several", writer, timeout_s=10.0)

        store = f"{where}-store"
        begun = time.monotonic()
        pids = [forked(lambda r=rank, s=store, a=act: as_rank(r, 2, s, lambda: a(r))) for rank in range(2)]
        codes = [code_of(pid) for pid in pids]
        seen.append({"codes": codes, "found": loaded(where), "seconds": time.monotonic() - begun})
        export(where, 3.0, "several")
        assert loaded(where) == 3.0
        if codes[victim] != -signal.SIGKILL:
            break
    return seen


def two_at_once(base: Path) -> list[dict]:
    """Let two jobs export into one folder at once, again and again."""
    seen = []
    for number in range(6):
        where = base / f"both-{number}"
        export(where, 1.0, "several")
        pids = [
            forked(lambda r=rank, j=job, w=where: as_rank(r, 2, f"{w}-{j}", lambda: export(w, 2.0 + j, "several")))
            for job in range(2)
            for rank in range(2)
        ]
        codes = [code_of(pid) for pid in pids]
        seen.append({"codes": [codes[:2], codes[2:]], "found": loaded(where)})
        assert not any(name.startswith(".") for name in os.listdir(where))
    return seen


def slow_writer(base: Path) -> list[int]:
    """Let a rank write for longer than the timeout of the default group."""

    def later(real):
        def slowly(*args):
            time.sleep(1.5)
            return real(*args)

        return slowly

    def slow(rank: int) -> None:
        two_phase._append = later(two_phase._append)
        if rank == 1:
            writers._fill_one = later(writers._fill_one)
        for writer in ("direct", "two-phase"):
            export(base / writer, 2.0, "one", writer)

    pids = [forked(lambda r=rank: as_rank(r, 2, f"{base}/slow", lambda: slow(r), 1.0)) for rank in range(2)]
    codes = [code_of(pid) for pid in pids]
    assert [loaded(base / writer) for writer in ("direct", "two-phase")] == [2.0, 2.0]
    return codes


def main() -> None:
    """Play the scene that is asked for, and print what was seen."""
    torch.set_num_threads(1)
    with contextlib.suppress(ImportError):
        importlib.import_module("torch.distributed.tensor")
    scene, base = sys.argv[1], Path(sys.argv[2])
    name, *args = scene.split(":")
    scenes = {"process": kill_one_process, "rank": kill_a_rank, "both": two_at_once, "slow": slow_writer}
    found = scenes[name](base, *(int(a) if a.isdigit() else a for a in args))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
