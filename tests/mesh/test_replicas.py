"""The `replica` axis of a spec: copies of the parameters. Activations see one axis `data`."""

import pytest

import meshpar
from meshpar import MeshSpec, SpecError
from meshpar.mesh import replicas
from meshpar.testing import mesh_for, run_ranks
from meshpar.testing.meshes import ranks_of


def test_a_spec_names_replicas_where_there_are_some():
    spec = MeshSpec.parse("replica=2,data=3,domain=2")
    assert spec == MeshSpec(replica=2, data=3, domain=2)
    assert list(spec.sizes().items()) == [("replica", 2), ("data", 3), ("domain", 2), ("tensor", 1)]
    assert repr(spec) == "MeshSpec(replica=2, data=3, domain=2, tensor=1)"
    assert MeshSpec.parse(str(spec)) == spec
    assert "replica" not in repr(MeshSpec(data=2))
    assert "replica" not in MeshSpec(data=2).sizes()
    assert MeshSpec(replica=2, data=1, domain={-2: 2, -1: 2}).sizes()["domain_w"] == 2
    assert ranks_of("replica=2,data=3,domain=2") == 12


@pytest.mark.parametrize(
    ("asked", "world", "found"),
    [
        ("replica=2", 8, "replica=2,data=4,domain=1,tensor=1"),
        ("replica=-1,data=2", 8, "replica=4,data=2,domain=1,tensor=1"),
        ("replica=2,domain=2", 8, "replica=2,data=2,domain=2,tensor=1"),
        ("replica=-1,data=2,domain=4", 8, "data=2,domain=4,tensor=1"),
    ],
)
def test_the_world_decides_one_size(asked, world, found):
    assert str(MeshSpec.parse(asked).resolve(world)) == found


@pytest.mark.parametrize(
    ("asked", "world", "says"),
    [
        ("replica=3,data=2", 8, "the world has 8"),
        ("replica=-1,data=3", 4, "the world has 4"),
        ("domain_w=-1,data=3", 4, "the world has 4"),
    ],
)
def test_what_does_not_fit_is_said_with_what_does(asked, world, says):
    with pytest.raises(SpecError) as caught:
        MeshSpec.parse(asked).resolve(world)
    text = str(caught.value)
    assert says in text
    assert MeshSpec.parse(text.partition("one of ")[2].partition(", ")[0].partition(";")[0])


@pytest.mark.parametrize("asked", ["replica=0", "replica=-2", "replica=2,replica=2", "replica=-1", "replicas=2"])
def test_wrong_replicas_are_refused(asked):
    with pytest.raises(SpecError, match="replica"):
        MeshSpec.parse(asked)


def seen() -> list:
    mesh = mesh_for("replica=2,data=1,domain=2")
    again = meshpar.make_mesh(mesh)
    names = tuple(mesh.mesh_dim_names)
    return [names, tuple(mesh.shape), replicas(mesh), replicas(again), replicas(mesh_for("data=2,domain=2"))]


def test_a_mesh_keeps_its_replicas_and_has_one_axis_data():
    assert run_ranks(seen, 4) == [[meshpar.AXES, (2, 2, 1), 2, 2, 1]] * 4
