"""What each rank does on two hosts: training steps against one process, passing things on. It writes what it saw."""

import json
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import meshpar
from meshpar import runtime


def net():
    """Give a network with halos, strides, statistics and a transposed convolution."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.Conv2d(4, 8, 3, stride=2, padding=1),
        nn.GELU(),
        nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1),
    ).double()


def steps(model, x, target, over=lambda x: x):
    """Train two steps; give the losses and the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        with meshpar.spmd():
            loss = nn.functional.mse_loss(model(x), over(target))
        loss.backward()
        optimizer.step()
        losses.append(float(meshpar.gather(loss.detach())))
    return losses, meshpar.full_state_dict(model)


def difference(spec):
    """Give the largest difference, in losses and parameters, between a mesh and one process."""
    x, target = torch.randn(2, 2, 22, 6).double(), torch.randn(2, 1, 22, 6).double()
    dist.broadcast(x, src=0)
    dist.broadcast(target, src=0)
    alone = net()
    optimizer, expected = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(alone(x), target)
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    mesh = meshpar.make_mesh(spec, "cpu")
    num, here = meshpar.axis_size(mesh, "data"), meshpar.coordinate(mesh, "data")
    part = slice(2 // num * here, 2 // num * (here + 1))
    model = meshpar.parallelize(net(), mesh)
    losses, params = steps(model, x[part], target[part], lambda t: meshpar.shard_batch(t, mesh))
    worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    return max(worst, *(float((params[name] - p).abs().max()) for name, p in alone.state_dict().items()))


def passed(give, *args):
    """Give what the first rank was given, or the error."""
    try:
        with give(*args) as got:
            return [x.tolist() if isinstance(x, torch.Tensor) else [x["rank"], x["w"].tolist()] for x in got]
    except meshpar.MeshparError as error:
        return [type(error).__name__, str(error)]


def main():
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    with runtime.distributed(device="cpu", timeout_s=300) as process:
        rank, ranks = process.rank, list(range(process.world_size))
        mine = torch.full((2,), float(rank))
        seen = {
            "host": socket.gethostname(),
            "resolves": socket.gethostbyname(socket.gethostname()),
            "launcher": process.launcher,
            "local_rank": process.local_rank,
            "variables": [os.environ.get(name) for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME")],
            "domain": difference("domain=4"),
            "both": difference("data=2,domain=2"),
            "all tensors": passed(meshpar.get_tensors_parallel, mine, ranks),
            "tensors of a host": passed(meshpar.get_tensors_parallel, mine, ranks[:2] if rank < 2 else ranks[2:]),
            "all configs": passed(
                meshpar.get_configs_parallel, {"rank": rank, "w": mine}, ranks, None, folder / "workspace"
            ),
        }
        (folder / f"rank{rank}").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
