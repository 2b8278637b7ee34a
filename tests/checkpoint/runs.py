"""Models and training runs for the tests of this folder, on a mesh or on one process."""

import copy
import functools

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import meshpar
from meshpar.data import fully_shard_over
from meshpar.initial import own_tensors
from meshpar.registry import Policy
from meshpar.rewrite import rewrite
from meshpar.testing import mesh_for


class Net(nn.Module):
    """Has what is hard to keep: sizes that no mesh divides, a 0-d weight, a tie, buffers, another dtype, a list."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 7, 3, padding=1)
        self.norm = nn.BatchNorm2d(7)
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Conv2d(7, 7, 3, padding=1), nn.SiLU()) for _ in range(3)])
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.frozen = nn.Parameter(torch.full((1, 7, 1, 1), 0.1), requires_grad=False)
        self.mlp = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
        self.head = nn.Conv2d(7, 1, 1)

    def forward(self, x):
        x = self.norm(self.stem(x)) * self.scale + self.frozen
        for block in self.blocks:
            x = x + block(x)
        return self.head(x + self.mlp(x))


PLAN = {"mlp.0": "colwise", "mlp.2": "rowwise"}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    shape = (4, 1, 9, 6)
    return torch.randn(4, 2, 9, 6, generator=g, dtype=torch.float64), torch.randn(
        shape, generator=g, dtype=torch.float64
    )


OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.02),
    "sgd": functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    "nadam": functools.partial(torch.optim.NAdam, lr=0.02),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.02),
}


def parts_of_batch(mesh) -> tuple[int, int]:
    """Give into how many parts a batch is cut, and which of them this rank has."""
    num, at = 1, 0
    for axis in mesh.mesh_dim_names:
        if axis in ("replica", "data"):
            size = meshpar.axis_size(mesh, axis)
            num, at = num * size, at * size + meshpar.coordinate(mesh, axis)
    return num, at


class Run:
    """A model in training on a mesh, or on one process where `spec` is empty."""

    def __init__(self, spec: str, optimizer: str = "adamw", seed: int = 3, make=Net, **told) -> None:
        torch.manual_seed(seed)
        net = make().double()
        self.mesh = mesh_for(spec) if spec else None
        if "tensor" in spec:
            told["tensor_plan"] = PLAN
        self.model = meshpar.parallelize(net, self.mesh, **told) if spec else net
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        rest = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = OPTIMIZERS[optimizer](groups, foreach="tensor" not in spec)  # no foreach over several meshes
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.step = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            x, t = batch(self.step)
            if self.mesh is None:
                loss = (self.model(x) - t).square().mean()
            else:
                num, at = parts_of_batch(self.mesh)
                y = self.model(x.chunk(num)[at])
                with meshpar.spmd():
                    loss = (y - meshpar.shard_batch(t.chunk(num)[at], self.mesh)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.step += 1
            losses.append(float(meshpar.gather(loss.detach())))
        return losses

    def save(self, folder: str, **options) -> meshpar.Saving:
        told = {"scheduler": self.scheduler, "step": self.step, **options}
        return meshpar.save_checkpoint(folder, self.model, self.optimizer, **told)

    def load(self, folder: str, **options) -> meshpar.Loaded:
        loaded = meshpar.load_checkpoint(folder, self.model, self.optimizer, scheduler=self.scheduler, **options)
        self.step = loaded.step
        return loaded


SPLIT = {"first": 0, "second": 1, "norm": None, "odd": 0, "conv": 0, "table": 1, "scale": None}


class Parts(nn.Module):
    """Layers to split by hand over the tensor axis: sizes that do not divide, and some smaller than the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 11)
        self.second = nn.Linear(11, 5, bias=False)
        self.norm = nn.LayerNorm(5)
        self.odd = nn.Linear(4, 3)
        self.conv = nn.Conv2d(3, 7, 3)
        self.table = nn.Embedding(9, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))


def split(spec: str, net: nn.Module) -> nn.Module:
    """Lay the parameters of a model over a mesh, those in SPLIT over its tensor axis first."""
    mesh = mesh_for(spec)
    model = rewrite(copy.deepcopy(net), policy=Policy(mesh=mesh))
    own_tensors(model)
    if meshpar.axis_size(mesh, "tensor") > 1:
        for name, p in list(model.named_parameters()):
            owner = model.get_submodule(name.rpartition(".")[0])
            dim = SPLIT[name.partition(".")[0]]
            if dim is not None and dim < p.dim():
                w = distribute_tensor(p.detach(), mesh["tensor"], [Shard(dim)], src_data_rank=None)
                setattr(owner, name.rpartition(".")[2], nn.Parameter(w))
    fully_shard_over(model, mesh)
    return model


def set_gradients(model: nn.Module, seed: int) -> None:
    """Give every parameter the gradient that one process would have, drawn from a seed."""
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        whole = torch.randn(p.shape, generator=g, dtype=p.dtype)
        p.grad = meshpar.shares.cut_as(whole, p) if isinstance(p, DTensor) else whole
