"""Constant tensors made in a forward, and written into: canvases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rule_cases import MESHES, Case, real, run
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import meshpar
from meshpar.batch import shard
from meshpar.errors import ShardingError
from meshpar.record import record
from meshpar.scope import spmd
from meshpar.testing import mesh_for, run_ranks


def _sum_up(x: Tensor) -> Any:
    total = torch.zeros((), dtype=x.dtype)
    total += x.sum()
    total += (x * x).mean()
    return total


def _channel_by_channel(x: Tensor) -> Any:
    out = torch.empty(x.shape, dtype=x.dtype)
    for c in range(x.shape[1]):
        out[:, c] = x[:, c] * c
    return out


def _broadcast(x: Tensor) -> Any:
    out = torch.full(tuple(x.shape), 2.0, dtype=x.dtype)
    out += x
    out *= x.mean(2, keepdim=True)
    return out


def _number_first(x: Tensor) -> Any:
    out = torch.zeros(size=x.shape, dtype=x.dtype)
    out[:, :1] = 1
    out[..., 1:] = x[..., 1:]
    return out + x


def _view(x: Tensor) -> Any:
    b, c, h, w = x.shape
    out = torch.zeros(b * c, h, w, dtype=x.dtype)
    view = out.view(b, c, h, w)
    view[:] = x
    return out * 2, view


def _rows(x: Tensor) -> Any:
    out = torch.ones(4, 3, *x.shape[2:], dtype=x.dtype)
    out[1][2] = x[0, 0]
    last = out[3]
    last.copy_(x[1])
    return out


def _beside(x: Tensor) -> Any:
    z = torch.zeros(2, 1, *x.shape[2:], dtype=x.dtype)
    kernel = torch.ones(1, 2, 3, 3, dtype=x.dtype)
    return torch.cat([x, z], 1), z + x, F.conv2d(torch.cat([z, x[:, :1]], 1), kernel, padding=1)


def _state(x: Tensor) -> Any:
    h = torch.zeros(x.shape, dtype=x.dtype)
    for _ in range(3):
        h = torch.tanh(h * 0.5 + x)
    return h


def _mask(x: Tensor) -> Any:
    h, w = x.shape[2:]
    mask = torch.zeros(h, w, dtype=x.dtype)
    for i, rows in enumerate((slice(0, 2), slice(2, None))):
        for j, columns in enumerate((slice(0, 1), slice(1, None))):
            mask[rows, columns] = 2 * i + j
    flat = mask.reshape(1, -1)
    return x + flat.masked_fill(flat != 0, -100.0).reshape(h, w), mask.to(x)


def _converted(x: Tensor) -> Any:
    out = torch.zeros(x.shape).to(x.dtype).to(x.device).clone().type_as(x)
    out[:, :, 1:] = x[:, :, 1:]
    return out


def _indices(x: Tensor) -> Any:
    index = torch.zeros(2, dtype=torch.long)
    index[1] = 1
    return x[:, index], torch.ones(x.shape, dtype=torch.bool) & (x > 0)


def _added_rows(x: Tensor) -> Any:
    return torch.zeros(x.shape, dtype=x.dtype).index_add_(1, torch.tensor([2, 0, 1]), x)


def _read(x: Tensor) -> Any:
    filled = torch.full((2, 2), x.detach().amax(), dtype=x.dtype)
    return filled.tolist(), torch.ones(3).sum().item(), float(torch.ones(3).numpy().sum()), torch.zeros(2, 0).shape[0]


SCENES = {
    function.__name__: function
    for function in (
        *(_sum_up, _channel_by_channel, _broadcast, _number_first, _view, _rows, _beside, _state, _mask),
        *(_converted, _indices, _added_rows, _read),
    )
}
KEEPS = ("_channel_by_channel", "_broadcast", "_number_first", "_state", "_converted")


def _scenes(mesh: str, sizes: tuple[int, ...]) -> Iterator[Case]:
    for h in sizes:
        for layout in ("data _ domain _", "data _ _ domain"):
            for name, scene in SCENES.items():
                yield Case(f"{name} {h} {layout}", scene, (real(2, 3, h, 4),), (layout,), keeps=name in KEEPS)


def _five_rows(mesh: str) -> Iterator[Case]:
    yield from _scenes(mesh, (5,))


def _any_rows(mesh: str) -> Iterator[Case]:
    yield from _scenes(mesh, (1, 2, 8))


def test_scenes() -> None:
    run(_five_rows, "data=1,domain=2", at_least=20)


@pytest.mark.parametrize("mesh", MESHES)
def test_scenes_equals_one_process(mesh: str) -> None:
    run(_any_rows, mesh, at_least=60)


def _lazy() -> None:
    mesh = mesh_for("data=1,domain=2")
    x = shard(real(2, 3, 8, 4), mesh)
    with spmd(on_gather="error", mesh=mesh), record() as log:
        out = torch.zeros(2, 3, 8, 4, dtype=torch.float64)
        assert isinstance(out, DTensor)
        assert out.to_local().untyped_storage().nbytes() == 8
        out[:] = x
        assert out.placements == x.placements
        assert out.to_local().untyped_storage().nbytes() == 2 * 3 * 4 * 4 * 8
        kept = torch.ones(2, 3, 8, 4, dtype=torch.float64)
        kept[:, 0] = 2  # every rank holds it: still free
        kept[:, 1:] = x[:, 1:]
        assert kept.placements == x.placements
    assert not log.entries
    assert torch.equal(kept.full_tensor()[:, 0], torch.full((2, 8, 4), 2.0, dtype=torch.float64))


def test_a_canvas_is_one_number_until_it_takes_the_layout_of_the_first_activation() -> None:
    run_ranks(_lazy, 2)


def _plain() -> None:
    mesh = mesh_for("data=1,domain=2")
    x = shard(real(2, 3, 8, 4), mesh)
    with spmd(mesh=mesh):
        for made in (
            torch.zeros(3, dtype=torch.long),
            torch.ones(2, dtype=torch.bool),
            torch.full((2,), 3),
            torch.zeros(3, requires_grad=True),
            torch.zeros(3, device="meta"),
            torch.arange(3.0),
            torch.zeros_like(torch.arange(3.0)),
        ):
            assert not isinstance(made, DTensor)
        with pytest.raises(RuntimeError):
            torch.zeros(-1)
        with pytest.raises(ShardingError, match="plain tensor"):
            torch.zeros(2, 3, 8, 4, dtype=torch.long)[:] = x.long()
    with spmd():  # no mesh is known
        assert not isinstance(torch.zeros(3), DTensor)


def test_what_stays_plain() -> None:
    run_ranks(_plain, 2)


class Writer(nn.Module):
    """Write scaled channels into a tensor that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], 3, x.shape[2], x.shape[3], dtype=x.dtype)
        out[:, :2] = x[:, :2] * self.scale[:2, None, None]
        out[:, 2:] += x[:, 2:] * self.scale[2]
        return out


def _model() -> None:
    torch.manual_seed(0)
    model = Writer()
    parallel = meshpar.parallelize(model, "data=1,domain=2", on_gather="error")
    x = real(2, 3, 5, 4)
    expected = model(x)
    y = parallel(x)
    assert torch.equal(y.full_tensor(), expected)
    with spmd():
        (y * y).sum().backward()
    (expected * expected).sum().backward()
    assert torch.allclose(parallel.scale.grad.full_tensor(), model.scale.grad, rtol=0, atol=1e-12)


def test_a_parallel_model_writes_into_what_it_makes() -> None:
    run_ranks(_model, 2)
