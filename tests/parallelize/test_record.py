"""The record of a step: nothing gathered, and not a byte more than the windows of the ops need.

What is needed is found here without meshpar: an op is run on one process, one input row at a time is made NaN, and the
output rows that become NaN depend on it.
"""

import nets
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import meshpar
from meshpar.testing import mesh_for, run_ranks

SPATIAL = {F.conv2d: "F.conv2d", F.max_pool2d: "F.max_pool2d", F.interpolate: "F.interpolate"}


class Listen(TorchFunctionMode):
    """Keep the calls of the ops that look at other rows, with the shapes that they meet on one process."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, Tensor, tuple, dict]] = []
        self.norms = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in SPATIAL:
            self.calls.append((func, args[0], args[1:], kwargs or {}))
        self.norms += func is F.group_norm
        return func(*args, **(kwargs or {}))


def pieces(n: int, p: int) -> list[range]:
    c = -(-n // p)
    return [range(min(r * c, n), min((r + 1) * c, n)) for r in range(p)]


def dependence(func, x: Tensor, args, kwargs) -> list[set[int]]:
    """Give, for each output row, the input rows that it depends on."""
    x = torch.rand_like(x[:1])
    with torch.no_grad():
        num = func(x, *args, **kwargs).shape[-2]
        needs: list[set[int]] = [set() for _ in range(num)]
        for row in range(x.shape[-2]):
            probe = x.clone()
            probe[..., row, :] = torch.nan
            for out in (
                func(probe, *args, **kwargs).isnan().any(dim=-1).flatten(0, 1).any(dim=0).nonzero().flatten().tolist()
            ):
                needs[out].add(row)
    return needs


def least_bytes(func, x: Tensor, args, kwargs, p: int, data: int) -> list[int]:
    """Give, for each rank of the domain axis, the bytes that it must send for one op in one direction."""
    needs = dependence(func, x, args, kwargs)
    inputs, outputs = pieces(x.shape[-2], p), pieces(len(needs), p)
    row_bytes = x.shape[0] // data * x.shape[1] * x.shape[3] * x.element_size()
    wanted = [set().union(*(needs[i] for i in out)) for out in outputs]
    return [
        sum(len(rows & set(own)) for q, rows in enumerate(wanted) if q != r) * row_bytes for r, own in enumerate(inputs)
    ]


def received_bytes(func, x: Tensor, args, kwargs, p: int, data: int) -> list[int]:
    """Give the bytes that each rank is sent forward: its gradients go the same way back."""
    needs = dependence(func, x, args, kwargs)
    inputs, outputs = pieces(x.shape[-2], p), pieces(len(needs), p)
    row_bytes = x.shape[0] // data * x.shape[1] * x.shape[3] * x.element_size()
    wanted = [set().union(*(needs[i] for i in out)) for out in outputs]
    return [len(rows - set(own)) * row_bytes for rows, own in zip(wanted, inputs, strict=True)]


def step(spec: str, shape: tuple[int, ...]):
    mesh = mesh_for(spec)
    data, p = meshpar.axis_size(mesh, "data"), meshpar.axis_size(mesh, "domain")
    torch.manual_seed(0)
    net = nets.UNet().double()
    x = torch.randn(shape, dtype=torch.float64).requires_grad_()
    with Listen() as heard:
        net(x)
    model = meshpar.parallelize(net, mesh, on_gather="error")
    own = meshpar.coordinate(mesh, "data")
    piece = x.detach().chunk(data)[own].clone().requires_grad_()
    with meshpar.record() as log:
        with meshpar.spmd():
            loss = F.mse_loss(model(piece), meshpar.shard_batch(torch.zeros_like(piece[:, :1]), mesh))
        loss.backward()
    me = meshpar.coordinate(mesh, "domain")
    forward = sorted(
        (SPATIAL[func], num) for func, *call in heard.calls if (num := least_bytes(func, *call, p, data)[me])
    )
    backward = sorted(
        (SPATIAL[func], num) for func, *call in heard.calls if (num := received_bytes(func, *call, p, data)[me])
    )
    found = [
        sorted((e.op, e.num_bytes) for e in log.select(kind="halo", backward=way) if e.num_bytes)
        for way in (False, True)
    ]
    return {
        "forward": (found[0], forward),
        "backward": (found[1], backward),
        "gathers": len(log.gathers()),
        "kinds": sorted({e.kind for e in log.entries}),
        "statistics": [len(log.select(kind="statistics", backward=way)) for way in (False, True)],
        "norms": heard.norms,
        "reductions": len(log.select(kind="reduction")),
        "rank": dist.get_rank(),
    }


@pytest.mark.parametrize("spec", ["data=2,domain=2", "data=1,domain=4", "data=1,domain=3"])
@pytest.mark.parametrize("num_rows", [13, 37])
def test_the_bytes_of_a_unet_step_are_the_least_that_its_windows_need(spec, num_rows):
    num_ranks = 3 if spec.endswith("3") else 4
    for answer in run_ranks(step, num_ranks, spec, (2, 2, num_rows, 12)):
        assert answer["gathers"] == 0
        assert answer["forward"][0] == answer["forward"][1]
        assert answer["backward"][0] == answer["backward"][1]
        assert set(answer["kinds"]) <= {"halo", "statistics", "reduction", "batch"}
        assert answer["statistics"] == [answer["norms"]] * 2  # one collective a norm and direction
        assert answer["reductions"] == 1  # the loss


def conv_bytes(n: int, kernel: int, padding: int) -> tuple[int, int, int]:
    mesh = mesh_for("data=1,domain=4")
    torch.manual_seed(0)
    x = torch.randn(1, 2, n, 3, dtype=torch.float64)
    layer = torch.nn.Conv2d(2, 2, kernel, padding=padding).double()
    with meshpar.record() as log, meshpar.spmd(on_gather="error"), torch.no_grad():
        y = meshpar.rewrite(layer)(meshpar.shard(x, mesh))
    least = least_bytes(layer, x, (), {}, 4, 1)[meshpar.coordinate(mesh, "domain")]
    with torch.no_grad():
        return log.num_bytes(), least, int(not torch.allclose(meshpar.gather(y), layer(x), atol=1e-12))


@pytest.mark.parametrize("n", [1, 5, 721])
@pytest.mark.parametrize(("kernel", "padding"), [(3, 1), (7, 3), (1, 0), (9, 4), (4, 2)])
def test_hard_sizes_are_right_and_send_the_least(n, kernel, padding):
    """One row, five rows and 721 rows over four ranks, and kernels wider than a shard."""
    for sent, least, wrong in run_ranks(conv_bytes, 4, n, kernel, padding):
        assert not wrong
        assert sent == least
