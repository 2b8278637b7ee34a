"""Ranks that materialize a model of 16 blocks of 16 MiB, and tell by how much their memory grew at most.

Run as a program; each rank of each scene is a fork, so that torch is imported once.
"""

import importlib
import json
import os
import sys
import traceback

import torch
import torch.distributed as dist
from torch import nn

import meshpar
from meshpar import private

SCENES = (("init", 2), ("init", 4), ("checkpoint", 2), ("state dict", 2))
BLOCK_BYTES = 16 * 2**20


def block(width: int) -> nn.Module:
    half = width // 2
    return nn.Sequential(nn.Linear(width, half, bias=False), nn.GELU(), nn.Linear(half, width, bias=False))


class Model(nn.Module):
    def __init__(self, blocks: int = 16, width: int = 2048) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(width) for _ in range(blocks)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))


def built(*sizes: int) -> nn.Module:
    with torch.device("meta"):
        net = Model(*sizes)
    return meshpar.parallelize(net, f"data={dist.get_world_size()}")


def prepare(folder: str) -> None:
    """Write a checkpoint, and a state dict of one process."""
    torch.manual_seed(0)
    net = Model()
    meshpar.save_checkpoint(f"{folder}/run", net)
    torch.save(net.state_dict(), f"{folder}/plain.pt")


def measure(source: str, folder: str, rank: int, num_ranks: int, name: str) -> dict[str, int]:
    store = dist.FileStore(f"{folder}/store {name}", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    told = {"checkpoint": {"checkpoint": f"{folder}/run"}, "state dict": {"state_dict": f"{folder}/plain.pt"}}
    # What torch keeps for itself once it has been used is no part of it.
    small = meshpar.materialize(built(1, 16))
    meshpar.save_checkpoint(f"{folder}/small {name}", small)
    meshpar.materialize(built(1, 16), checkpoint=f"{folder}/small {name}")
    del small
    model = built(16)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak counts from here
    before = status("VmRSS")
    meshpar.materialize(model, **told.get(source, {}))
    grown = status("VmHWM") - before
    sizes = {
        "share": sum(p.to_local().numel() * 4 for p in model.parameters()),
        "whole": sum(p.numel() * 4 for p in model.parameters()),
    }
    dist.barrier()
    return {"grown": grown, "block": BLOCK_BYTES, **sizes}


def fork(*args) -> tuple[int, str]:
    """Measure in a process of its own, which writes the answer into a file; give its pid and that file."""
    source, folder, rank, num_ranks, name = args
    path = f"{folder}/answer {name} {rank}"
    pid = os.fork()
    if pid == 0:
        try:
            seen = measure(source, folder, rank, num_ranks, name)
            with open(path, "w") as file:
                json.dump(seen, file)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    return pid, path


def main(folder: str) -> None:
    torch.set_num_threads(1)
    for name in ("torch.distributed.tensor", "torch.distributed.fsdp", private.DYNAMO):
        importlib.import_module(name)
    pid = os.fork()
    if pid == 0:
        try:
            prepare(folder)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    answers = {}
    for source, num_ranks in SCENES:
        name = f"{source} {num_ranks}"
        ranks = [fork(source, folder, rank, num_ranks, name) for rank in range(num_ranks)]
        for pid, _ in ranks:
            os.waitpid(pid, 0)
        answers[name] = []
        for _, path in ranks:
            with open(path) as file:
                answers[name].append(json.load(file))
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
