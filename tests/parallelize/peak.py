"""One rank that materializes a model of 16 blocks of 16 MiB, and prints by how much its memory grew at most."""

import sys

import torch
import torch.distributed as dist
from torch import nn

import meshpar

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


def measure(source: str, folder: str, rank: int, num_ranks: int) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", num_ranks), rank=rank, world_size=num_ranks)
    told = {"checkpoint": {"checkpoint": f"{folder}/run"}, "state dict": {"state_dict": f"{folder}/plain.pt"}}
    # What torch keeps for itself once it has been used is no part of it.
    small = meshpar.materialize(built(1, 16))
    meshpar.save_checkpoint(f"{folder}/small", small)
    meshpar.materialize(built(1, 16), checkpoint=f"{folder}/small")
    del small
    model = built(16)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak counts from here
    before = status("VmRSS")
    meshpar.materialize(model, **told.get(source, {}))
    peak = status("VmHWM")
    share = sum(p.to_local().numel() * 4 for p in model.parameters())
    whole = sum(p.numel() * 4 for p in model.parameters())
    print(before, peak, share, BLOCK_BYTES, whole)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "prepare":
        prepare(sys.argv[2])
    else:
        measure(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
