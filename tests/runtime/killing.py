"""A program that trains on ranks of which it kills one, in forward, backward or save, and tells what the others saw.

The ranks are forks of one process that imports torch once. The one that is to die counts the Python calls of the
phase, and the time that it takes, in a step before; then it dies at a drawn call of it, or at a drawn moment.
"""

import contextlib
import importlib
import json
import os
import random
import re
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from programs import forked, left_in
from torch import nn

import meshpar
from meshpar import private, runtime

TIMEOUT_S = 20.0
NUM_RUNS = 10
SCENES = ("forward", "backward", "save")
WAYS = (("domain=3", "fsdp"), ("domain=3", "ddp"), ("data=2,domain=2", "fsdp"), ("replica=2,data=1,domain=2", "hsdp"))


class Block(nn.Module):
    """A convolution, a norm over space, and a sum."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(2, channels)

    def forward(self, x):
        return x + F.gelu(self.norm(self.conv(x)))


class Net(nn.Module):
    """Halos, statistics, and repeated blocks that are units of `fully_shard`."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3, padding=1)
        self.blocks = nn.ModuleList([Block(8) for _ in range(2)])
        self.last = nn.Conv2d(8, 1, 5, padding=2)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Death:
    """Watch the phases of a step, and kill this process in one."""

    def __init__(self, scene, chance, by_call, told):
        self.scene, self.chance, self.by_call, self.told = scene, chance, by_call, told
        self.calls, self.seconds, self.start, self.fatal, self.armed = 0, 0.0, 0.0, -1, False

    def die(self):
        os.write(self.told, repr(time.monotonic()).encode())
        os.kill(os.getpid(), signal.SIGKILL)

    def count(self, frame, event, arg):
        if event == "call":
            self.calls += 1
            if self.calls == self.fatal:
                self.die()

    def begin(self, phase):
        if phase != self.scene:
            return
        if self.armed and self.by_call:
            self.fatal = self.chance.randint(1, max(self.calls - 20, 1))
        if self.armed and not self.by_call:
            after = self.chance.uniform(0.0, self.seconds)
            threading.Thread(target=lambda: (time.sleep(after), self.die())).start()
        self.calls, self.start = 0, time.monotonic()
        sys.setprofile(self.count)

    def end(self, phase):
        if phase != self.scene:
            return
        sys.setprofile(None)
        self.seconds = time.monotonic() - self.start
        if self.armed:
            time.sleep(10 if not self.by_call else 0)  # the moment comes
            self.die()


def be_rank(rank, size, spec, data, folder, death):
    """Train until a rank is lost; give what was seen of it."""
    torch.manual_seed(0)
    given = {"rank": rank, "world_size": size, "local_rank": rank, "run_id": "run"}
    with runtime.distributed(device="cpu", timeout_s=TIMEOUT_S, rendezvous_file=folder / "meet", **given):
        mesh = meshpar.make_mesh(spec, "cpu")
        model = meshpar.parallelize(Net(), mesh, data=data)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(2 // meshpar.axis_size(mesh, "data"), 2, 13, 8)
        for step in range(1, 30):
            if death is not None:
                death.armed = step == 3
            for phase in ("forward", "backward", "save"):
                if death is not None:
                    death.begin(phase)
                if phase == "forward":
                    with meshpar.spmd() if data != "hsdp" else contextlib.nullcontext():  # DTensor's own ops, too
                        loss = model(x).square().mean()
                elif phase == "backward":
                    loss.backward()
                    meshpar.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                elif step > 1:
                    meshpar.save_checkpoint(folder / "saved", model, optimizer, step=step, keep=2)
                if death is not None:
                    death.end(phase)
    return None


def start(scene, number, folder):
    """Fork the ranks; give their pids, the one that dies, and the pipe that tells when."""
    chance = random.Random(f"{scene} {number}")
    spec, data = WAYS[number % len(WAYS)]
    size = 3 if spec == "domain=3" else 4
    victim = chance.randrange(size)
    reads, told = os.pipe()

    def see(rank):
        death = Death(scene, chance, number % 2 == 0, told) if rank == victim else None
        try:
            be_rank(rank, size, spec, data, folder, death)
        except Exception as error:
            return type(error).__name__, str(error), time.monotonic()
        return "", "nothing was lost", 0.0

    pids = [forked(partial(see, rank), folder / str(rank)) for rank in range(size)]
    os.close(told)
    return pids, victim, reads


def run(scene, number, folder):
    """Play one run and tell what was seen: by each survivor name, text and seconds after the death."""
    pids, victim, reads = start(scene, number, folder)
    left, end = dict(enumerate(pids)), time.monotonic() + 100
    codes = {}
    while left and time.monotonic() < end:
        for rank, pid in list(left.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                codes[rank] = left.pop(rank)
        time.sleep(0.02)
    hung = sorted(left)
    for pid in left.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    died = float(os.read(reads, 100) or "nan")
    os.close(reads)
    seen = {}
    for rank in range(len(pids)):
        if (told := left_in(folder / str(rank))) is not None:
            name, text, at = told
            seen[rank] = name, text, at - died
    saved = [one.step for one in meshpar.list_checkpoints(folder / "saved")] if (folder / "saved").exists() else []
    return {"way": WAYS[number % len(WAYS)], "victim": victim, "hung": hung, "seen": seen, "saved": saved}


def main():
    torch.set_num_threads(1)
    for name in ("torch.distributed.tensor", "torch.distributed.fsdp", private.DYNAMO):
        importlib.import_module(name)  # once, for all ranks
    base, scenes = Path(sys.argv[1]), sys.argv[2:] or SCENES
    before = set(os.listdir("/dev/shm"))
    seen = {}
    for scene in scenes:
        seen[scene] = []
        for number in range(NUM_RUNS):
            folder = base / f"{scene}-{number}"
            folder.mkdir()
            seen[scene].append(run(scene, number, folder))
    mine = re.compile(rf"PPid:\s+{os.getpid()}\b")
    children = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            children += [status.parent.name] if mine.search(status.read_text()) else []
        except OSError:
            continue
    print(json.dumps({"runs": seen, "segments": sorted(set(os.listdir("/dev/shm")) - before), "processes": children}))


if __name__ == "__main__":
    main()
