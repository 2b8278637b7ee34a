"""Reading a Hugging Face checkpoint: `load_hf` against `load_file` on every rank: `python tests/benchmarks/load_hf.py`.

The model of `export.py`, 1.5 GB in bfloat16, lies over 4 ranks: `fully_shard` over 4, over 2 of a tensor axis of 2, and
a tensor axis of 4. Each way fills the pieces of every rank, several times in turn, from files that the page cache has:

- `load_hf`, into a model with memory;
- `load_hf meta`, into one on the meta device, whose memory is made on the way;
- `load_file`, of `safetensors`: the whole on every rank (a map of the file), and then a copy of each rank's own rows.

Each line gives the median time, how many times as long `load_file` takes, the most memory that a rank took beyond its
pieces, and what all ranks read by system calls (what a map brings in is not among that).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

import export

import meshpar
from meshpar import private
from meshpar.export.runs import Layout, Part, part_at, part_of
from meshpar.testing import run_ranks

WAYS = ("load_hf", "load_hf meta", "load_file")


def model_of(layout: str, num_blocks: int, *, meta: bool) -> nn.Module:
    """Make the model with this rank's pieces: on the meta device, or full of zeros that are there."""
    model, mesh = nn.Module(), export.mesh_of(layout)
    for name, (shape, split) in export.shapes(num_blocks).items():
        owner = model
        *path, leaf = name.split(".")
        for child in path:
            if child not in dict(owner.named_children()):
                owner.add_module(child, nn.Module())
            owner = owner.get_submodule(child)
        placements = export.placements_for(layout, split)
        part = part_at(shape, Layout(tuple(mesh.shape), placements), mesh.get_coordinate())
        assert part is not None
        piece = torch.empty(part.sizes, dtype=torch.bfloat16, device="meta" if meta else "cpu")
        strides = (shape[1], 1) if len(shape) > 1 else (1,)
        x = DTensor.from_local(
            piece if meta else piece.zero_(), mesh, placements, run_check=False, shape=shape, stride=strides
        )
        owner.register_parameter(leaf, nn.Parameter(x))
    return model


def by_load_file(model: nn.Module, folder: str) -> None:
    """Let this rank open the whole, and copy its rows."""
    from safetensors.torch import load_file

    whole: dict[str, Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        whole.update(load_file(path))
    with torch.no_grad():
        for name, p in model.named_parameters():
            assert isinstance(p, DTensor)
            private.piece_of(p).copy_(cut(whole[name], part_of(p)))


def cut(whole: Tensor, part: Part) -> Tensor:
    """Give a view of a part of one interval along each dim."""
    for dim, ((a, b),) in enumerate(part.rows):
        whole = whole.narrow(dim, a, b - a)
    return whole


def write(layout: str, num_blocks: int, folder: str, max_shard_size: str) -> None:
    """Write the checkpoint."""
    meshpar.export_hf(export.state_for(layout, num_blocks), folder, max_shard_size=max_shard_size, overwrite=True)


def measure(way: str, layout: str, num_blocks: int, folder: str) -> tuple[float, int, int, int]:
    """Read once; give the seconds, the memory beyond the pieces, the bytes read, and those of the largest piece."""
    if way == "load_file":
        import safetensors.torch

        assert safetensors.torch
    else:  # what is made once in a process
        with tempfile.TemporaryDirectory() as small:
            (Path(small) / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
            meshpar.load_hf(nn.Module(), small)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what runs before have left
    model = model_of(layout, num_blocks, meta=way == "load_hf meta")
    pieces = [private.piece_of(p.data) for p in model.parameters()]
    num_bytes, largest = sum(p.nbytes for p in pieces), max(p.nbytes for p in pieces)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, read, begun = export.resident("VmRSS"), export.counted()[0], time.perf_counter()
    if way == "load_file":
        by_load_file(model, folder)
    else:
        meshpar.load_hf(model, folder)
    seconds, read = time.perf_counter() - begun, export.counted()[0] - read
    extra = export.resident("VmHWM") - before - (num_bytes if way == "load_hf meta" else 0)
    for name, p in model.named_parameters():
        assert bool((private.piece_of(p.data) == float(len(name))).all()), name
    dist.barrier()
    return seconds, extra, read, largest


def main(argv: list[str] | None = None) -> dict[tuple[str, str], tuple[float, int, int, int]]:
    """Print the table and give it: for each layout and way the seconds, extra memory, bytes read, largest piece."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layout", action="append", choices=export.LAYOUTS)
    parser.add_argument("--way", action="append", choices=WAYS)
    parser.add_argument("--blocks", type=int, default=12, help="103 MB each, beside 262 MB")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--max-shard-size", default="500MB")
    args = parser.parse_args(argv)
    found: dict[tuple[str, str], tuple[float, int, int, int]] = {}
    size = export.expected_bytes(args.blocks, args.max_shard_size)
    print(f"{size} bytes onto {export.NUM_RANKS} ranks, {args.repeat} times in turn; files of {args.max_shard_size}")
    print(f"{'layout':<14} {'way':<13} {'median s':>9} {'load_file / way':>16} {'extra MiB a rank':>17} {'read':>12}")
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(write, export.NUM_RANKS, "FSDP 4", args.blocks, folder, args.max_shard_size, timeout_s=600)
        for layout in args.layout or export.LAYOUTS:
            seen: dict[str, list[list[tuple[float, int, int, int]]]] = {}
            for _ in range(args.repeat):
                for way in args.way or WAYS:
                    told = run_ranks(measure, export.NUM_RANKS, way, layout, args.blocks, folder, timeout_s=600)
                    seen.setdefault(way, []).append(told)
            for way, runs in seen.items():
                seconds = statistics.median(max(rank[0] for rank in run) for run in runs)
                extra = max(rank[1] for run in runs for rank in run)
                read = max(sum(rank[2] for rank in run) for run in runs)
                found[layout, way] = seconds, extra, read, max(rank[3] for run in runs for rank in run)
            for way in seen:
                seconds, extra, read, _ = found[layout, way]
                rival = found.get((layout, "load_file"), (float("nan"),))[0]
                line = f"{layout:<14} {way:<13} {seconds:>9.3f} {rival / seconds:>16.2f} {extra / 2**20:>17.1f}"
                print(f"{line} {read:>12}", flush=True)
            print(f"{layout:<14} largest piece: {found[layout, way][3] / 2**20:.1f} MiB")
    return found


if __name__ == "__main__":
    import load_hf  # the ranks import it by this name

    load_hf.main()
