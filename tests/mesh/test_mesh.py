"""Meshes: the pure functions on 1 to 64 ranks against brute force, `make_mesh` and the runtime on real ranks."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshpar import mesh as meshes
from meshpar import private, runtime
from meshpar.errors import SpecError
from meshpar.mesh import make_mesh
from meshpar.spec import AXES, MeshSpec
from meshpar.testing import run_ranks
from meshpar.testing.meshes import mesh_for

# The pure functions, without processes


def fake_world(size, rank):
    """Be one rank of a world that does not exist."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


def brute_force(sizes, rank):
    """Give coordinates and groups of a rank by listing all of them: the last axis varies fastest."""
    where = dict(enumerate(itertools.product(*(range(n) for n in sizes))))
    mine = where[rank]
    lines = {}
    for i, axis in enumerate(AXES):
        line = [r for r, at in where.items() if at[:i] + at[i + 1 :] == mine[:i] + mine[i + 1 :]]
        lines[axis] = tuple(sorted(line, key=lambda r, i=i: where[r][i]))
    return dict(zip(AXES, mine, strict=True)), lines


def check_all_ranks(mesh, sizes, me):
    world = sizes[0] * sizes[1] * sizes[2]
    for rank in (*range(world), None):
        at, lines = brute_force(sizes, me if rank is None else rank)
        for axis in AXES:
            line, i = lines[axis], at[axis]
            assert meshes.axis_size(mesh, axis) == len(line)
            assert meshes.coordinate(mesh, axis, rank) == i
            assert meshes.axis_ranks(mesh, axis, rank) == line
            assert line[i] == (me if rank is None else rank)
            before = line[i - 1] if i > 0 else None
            after = line[i + 1] if i < len(line) - 1 else None
            assert meshes.neighbours(mesh, axis, rank=rank) == (before, after)
            around = (line[i - 1], line[(i + 1) % len(line)])
            assert meshes.neighbours(mesh, axis, rank=rank, periodic=True) == around
            assert meshes.is_first(mesh, axis, rank=rank) == (i == 0)
            assert meshes.is_last(mesh, axis, rank=rank) == (i == len(line) - 1)


def on_fake_worlds():
    """Check every factorization of some worlds as several ranks of each; run in a process of its own."""
    for world in (1, 2, 3, 4, 6, 8, 12, 16, 30, 64):
        ranks = sorted({0, 1 % world, world // 2, world - 1})
        for rank in ranks:
            fake_world(world, rank)
            for data, domain in itertools.product(range(1, world + 1), repeat=2):
                if world % (data * domain) or (world > 16 and (data * 7 + domain) % 3):
                    continue
                sizes = (data, domain, world // (data * domain))
                mesh = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
                if world <= 16 or rank == 0:
                    check_all_ranks(mesh, sizes, rank)
                assert tuple(mesh.get_coordinate()) == tuple(brute_force(sizes, rank)[0].values())
                for axis in AXES:
                    group = dist.get_process_group_ranks(meshes.axis_group(mesh, axis))
                    assert tuple(group) == meshes.axis_ranks(mesh, axis)
    # REFERENCE: 8 ranks, domain 2
    fake_world(8, 0)
    mesh = make_mesh("domain=2", "cpu")
    domains = {meshes.axis_ranks(mesh, "domain", rank) for rank in range(8)}
    assert domains == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert {meshes.axis_ranks(mesh, "data", rank) for rank in range(8)} == {(0, 2, 4, 6), (1, 3, 5, 7)}
    assert [meshes.neighbours(mesh, rank=rank) for rank in (2, 3)] == [(None, 3), (2, None)]
    assert meshes.neighbours(mesh, rank=2, periodic=True) == (3, 3)
    assert mesh.get_group(meshes.SUMMED).size() == 8
    for call in (lambda: meshes.coordinate(mesh, "domain", 8), lambda: meshes.axis_ranks(mesh, "domain", -1)):
        with pytest.raises(SpecError, match="not on this mesh"):
            call()
    for call in (meshes.axis_size, meshes.coordinate, meshes.axis_group, meshes.axis_ranks, meshes.neighbours):
        with pytest.raises(SpecError, match="axis 'rows': not on this mesh"):
            call(mesh, "rows")
    # a mesh of 1,024 ranks in one process
    fake_world(1024, 517)
    mesh = make_mesh("data=16,domain=16,tensor=4", "cpu")
    assert meshes.coordinate(mesh, "domain") == 517 // 4 % 16
    assert meshes.neighbours(mesh) == (513, 521)
    # the same mesh again as another rank of the same world: nothing of the former rank is remembered
    fake_world(1024, 3)
    mesh = make_mesh("data=16,domain=16,tensor=4", "cpu")
    assert [meshes.coordinate(mesh, axis) for axis in AXES] == [0, 0, 3]
    assert meshes.neighbours(mesh) == (None, 7)
    print("fake worlds: all right")


LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module")
def printed():
    """Run `on_fake_worlds` and `start` in one process of its own, without the variables of a launcher."""
    env = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
    paths = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    env |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    code = "import test_mesh; test_mesh.start(); test_mesh.on_fake_worlds()"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
    return done.stdout + done.stderr


def test_coordinates_groups_and_neighbours_by_brute_force(printed):
    assert "fake worlds: all right" in printed


# Real ranks


def made(spec):
    mesh = make_mesh(spec, "cpu")
    for axis in AXES:
        total = torch.ones(1)
        dist.all_reduce(total, group=meshes.axis_group(mesh, axis))
        assert total == meshes.axis_size(mesh, axis)
    summed = torch.ones(1)
    dist.all_reduce(summed, group=mesh.get_group(meshes.SUMMED))
    assert summed == meshes.axis_size(mesh, "data") * meshes.axis_size(mesh, "domain")
    assert meshes.is_ours(mesh)
    assert make_mesh(mesh) is mesh
    return mesh.mesh_dim_names, tuple(mesh.shape), mesh.device_type


@pytest.mark.parametrize(
    ("world", "spec", "shape"),
    [
        (1, "", (1, 1, 1)),
        (2, {"domain": 2}, (1, 2, 1)),
        (3, MeshSpec(domain=3), (1, 3, 1)),
        (4, "domain=2", (2, 2, 1)),
        (4, "data=1,domain=2,tensor=-1", (1, 2, 2)),
    ],
)
def test_make_mesh_has_all_three_axes(world, spec, shape):
    assert run_ranks(made, world, spec) == [(AXES, shape, "cpu")] * world


def num_groups():
    return len(dist.distributed_c10d._world.pg_map)


def refused(spec, device_type="cpu"):
    before = num_groups()
    with pytest.raises(SpecError) as caught:
        make_mesh(spec, device_type)
    assert num_groups() == before, "a group was made before the spec was refused"
    total = torch.ones(1)
    dist.all_reduce(total)  # all ranks are here
    assert total == dist.get_world_size()
    return str(caught.value)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("data=3", "the world has 4"),
        ("data=4,domain=2", "makes 8 ranks; the world has 4"),  # larger than the world
        ("data=1,domain=2", "makes 2 ranks; the world has 4"),
        ("domain=8", "8 for the named axes; the world has 4"),
        ("space=2", "unknown axis"),
        ("data=0", "sizes not zero"),
        ("domain=-1", "one size of -1"),
        ({"data": 2.0}, "a positive integer"),
        (7, "a string, mapping or MeshSpec"),
    ],
)
def test_wrong_specs_are_refused_on_all_ranks_before_any_group_is_made(spec, says):
    texts = run_ranks(refused, 4, spec)
    assert len(set(texts)) == 1
    assert says in texts[0]


def test_wrong_device_types_are_refused_before_any_group_is_made():
    for device_type in ("abacus", "cpu:0"):
        assert "device_type" in run_ranks(refused, 2, "data=2", device_type)[0]


def foreign():
    """Give back what is said of meshes that torch's own functions made."""
    plain = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=AXES)
    assert make_mesh(plain) is plain
    assert plain.get_group(meshes.SUMMED).size() == 2
    texts = []
    for other in (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "domain")),
        init_device_mesh("cpu", (2, 2, 1)),
        init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("domain", "data", "tensor")),
    ):
        assert not meshes.is_ours(other)
        texts.append(refused(other))
    half = DeviceMesh("cpu", torch.arange(2).view(1, 2, 1), mesh_dim_names=AXES)
    if dist.get_rank() >= 2:
        with pytest.raises(SpecError, match="this process is not on it"):
            make_mesh(half)
    else:
        assert meshes.neighbours(make_mesh(half), periodic=True) == (1 - dist.get_rank(),) * 2
    dist.barrier()
    return texts


def test_meshes_of_others_are_checked():
    for texts in run_ranks(foreign, 4):
        assert "('data', 'domain') of sizes (2, 2)" in texts[0]
        assert all("needs:  the axes ('data', 'domain', 'tensor')" in text for text in texts)


def neighbours_answer():
    """FIELD 9, 10, 20: on a sub-mesh whose global ranks are not 0 and 1, peers are those of the axis's group."""
    found = []
    for spec, axis in (("data=2,domain=2", "domain"), ("data=2,domain=2", "data"), ("data=1,domain=4", "domain")):
        mesh = mesh_for(spec)
        before, after = meshes.neighbours(mesh, axis, periodic=True)
        group = meshes.axis_group(mesh, axis)
        mine, got = torch.tensor([dist.get_rank()]), torch.tensor([-1])
        ops = [dist.P2POp(dist.isend, mine, after, group), dist.P2POp(dist.irecv, got, before, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert got == before
        found.append((before, after))
    return found


def test_field_9_10_20_neighbours_are_global_ranks_of_the_axis():
    found = run_ranks(neighbours_answer, 4)
    assert [pair[0] for pair in found] == [(1, 1), (0, 0), (3, 3), (2, 2)]
    assert [pair[1] for pair in found] == [(2, 2), (3, 3), (0, 0), (1, 1)]
    assert [pair[2] for pair in found] == [(3, 1), (0, 2), (1, 3), (2, 0)]


# Without a launcher, and with half of one


def started_alone():
    """Start the group without a launcher."""
    assert runtime.world_size() == 1
    assert runtime.local_rank() == 0
    mesh = make_mesh("", "cpu")
    assert tuple(mesh.shape) == (1, 1, 1)
    assert dist.get_world_size() == 1
    assert dist.get_backend() == "gloo"
    group = dist.group.WORLD
    make_mesh("data=1", "cpu")
    assert dist.group.WORLD is group, "the process group was replaced"
    with pytest.raises(SpecError, match="the world has 1"):
        make_mesh("data=2", "cpu")
    assert private.group_by_name(group.group_name) is group, "a group of a former life was remembered"
    dist.destroy_process_group()


def start():
    """Start the group alone, with an address that stands for nothing, and from the variables of torchrun."""
    started_alone()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    started_alone()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    started_alone()
    for name in LAUNCHER:
        del os.environ[name]
    print("alone: all right", flush=True)


def test_a_single_process_needs_no_launcher(printed):
    assert "alone: all right" in printed


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "0"}, "missing in the environment: WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "4"}, "missing in the environment: RANK, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}, "missing in the environment: MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "four", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "WORLD_SIZE='four'"),
        ({"RANK": "x", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK='x'"),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "x"}, "MASTER_PORT='x'"),
        ({"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK=4"),
    ],
)
def test_half_a_launcher_is_an_error(environment, says, monkeypatch):
    """In this process, since nothing is started: the error comes first."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert not dist.is_initialized()
    with pytest.raises(SpecError) as caught:
        make_mesh("data=4", "cpu")
    assert says in str(caught.value)
    assert not dist.is_initialized()
