"""A second and a third domain axis: rows, columns and depth of a sample on a grid of ranks."""

import pytest
import torch
from torch import nn

import meshpar
from meshpar.errors import SpecError
from meshpar.spec import MeshSpec
from meshpar.testing import assert_equivalent, mesh_for, run_ranks

SQUARE = "data=1,domain=2,domain_w=2"


def test_specs():
    spec = MeshSpec(data=1, domain={-2: 2, -1: 2})
    assert spec == MeshSpec.parse(SQUARE) == MeshSpec.parse({"data": 1, "domain": {-2: 2, -1: 2}})
    assert list(spec.sizes().items()) == [("data", 1), ("domain", 2), ("domain_w", 2), ("tensor", 1)]
    assert MeshSpec(data=1, domain={-3: 2, -1: 2}).sizes() == {
        "data": 1,
        "domain_d": 2,
        "domain": 1,
        "domain_w": 2,
        "tensor": 1,
    }
    assert MeshSpec(domain={-1: 2}).resolve(8).sizes() == {"data": 4, "domain": 1, "domain_w": 2, "tensor": 1}
    assert MeshSpec(data=1, domain={-2: -1, -1: 2}).resolve(8).domain == 4


@pytest.mark.parametrize(
    ("domain", "says"),
    [({-4: 2}, "dim -4"), ({0: 2}, "dim 0"), ({-2: 0}, "domain=0"), ({-2: -1, -1: -1}, "one size of -1")],
)
def test_wrong_dims(domain, says):
    with pytest.raises(SpecError, match=says):
        MeshSpec(data=1, domain=domain)


def test_a_product_that_does_not_fit_names_near_ones():
    with pytest.raises(SpecError, match="domain_w=2"):
        MeshSpec.parse(SQUARE).resolve(8)


def groups(spec: str) -> tuple[tuple[str, ...], int, int, str]:
    mesh = mesh_for(spec)
    x = meshpar.shard(torch.zeros(2, 3, 5, 7), mesh)
    return mesh.mesh_dim_names, mesh.get_group("space").size(), mesh.get_group("data_domain").size(), str(x.placements)


def test_the_mesh_and_the_default_layout():
    for names, space, summed, placements in run_ranks(groups, 4, SQUARE):
        assert names == ("data", "domain", "domain_w", "tensor")
        assert (space, summed) == (4, 4)
        assert placements == "(Shard(dim=0), Shard(dim=2), Shard(dim=3), Replicate())"


def unet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.Conv2d(4, 4, 3, stride=2, padding=1, padding_mode="circular"),
        nn.BatchNorm2d(4),
        nn.MaxPool2d(3, 2, 1),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.ReflectionPad2d(2),
        nn.ConvTranspose2d(4, 2, 2, 2),
        nn.InstanceNorm2d(2),
        nn.Conv2d(2, 1, 5),
    )


def volume() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 2, 3, padding=1), nn.InstanceNorm3d(2, affine=True), nn.GELU(), nn.ConvTranspose3d(2, 1, 2, 2)
    )


@pytest.mark.parametrize("spec", [SQUARE, "data=1,domain=1,domain_w=4", "data=2,domain=1,domain_w=2"])
@pytest.mark.parametrize("size", [(13, 11), (5, 16)])
def test_a_unet_with_corners(spec, size):
    torch.manual_seed(0)
    assert_equivalent(unet, [torch.randn(2, 2, *size, dtype=torch.float64)], spec)


@pytest.mark.parametrize("spec", ["data=1,domain_d=2,domain=2", "data=1,domain_d=2,domain_w=2", "data=1,domain_d=3"])
def test_volumes(spec):
    torch.manual_seed(0)
    assert_equivalent(volume, [torch.randn(1, 1, 7, 5, 6, dtype=torch.float64)], spec)


def statistics() -> list[tuple[str, str]]:
    mesh = mesh_for(SQUARE)
    model = meshpar.parallelize(nn.GroupNorm(1, 3), mesh)
    with meshpar.record() as log:
        model(torch.randn(1, 3, 5, 7))
    return [(e.kind, e.axis) for e in log.entries if e.kind == "statistics"]


def test_statistics_over_rows_and_columns_go_in_one_message():
    assert run_ranks(statistics, 4) == [[("statistics", "space")]] * 4
