"""Reading only one's own rows of zarr, NetCDF, HDF5, memory maps: the numbers of the whole, and no others."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import meshpar
from meshpar.testing import mesh_for, run_ranks
from meshpar.testing.meshes import ranks_of

SHAPE = (6, 3, 11, 8)


def values() -> np.ndarray:
    return np.arange(float(np.prod(SHAPE))).reshape(SHAPE)


class Counting:
    """An array that keeps in mind which of its elements were asked for, and refuses all but slices and integers."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape = array, array.shape
        self.touched = np.zeros(array.shape, dtype=int)

    def __getitem__(self, key):
        assert all(isinstance(k, slice | int) for k in key)
        self.touched[key] += 1
        return self.array[key]


INDICES = {
    "one": 2,
    "all": (),
    "slice": slice(1, 5),
    "step": slice(0, 6, 2),
    "backwards": slice(None, None, -1),
    "list": [4, 0, 1, 5],
    "negative": [-1, -6],
    "twice": [3, 3],
    "none": [],
    "empty": slice(3, 3),
    "two": (1, [0, 2]),
    "lists": ([0, 5], [2, 0]),
    "array": np.array([1, 2]),
}


def expected_of(array: np.ndarray, index) -> np.ndarray:
    """The slow and obvious way: one dim after the other."""
    at = 0
    for i in index if isinstance(index, tuple) else (index,):
        array = array[(slice(None),) * at + (i,)] if isinstance(i, int | slice) else np.take(array, i, axis=at)
        at += not isinstance(i, int)
    return array


def reads(spec: str, name: str):
    """Give this rank's slices, what it read, and how often it asked for each element."""
    mesh, index = mesh_for(spec), INDICES[name]
    source = Counting(values())
    full = expected_of(values(), index)
    found = meshpar.read_rows(source, mesh, index)
    own = meshpar.shard_slices(full.shape, mesh)
    assert found.dtype == torch.float64
    assert torch.equal(found, torch.from_numpy(full[own].copy()))
    layout = ["data", "_", "domain", "_"][4 - full.ndim :]
    if "domain_w" in spec:
        layout[-1] = "domain_w"
    with meshpar.record() as log:
        whole = meshpar.read_sharded(Counting(values()), mesh, index, layout=" ".join(layout))
    assert log.num_bytes() == 0
    assert torch.equal(meshpar.gather(whole), torch.from_numpy(full.copy()))
    return source.touched


@pytest.mark.parametrize(
    "spec", ["data=1,domain=4", "data=2,domain=2", "data=1,domain=2,domain_w=2", "data=1,domain=3"]
)
@pytest.mark.parametrize("name", INDICES)
def test_only_own_rows_are_read_and_once(spec, name):
    touched = run_ranks(reads, ranks_of(spec), spec, name)
    asked = np.zeros(SHAPE, dtype=int)
    places = expected_of(np.arange(np.prod(SHAPE)).reshape(SHAPE), INDICES[name])
    np.add.at(asked.reshape(-1), places.reshape(-1), 1)
    data = 2 if "data=2" in spec else 1
    assert np.array_equal(sum(touched), asked * data)  # every element by one rank of each data coordinate alone


def cut_in_all_ways(spec: str) -> None:
    """`shard_slices` is what `shard` cuts, for any layout and size."""
    mesh = mesh_for(spec)
    for shape in ((5, 7, 3), (1, 1, 1), (4, 2, 8), (0, 3, 9)):
        for layout in ("_ domain _", "data domain _", "domain data tensor", "_ _ _", "tensor _ domain"):
            x = torch.arange(float(np.prod(shape))).view(shape)
            piece = meshpar.shard(x, mesh, layout).to_local()
            assert torch.equal(x[meshpar.shard_slices(shape, mesh, layout)], piece)
            assert torch.equal(meshpar.read_rows(x.numpy(), mesh, layout=layout), piece)


@pytest.mark.parametrize("spec", ["data=2,domain=2", "data=1,domain=2,tensor=2", "data=4"])
def test_slices_are_those_of_shard(spec):
    run_ranks(cut_in_all_ways, 4, spec)


def into_shard_batch(spec: str) -> None:
    """Samples read row by row go into `shard_batch` without a byte of data sent."""
    mesh = mesh_for(spec)
    sampler = meshpar.DataSampler(6, mesh, batch_size=4, empty_parts="yield")
    source = Counting(values())
    for own, batch in zip(sampler, sampler.global_batches(), strict=True):
        pieces = meshpar.read_rows(source, mesh, own)
        with meshpar.record() as log:
            x = meshpar.shard_batch(pieces, mesh, rows="local")
        assert {entry.kind for entry in log.entries} <= {"batch"}
        assert log.num_bytes() == 256 * (dist.get_world_size() - 1)
        assert torch.equal(meshpar.gather(x), torch.from_numpy(values()[batch]))
        again = meshpar.read_sharded(Counting(values()), mesh, batch, layout="data _ domain _")
        assert torch.equal(again.to_local(), x.to_local())


@pytest.mark.parametrize("spec", ["data=2,domain=2", "data=1,domain=4", "data=4,domain=1", "data=1,domain=3"])
def test_pieces_make_a_batch(spec):
    run_ranks(into_shard_batch, ranks_of(spec), spec)


def without_a_layout() -> None:
    mesh = mesh_for("domain=2,data=1")
    with pytest.raises(meshpar.SpecError, match="which dim of this tensor has the local rows"):
        meshpar.shard_batch(torch.zeros(2, 3, 4), mesh, rows="local")
    assert meshpar.shard_batch(torch.zeros(2, 3, 4), mesh, "data domain _", rows="local").shape == (2, 6, 4)
    assert meshpar.shard_batch(torch.zeros(2, 3, 4), mesh, "data _ _", rows="local").shape == (2, 3, 4)


def test_local_rows_of_three_dims_need_a_layout():
    run_ranks(without_a_layout, 2)


# ---- files


def write_files(folder: Path) -> None:
    import h5py
    import xarray
    import zarr

    x = values()
    zarr.create_array(folder / "x.zarr", data=x, chunks=(1, 1, 3, 8))
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("x", data=x.astype(">f4"), chunks=(1, 3, 4, 8), compression="gzip")
    memory = np.memmap(folder / "x.bin", dtype=">i4", mode="w+", shape=SHAPE)
    memory[:] = x
    memory.flush()
    masked = np.where(x % 7 == 0, np.nan, x)
    times = np.datetime64("2099-01-01", "ns") + np.arange(6) * np.timedelta64(6, "h")
    dims = ("time", "channel", "latitude", "longitude")
    dataset = xarray.Dataset(
        {
            "x": (dims, masked),
            "level": ((), 850.0),
            "count": (dims, x.astype(np.int16)),
        },
        coords={"time": times, "latitude": np.linspace(-90, 90, 11)},
    )
    packed = {"dtype": "int16", "scale_factor": 0.5, "add_offset": 100.0, "_FillValue": -9999}
    dataset.to_netcdf(folder / "x.nc", engine="h5netcdf", encoding={"x": packed})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("arrays")
    write_files(path)
    return path


def from_files(spec: str, folder: Path) -> None:
    import h5py
    import xarray
    import zarr

    mesh = mesh_for(spec)
    x = values()
    masked = np.where(x % 7 == 0, np.nan, x)
    with h5py.File(folder / "x.h5") as file, xarray.open_dataset(folder / "x.nc", engine="h5netcdf") as dataset:
        sources = {
            "zarr": (zarr.open_array(folder / "x.zarr", mode="r"), x, torch.float64),
            "hdf5": (file["x"], x, torch.float32),
            "memory map": (np.memmap(folder / "x.bin", dtype=">i4", mode="r", shape=SHAPE), x, torch.int32),
            "netcdf": (dataset["x"], masked, torch.float64),
            "netcdf variable": (dataset["x"].variable, masked, torch.float64),
            "count": (dataset["count"], x, torch.int16),
        }
        for (name, (source, full, dtype)), (key, index) in itertools.product(sources.items(), INDICES.items()):
            found = meshpar.read_rows(source, mesh, index)
            whole = expected_of(full, index)
            expected = torch.from_numpy(whole[meshpar.shard_slices(whole.shape, mesh)].copy())
            assert found.dtype == dtype, (name, key)
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=0, equal_nan=True)
            half = meshpar.read_rows(source, mesh, index, dtype=torch.float32)
            assert half.dtype == torch.float32
            found.add_(1)  # memory of its own, that can be written
        assert not dataset["x"].variable._in_memory  # read lazily: nothing is kept
        assert meshpar.read_rows(dataset["level"], mesh).item() == 850
        latitude = meshpar.read_rows(dataset["latitude"], mesh, layout="domain")
        own = meshpar.shard_slices((11,), mesh, "domain")[0]
        assert latitude.tolist() == dataset["latitude"].values[own].tolist()
        with pytest.raises(meshpar.SpecError, match="times, datetime64"):
            meshpar.read_rows(dataset["time"], mesh)
        steps = meshpar.read_rows(dataset["time"], mesh, dtype=torch.int64).diff()
        assert steps.tolist() == [6 * 3600 * 10**9] * 5


@pytest.mark.parametrize("spec", ["data=1,domain=4", "data=2,domain=2", "data=1"])
def test_files_of_every_kind_give_the_numbers_of_the_whole(spec, folder):
    run_ranks(from_files, ranks_of(spec), spec, folder)


def chunks_read(spec: str, folder: Path) -> list[str]:
    """List the chunk files that zarr opens for this rank."""
    import zarr
    from zarr.storage import LocalStore, WrapperStore

    opened: list[str] = []

    class Watched(WrapperStore):
        async def get(self, key, prototype, byte_range=None):
            opened.append(key)
            return await super().get(key, prototype, byte_range)

    source = zarr.open_array(Watched(LocalStore(folder / "x.zarr", read_only=True)), mode="r")
    opened.clear()
    meshpar.read_rows(source, mesh_for(spec), [2, 4])
    return opened


def test_of_zarr_only_the_chunks_of_own_rows_are_opened(folder):
    """11 rows over 4 ranks are 3, 3, 3, 2: as the chunks lie."""
    for rank, opened in enumerate(run_ranks(chunks_read, 4, "data=1,domain=4", folder)):
        assert sorted(opened) == [f"c/{t}/{c}/{rank}/0" for t in (2, 4) for c in range(3)]


def refused() -> list[str]:
    mesh = mesh_for("domain=2,data=1")
    x = np.zeros((4, 5, 6))
    masked = np.ma.masked_equal(np.arange(20).reshape(4, 5), 3)
    calls = [
        lambda: meshpar.read_rows(x, mesh, 4),
        lambda: meshpar.read_rows(x, mesh, [0, -5]),
        lambda: meshpar.read_rows(x, mesh, (0, 0, 0, 0)),
        lambda: meshpar.read_rows(x, mesh, 1.0),
        lambda: meshpar.read_rows(x, mesh, True),
        lambda: meshpar.read_rows(x, mesh, [True, False, True, True]),
        lambda: meshpar.read_rows(x, mesh, np.array([True, False, True, True])),
        lambda: meshpar.read_rows({"a": x}, mesh),
        lambda: meshpar.read_rows(torch.zeros(3, 3), mesh),
        lambda: meshpar.read_rows(x, mesh, layout="domain _"),
        lambda: meshpar.read_rows(x, None),
        lambda: meshpar.read_sharded(x, None),
        lambda: meshpar.shard_slices((3, 3), "mesh"),
        lambda: meshpar.read_rows(np.array(["a", "b"]), mesh),
        lambda: meshpar.read_rows(np.array([None, 1]), mesh),
        lambda: meshpar.read_rows(np.zeros(3, dtype=np.longdouble), mesh),
        lambda: meshpar.read_rows(np.zeros(3, dtype=[("a", "f4")]), mesh),
        lambda: meshpar.read_rows(masked, mesh, [0, 0]),  # a row each
    ]
    told = []
    for call in calls:
        with pytest.raises(meshpar.SpecError) as caught:
            call()
        told.append(str(caught.value))
    floats = meshpar.read_rows(masked.astype(float), mesh, [0, 2])
    assert floats.isnan().sum() == (1 if dist.get_rank() == 0 else 0)
    return told


def test_what_cannot_be_read_is_told():
    for told in run_ranks(refused, 2):
        assert all(word in text for text in told for word in ("got:", "needs:", "fix:"))
        assert "index 4 of a dim of 4; the source has shape (4, 5, 6)" in told[0]
        assert "masked values of dtype int64" in told[-1]
