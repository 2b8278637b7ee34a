"""Writing into an index of a sharded activation against one process."""

import functools
from typing import Any

import pytest
import torch
from index_cases import ALL, IMAGE, LISTS, MESHES, check, image, put_number, put_tensor, several
from torch import Tensor

from meshpar.testing import run_ranks
from meshpar.testing.equivalence import assert_same
from meshpar.testing.meshes import mesh_for


def put_row(index: Any, x: Tensor, row: Tensor) -> Tensor:
    y = x * 1.0
    y[index] = row
    return y


PLACES: list[Any] = [
    (ALL, 0),
    (ALL, ALL, slice(1, 4)),
    (ALL, ALL, slice(None, None, 2), slice(1, 3)),
    (ALL, ALL, 3),
    (0,),
    (ALL, ALL, slice(4, 2)),
    (ALL, [2, 0]),
    (ALL, [2, 0], slice(2, None)),
    ...,
    (1, ALL, -1, None),
]


@pytest.mark.parametrize("index", PLACES, ids=str)
@pytest.mark.parametrize("put", [put_number, put_tensor])
def test_writing(put: Any, index: Any) -> None:
    for spec, p in MESHES.items():
        run_ranks(check, p, spec, functools.partial(put, index), IMAGE)


def check_row(spec: str, index: Any, shape: tuple[int, ...]) -> None:
    fn = functools.partial(put_row, index)
    assert_same(fn, [image(IMAGE)], mesh=mesh_for(spec), weights=[image(shape)], tolerance=1e-12)


@pytest.mark.parametrize(
    ("index", "shape"),
    [
        ((ALL, 0), (5, 6)),
        ((ALL, ALL, slice(1, 4)), (3, 6)),
        ((ALL, ALL, slice(1, 4)), (4, 1, 6)),
        ((ALL, ALL, 2), (4, 6)),
        ((0,), (1, 4, 5, 6)),
        ((..., 0), ()),
        ((ALL, [2, 0]), (2, 5, 1)),
    ],
)
def test_writing_a_parameter(index: Any, shape: tuple[int, ...]) -> None:
    for spec, p in MESHES.items():
        run_ranks(check_row, p, spec, index, shape)


def put_masked(x: Tensor) -> Tensor:
    y = x * 1.0
    y[y > 0] = 0.0
    return y


def put_list(x: Tensor) -> Tensor:
    y = x * 1.0
    y[:, :, [4, 0]] = 7.0
    return y


def test_writing_by_a_mask() -> None:
    run_ranks(check, 4, "data=2,domain=2", put_masked, IMAGE)


def put_rows(index: Any, x: Tensor) -> Tensor:
    y = x * 1.0
    y[index] = (x[index] * 2.0).sin()
    return y


def test_writing_to_lists_of_sharded_rows() -> None:
    fns: list[Any] = [put_list, *(functools.partial(put_rows, index) for index in (LISTS[0], LISTS[3], LISTS[5]))]
    for spec in ("data=1,domain=4", "data=2,domain=2"):
        run_ranks(several, 4, spec, fns, IMAGE)
        run_ranks(check_row, 4, spec, (ALL, ALL, [4, 0]), (4, 2, 6))
        run_ranks(check_row, 4, spec, (ALL, [1, 3], [4, 0]), (2, 6))


def put_where(x: Tensor) -> Tensor:
    y = x * 1.0
    y[x[:, :, :, 0] > 0] = 3.0
    y[x.sum((1, 2, 3)) > 0] = x[0]
    y[torch.tensor([True, False, True])] = 0.5
    y[y > 1] = x.max()
    return y


def test_writing_by_a_mask_of_the_first_dims() -> None:
    for spec in ("data=1,domain=4", "data=2,domain=2"):
        run_ranks(check, 4, spec, put_where, IMAGE)
