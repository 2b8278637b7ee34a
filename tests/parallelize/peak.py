"""One rank that materializes a model of 16 blocks of 16 MiB, and prints by how much its memory grew at most."""

import sys

import torch
import torch.distributed as dist
from torch import nn

import meshpar

BLOCK_BYTES = 16 * 2**20


class Model(nn.Module):
    def __init__(self, blocks: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2048, 2048, bias=False) for _ in range(blocks)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))


def built(blocks: int) -> nn.Module:
    with torch.device("meta"):
        net = Model(blocks)
    return meshpar.parallelize(net, f"data={dist.get_world_size()}")


def main() -> None:
    source, folder, rank, num_ranks = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", num_ranks), rank=rank, world_size=num_ranks)
    told = {"checkpoint": {"checkpoint": f"{folder}/run"}, "state dict": {"state_dict": f"{folder}/plain.pt"}}
    warm = meshpar.materialize(built(1))  # what torch keeps for itself once it has been used
    meshpar.save_checkpoint(f"{folder}/warm", warm)
    meshpar.materialize(built(1), checkpoint=f"{folder}/warm")
    del warm
    if source != "init":
        made = meshpar.materialize(built(16))
        meshpar.save_checkpoint(f"{folder}/run", made)
        if rank == 0 and source == "state dict":
            torch.manual_seed(0)
            torch.save({f"blocks.{i}.weight": torch.randn(2048, 2048) for i in range(16)}, f"{folder}/plain.pt")
        del made
        dist.barrier()
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
    main()
