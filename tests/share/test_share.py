"""The first rank is given what all ranks hold, whatever its dtype and shape, or all ranks get the same error."""

import collections
import contextlib
import datetime
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import meshpar
from meshpar.share import channel, gathers, packing, segments
from meshpar.testing import mesh_for, run_ranks

ALL = [0, 1]


def report(function, *args):
    """Give the kind and text of the error, so that ranks can be compared."""
    try:
        return "", str(function(*args))
    except Exception as error:
        return type(error).__name__, str(error)


def numbers(rank, dtype, shape):
    count = 1
    for size in shape:
        count *= size
    raw = torch.arange(count * dtype.itemsize, dtype=torch.int64).add(7 * rank)
    return (raw % 2 if dtype is torch.bool else raw % 60).to(torch.uint8).view(dtype).view(shape)


DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int8, torch.uint8, torch.uint16, torch.bool, torch.complex64, torch.complex128),
)
SHAPES = ((), (3,), (0,), (2, 0, 3), (5, 3, 7))


def same(a, b):
    bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*bits)


def pass_all_kinds():
    rank, wrong = dist.get_rank(), []
    for dtype in DTYPES:
        mine = [numbers(rank, dtype, shape) for shape in SHAPES]
        with meshpar.get_configs_parallel(mine, [1, 0]) as got:
            assert len(got) == (2 if rank == 1 else 0)
            wrong += [
                (dtype, shape, source)
                for source, config in zip([1, 0], got, strict=False)
                for shape, x in zip(SHAPES, config, strict=True)
                if not same(x, numbers(source, dtype, shape))
            ]
    return wrong


def test_every_dtype_and_shape():
    assert run_ranks(pass_all_kinds, 2) == [[], []]


def pass_in_order(ranks):
    rank = dist.get_rank()
    mine = torch.full((rank + 1, 2), rank, dtype=torch.bfloat16)
    with meshpar.get_tensors_parallel(mine, ranks) as got:
        seen = [(tuple(x.shape), x.float().unique().tolist()) for x in got]
        own = [x is mine for x in got]
    assert got == []  # all of it is gone after the block
    return seen, own


def test_order_of_ranks_and_one_that_is_not_among_them():
    answers = run_ranks(pass_in_order, 4, [2, 0, 3])
    assert answers[2] == ([((3, 2), [2]), ((1, 2), [0]), ((4, 2), [3])], [True, False, False])
    assert [answers[rank] for rank in (0, 1, 3)] == [([], [])] * 3


def pass_views():
    rank = dist.get_rank()
    big = torch.arange(10_000, dtype=torch.float64) + rank
    kinds = {
        "view": big[3:5],
        "columns": big.view(100, 100)[:, ::7],
        "conj": torch.complex(big[:4], big[4:8]).conj(),
        "leaf": torch.nn.Parameter(big[:3].clone()),
    }
    kept = {}
    for name, mine in kinds.items():
        with meshpar.get_tensors_parallel(mine, ALL) as got:
            if rank == 0:
                got[1].add_(1)  # the reader's own
                kept[name] = got[1]
    if rank == 1:
        return {name: x.detach().resolve_conj().clone() for name, x in kinds.items()}
    assert all(x.untyped_storage().nbytes() == x.numel() * x.element_size() for x in kept.values())
    assert not any(x.requires_grad for x in kept.values())
    return {name: x - 1 for name, x in kept.items()}


def test_views_arrive_whole_and_stay_with_who_keeps_them():
    read, written = run_ranks(pass_views, 2)
    for name, x in written.items():
        torch.testing.assert_close(read[name], x, rtol=0, atol=0)


def pass_inference():
    with torch.inference_mode(), meshpar.get_tensors_parallel(torch.ones(2) * 3, ALL) as got:
        return [x.tolist() for x in got]


def test_under_inference_mode():
    assert run_ranks(pass_inference, 2)[0] == [[3, 3], [3, 3]]


SCALARS = {
    "none": None,
    "yes": True,
    "n": 3,
    "x": 0.5,
    "z": 1 + 2j,
    "s": "é",
    "b": b"\0\xff",
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "size": torch.Size([2, 3]),
    "many": [(1, {"deep": [2, (3,)]}), {}, [], ()],
    4: {(1, "a"): 2},
    "ordered": collections.OrderedDict(a=1, b=2),
}


def pass_configs(folder, nones):
    rank = dist.get_rank()
    shared = torch.full((3,), float(rank))
    mine = None if rank in nones else {**SCALARS, "rank": rank, "w": [shared, {"again": shared}]}
    with meshpar.get_configs_parallel(mine, [1, 0, 2], dist.group.WORLD, folder) as got:
        seen = []
        for config in got:
            if config is None:
                seen.append(None)
                continue
            assert {name: config[name] for name in SCALARS} == SCALARS
            assert [type(config[name]) for name in SCALARS] == [type(x) for x in SCALARS.values()]
            assert config["w"][0].tolist() == [config["rank"]] * 3
            assert config["w"][1]["again"].data_ptr() == config["w"][0].data_ptr()
            seen.append(config["rank"])
    return seen


@pytest.mark.parametrize("way", ["memory", "folder"])
def test_configs_of_all_ranks_without_those_that_are_none(way, tmp_path):
    folder = str(tmp_path / "a" / "b") if way == "folder" else None
    assert run_ranks(pass_configs, 3, folder, ()) == [[], [1, 0, 2], []]
    assert run_ranks(pass_configs, 3, folder, (0,)) == [[], [1, 2], []]
    assert run_ranks(pass_configs, 3, folder, (1, 2)) == [[], [None, 0], []]  # its own comes first, None or not
    if folder:
        assert list(Path(folder).iterdir()) == []


def pass_wrong(kind):
    rank, mesh = dist.get_rank(), mesh_for("domain=2")
    ranks, tensor, config = ALL, torch.ones(2), None
    match kind:
        case "out of range":
            ranks = [0, 2]
        case "twice":
            ranks = [0, 1, 1]
        case "no rank":
            ranks = []
        case "order":
            ranks = [1, 0] if rank else [0, 1]
            return report(lambda: list_of(meshpar.get_tensors_parallel(tensor, ranks, timeout_s=2)))
        case "DTensor" if rank:
            tensor = meshpar.shard(torch.zeros(2, 4), mesh, "_ domain")
        case "sparse" if rank:
            tensor = torch.eye(2).to_sparse()
        case "None" if rank:
            tensor = None
        case "class":
            config = {"a": [1, {2: Path("x") if rank else 3}]}
        case "folder" if rank:
            return report(lambda: list_of(meshpar.get_configs_parallel({}, ranks, None, "/tmp")))
    if kind in ("class", "folder"):
        return report(lambda: list_of(meshpar.get_configs_parallel(config, ranks)))
    return report(lambda: list_of(meshpar.get_tensors_parallel(tensor, ranks)))


def list_of(context):
    with context as got:
        return list(got)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("out of range", "2: not a rank of this job of 2"),
        ("twice", "1: twice"),
        ("no rank", "ranks=[]"),
        ("DTensor", "got:    a DTensor"),
        ("sparse", "torch.sparse_coo tensor"),
        ("None", "got:    a NoneType"),
        ("class", "config['a'][1][2]: a PosixPath"),
        ("folder", "workspace_path='/tmp' on rank 1, None on rank 0"),
    ],
)
def test_what_cannot_be_passed_is_the_same_error_on_all(kind, text):
    first, second = run_ranks(pass_wrong, 2, kind)
    assert first == second
    assert first[0] == "SpecError"
    assert text in first[1]


def fail_then_go_on(kind, folder=None):
    """One rank fails as the kind has it; the next call is none the worse for it."""
    rank, started = dist.get_rank(), time.monotonic()
    number = {"reader": 0, "writer": 1}.get(kind, -1)

    def act():
        with meshpar.get_configs_parallel({"w": torch.ones(4)}, [0, 1, 2], None, folder):
            if rank == number:
                raise KeyError(f"of rank {rank}")
            if kind == "slow reader" and rank == 0:
                time.sleep(1)
                raise KeyError("late")

    seen = report(act)
    seconds = time.monotonic() - started
    return seen, seconds, pass_in_order([0, 1, 2])[0]


@pytest.mark.parametrize(("kind", "number"), [("reader", 0), ("writer", 1), ("slow reader", 0)])
@pytest.mark.parametrize("way", ["memory", "folder"])
def test_a_rank_that_raises_in_the_block_is_an_error_on_all(kind, number, way, tmp_path):
    answers = run_ranks(fail_then_go_on, 3, kind, str(tmp_path) if way == "folder" else None)
    for rank, ((name, text), seconds, after) in enumerate(answers):
        assert name == ("KeyError" if rank == number else "ShareError")
        assert "KeyError" in text or rank == number
        assert f"rank {number}" in text or rank == number
        assert seconds < 20
        assert len(after) == (3 if rank == 0 else 0)
    assert list(tmp_path.iterdir()) == []


def pass_patched(kind, folder=None):
    rank = dist.get_rank()
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        written = []
        match kind:
            case "small host":
                patch.setattr(gathers, "rooms", lambda: {"memory of the host": 1000})
                patch.setattr(gathers, "write_segment", written.append)
            case "other host" if rank == 1:
                here = segments.whereabouts()
                patch.setattr(gathers, "whereabouts", lambda: here | {"host": "node7", "boot": "another"})
            case "other container" if rank == 1:
                here = segments.whereabouts()
                patch.setattr(gathers, "whereabouts", lambda: here | {"pids": "pid:[7]"})
            case "no space" if rank == 1:
                patch.setattr(os, "posix_fallocate", refuse_space)
            case "no proc" if rank == 1:
                patch.setattr(os, "readlink", lambda path: "1" if path == "/proc/self" else "pid:[1]")
                patch.setattr(gathers, "whereabouts", segments.whereabouts)
            case "full folder" if rank == 1:
                patch.setattr(shutil, "disk_usage", lambda path: collections.namedtuple("U", "free")(10))
        seen = report(lambda: list_of(meshpar.get_configs_parallel({"w": torch.ones(1000)}, ALL, None, folder)))
        assert written == []
    open_files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not any("memfd:meshpar" in name for name in open_files)
    return seen


def refuse_space(*_):
    raise OSError(28, "No space left on device")


def alike(kind, folder=None):
    first, second = run_ranks(pass_patched, 2, kind, folder)
    assert first == second
    assert first[0] == "ShareError"
    return first[1]


def test_too_little_memory_is_said_in_bytes_before_anything_is_written():
    text = alike("small host")
    size_bytes = packing.pack({"w": torch.ones(1000)}, "config").size_bytes
    assert f"memory of the host: 1000 bytes are free, {size_bytes} bytes are to be written" in text
    text = alike("no space")
    assert "No space left on device" in text
    assert f"needs:  {size_bytes} bytes" in text
    assert "bytes of memory of the host are free" in text


def test_a_full_folder_is_said_in_bytes(tmp_path):
    text = alike("full folder", str(tmp_path))
    assert "10 bytes are free" in text
    assert "4000 bytes" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["other host", "other container"])
def test_ranks_that_shared_memory_does_not_reach_are_told_of_the_folder(kind):
    text = alike(kind)
    assert "workspace_path=a folder that all of them share" in text
    assert "rank 1: host" in text


def test_a_descriptor_that_is_another_file_is_refused():
    handle, told = segments.write_segment(packing.pack([torch.ones(3)], "config"))
    try:
        with pytest.raises(meshpar.ShareError, match="a file of another process"):
            segments.read_segment(told | {"inode": 1}, 0)
        with pytest.raises(meshpar.ShareError, match="No such file"):
            segments.read_segment(told | {"pid": 2**22 + 1}, 0)
        with pytest.raises(OSError, match="Operation not permitted"):
            os.ftruncate(handle, 1)  # no SIGBUS for who reads it
    finally:
        os.close(handle)


def come_late(rank_late):
    if dist.get_rank() == rank_late:
        return "", ""
    return report(lambda: list_of(meshpar.get_tensors_parallel(torch.ones(1), [0, 1, 2], timeout_s=1.5)))


def test_a_rank_that_does_not_come_is_an_error_in_time():
    run_ranks(pass_in_order, 3, [0, 1, 2])
    started = time.monotonic()
    answers = run_ranks(come_late, 3, 2)
    assert time.monotonic() - started < 20
    assert answers[0][0] == answers[1][0] == "PeerError"
    assert "lost rank 2" in answers[0][1]
    channel._LINES.clear()


def two_groups():
    """Ranks 0, 1 and ranks 2, 3 at once; in each group the ranks of its own are 0 and 1."""
    rank = dist.get_rank()
    mine = [0, 1] if rank < 2 else [2, 3]
    groups = [dist.new_group(ranks, timeout=datetime.timedelta(seconds=20)) for ranks in ([0, 1], [2, 3])]
    group = groups[rank // 2]
    seen = []
    for i in range(10):
        with meshpar.get_tensors_parallel(torch.full((1000,), 100.0 * i + rank), mine, group) as got:
            seen.append([x.unique().tolist() for x in got])
    outside = report(lambda: list_of(meshpar.get_tensors_parallel(torch.ones(1), [0, 3], group)))
    return seen, outside


def test_two_groups_at_once():
    answers = run_ranks(two_groups, 4)
    for rank in (0, 2):
        assert answers[rank][0] == [[[100.0 * i + rank], [100.0 * i + rank + 1]] for i in range(10)]
    assert all(kind == "SpecError" and "not in the group" in text for _, (kind, text) in answers)


def nested():
    rank = dist.get_rank()
    a, b = torch.ones(2) * rank, torch.ones(3) * (rank + 10)
    with meshpar.get_tensors_parallel(a, ALL) as x, meshpar.get_tensors_parallel(b, ALL) as y:
        return [t.tolist() for t in (*x, *y)]


def test_one_block_in_another():
    assert run_ranks(nested, 2)[0] == [[0, 0], [1, 1], [10, 10, 10], [11, 11, 11]]


def test_a_small_dev_shm_does_not_matter():
    """FIELD 54, for real: 64 KiB at /dev/shm, in a mount namespace of its own."""
    code = "import test_share as t; print(t.run_ranks(t.pass_big, 2))"
    script = f'mount -t tmpfs -o size=64k none /dev/shm && exec "{sys.executable}" -c "{code}"'
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[(2, 65536), (0, 65536)]"


def pass_big():
    usage = os.statvfs("/dev/shm")
    with meshpar.get_tensors_parallel(torch.ones(1 << 20), ALL) as got:
        assert all(bool((x == 1).all()) for x in got)
        return len(got), usage.f_blocks * usage.f_frsize
