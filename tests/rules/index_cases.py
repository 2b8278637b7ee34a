"""What the tests of indexing share: an image, and a comparison with one process."""

from typing import Any

import torch
from torch import Tensor

from meshpar.testing.equivalence import Report, assert_same
from meshpar.testing.meshes import mesh_for

MESHES = {"data=1,domain=4": 4, "data=2,domain=2": 4, "data=4": 4, "data=1,domain=3": 3, "data=1,domain=2": 2}
IMAGE = (3, 4, 5, 6)
ALL = slice(None)
UPPER_2D = torch.tensor([[0, 3], [2, 1]])
MASK_C = torch.tensor([True, False, True, True])


def image(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def get(index: Any, x: Tensor) -> Any:
    return x[index]


def call(name: str, args: tuple[Any, ...], x: Tensor) -> Any:
    return getattr(torch, name)(x, *args)


def compare(spec: str, fn: Any, shape: tuple[int, ...], layout: str | None = None, **options: Any) -> Report:
    return assert_same(fn, [image(shape)], mesh=mesh_for(spec), layouts=[layout], tolerance=1e-12, **options)


def check(spec: str, fn: Any, shape: tuple[int, ...], layout: str | None = None, **options: Any) -> int:
    """Compare with one process, gradients too; give the bytes that this rank sent forward."""
    return compare(spec, fn, shape, layout, **options).log.num_bytes(backward=False)


def num_gathers(spec: str, fn: Any, shape: tuple[int, ...], layout: str | None = None) -> int:
    return len(compare(spec, fn, shape, layout, gathers=True).log.gathers())


def several(spec: str, fns: list[Any], shape: tuple[int, ...], layout: str | None = None) -> int:
    return sum(check(spec, fn, shape, layout) for fn in fns)


MASK_H = torch.tensor([True, False, True, True, False])
LISTS: list[Any] = [
    (ALL, ALL, MASK_H),
    (ALL, ALL, [[0, 1]]),
    (ALL, ALL, torch.tensor([[4, 0, 1], [2, 2, -1]])),
    (ALL, [0, 1], [0, 4]),
    (ALL, [[0], [3]], [0, 4, 4]),
    (ALL, ALL, [1, 4, 0, 3], [5, 0, 2, 2]),
    (ALL, [3, 0], ALL, [1, 4]),
    (ALL, [3, 0], [2, 2], slice(1, 3)),
    (0, ALL, [4, 1], None),
    (ALL, 2, [4, 1], [0, 5]),
    (ALL, ALL, torch.zeros(0, dtype=torch.int64)),
    (ALL, ALL, torch.arange(30).view(5, 6) % 3 == 0),
    (ALL, torch.arange(20).view(4, 5) % 3 == 1),
    (ALL, ALL, [[3]]),
    ([1, 2, 0], [0, 0, 3]),
    (torch.arange(3), ALL, [4, 2, 0]),
    (torch.arange(3)[:, None], ALL, [[4, 2], [0, 1], [0, 3]]),
]


def put_number(index: Any, x: Tensor) -> Tensor:
    y = x * 1.0
    y[index] = 3.0
    return y * x


def put_tensor(index: Any, x: Tensor) -> Tensor:
    y = x * 1.0
    y[index] = x[index] * 2.0
    return y
