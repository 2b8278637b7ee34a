"""Writing a Hugging Face checkpoint: `export_hf` against DCP and a gather: `python tests/benchmarks/export.py`.

A model of 1.5 GB in bfloat16 (12 blocks of a decoder of width 2,048) lies over 4 ranks: `fully_shard` over 4, over 2 of
a tensor axis of 2, and a tensor axis of 4. Every way writes it in turn, several times. Each line gives the median time
until it returned, and until all was on the disk: ours and the gather end with that, what DCP consolidates does not.
Then the most memory that a rank took beyond what it had before, and what all ranks read and wrote by system calls.
Messages of gloo count as written (the two-phase writer and the gather send the model).
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import meshpar
from meshpar import private
from meshpar.export import two_phase
from meshpar.export.plan import Entry, make_plan, size_in_bytes
from meshpar.export.runs import Layout, part_at
from meshpar.testing import mesh_for, run_ranks

Measured = tuple[float, float, int, int, int]

NUM_RANKS = 4
FASTER = 2.5
DIRECT_BYTES = 16 << 20
TWO_PHASE_BYTES = 4 * two_phase.BUFFER_BYTES
LAYOUTS = ("FSDP 4", "FSDP 2 x TP 2", "TP 4")
WAYS = ("direct", "two-phase", "DCP", "gather")


def shapes(num_blocks: int, width: int = 2048) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name the weights: their shapes, and how a tensor axis splits them."""
    inner, words = width * 11 // 4, 32_000
    found: dict[str, tuple[tuple[int, ...], str]] = {"model.embed_tokens.weight": ((words, width), "rows")}
    for i in range(num_blocks):
        at = f"model.layers.{i}"
        for name in "qkv":
            found[f"{at}.self_attn.{name}_proj.weight"] = ((width, width), "rows")
        found[f"{at}.self_attn.o_proj.weight"] = ((width, width), "columns")
        found[f"{at}.mlp.gate_proj.weight"] = found[f"{at}.mlp.up_proj.weight"] = ((inner, width), "rows")
        found[f"{at}.mlp.down_proj.weight"] = ((width, inner), "columns")
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}.{name}.weight"] = ((width,), "whole")
    return found | {"model.norm.weight": ((width,), "whole"), "lm_head.weight": ((words, width), "rows")}


def placements_for(layout: str, split: str) -> tuple[Placement, ...]:
    """Say how a weight lies on the mesh (data, tensor), as `fully_shard` after `parallelize_module` leaves it."""
    over = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}[split]
    if layout == "FSDP 4":
        return (Shard(0), Replicate())
    if layout == "TP 4":
        return (Replicate(), over)
    return (private.StridedShard(0, split_factor=2) if split == "rows" else Shard(0), over)


def mesh_of(layout: str) -> Any:
    """Give the mesh of a layout."""
    spec = {"FSDP 4": "data=4,tensor=1", "TP 4": "data=1,tensor=4"}.get(layout, "data=2,tensor=2")
    return mesh_for(spec)[("data", "tensor")]


def state_for(layout: str, num_blocks: int) -> dict[str, Tensor]:
    """Make this rank's pieces of the model."""
    mesh = mesh_of(layout)
    state: dict[str, Tensor] = {}
    for name, (shape, split) in shapes(num_blocks).items():
        placements = placements_for(layout, split)
        part = part_at(shape, Layout(tuple(mesh.shape), placements), mesh.get_coordinate())
        assert part is not None
        piece = torch.full(part.sizes, float(len(name)), dtype=torch.bfloat16)
        strides = (shape[1], 1) if len(shape) > 1 else (1,)
        state[name] = DTensor.from_local(piece, mesh, placements, run_check=False, shape=shape, stride=strides)
    return state


def by_dcp(state: dict[str, Tensor], folder: str, max_shard_size: str) -> None:
    """Write with DCP's writer for Hugging Face, and let it consolidate, into the same files as ours."""
    entries = [Entry(name, "BF16", tuple(x.shape)) for name, x in state.items()]
    plan = make_plan(entries, size_in_bytes(max_shard_size))
    files = {placed.entry.name: i for i, file in enumerate(plan.files, 1) for placed in file.tensors}
    writer = dcp.HuggingFaceStorageWriter(
        folder, files, save_distributed=True, enable_consolidation=True, thread_count_consolidation=len(plan.files)
    )
    dcp.save(state, storage_writer=writer)


def by_gather(state: dict[str, Tensor], folder: str, max_shard_size: str) -> None:
    """Gather the model on rank 0, which writes it."""
    from safetensors.torch import save_file

    wholes = {}
    for name, x in state.items():
        assert isinstance(x, DTensor)
        whole = x.full_tensor()
        if dist.get_rank() == 0:
            wholes[name] = whole
    if dist.get_rank() == 0:
        plan = make_plan([Entry(n, "BF16", tuple(x.shape)) for n, x in state.items()], size_in_bytes(max_shard_size))
        for file in plan.files:
            path = Path(folder, file.name)
            save_file({p.entry.name: wholes[p.entry.name] for p in file.tensors}, path, {"format": "pt"})
            with path.open("rb") as handle:
                os.fsync(handle.fileno())


def counted() -> tuple[int, int]:
    """Give the bytes that this process has read and written by system calls."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"]), int(lines["wchar"])


def resident(what: str) -> int:
    """Give a line of the status of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) << 10


def measure(way: str, layout: str, num_blocks: int, max_shard_size: str, base: str) -> Measured:
    """Write once; give the seconds, those until all is on the disk, extra memory, and the bytes read and written."""
    state = state_for(layout, num_blocks)
    folder = os.path.join(base, f"{way}-{layout}".replace(" ", ""))
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        os.sync()
    if way in ("direct", "two-phase"):  # what is made once in a process, and imports
        meshpar.export_hf({"x": torch.ones(1)}, folder, writer=way)
        act: Callable[[], Any] = lambda: meshpar.export_hf(  # noqa: E731
            state, folder, writer=way, max_shard_size=max_shard_size, overwrite=True
        )
    else:
        import safetensors.torch

        assert safetensors.torch
        function = {"DCP": by_dcp, "gather": by_gather}[way]
        act = lambda: function(state, folder, max_shard_size)  # noqa: E731
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, (read, written), begun = resident("VmRSS"), counted(), time.perf_counter()
    act()
    dist.barrier()
    seconds, (read_after, written_after) = time.perf_counter() - begun, counted()
    extra = resident("VmHWM") - before
    if dist.get_rank() == 0:
        for path in Path(folder).glob("*.safetensors"):
            with path.open("rb") as handle:
                os.fsync(handle.fileno())
    dist.barrier()
    on_disk = time.perf_counter() - begun
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return seconds, on_disk, extra, read_after - read, written_after - written


def expected_bytes(num_blocks: int, max_shard_size: str) -> int:
    """Count the bytes of the files: tensors, headers and the index."""
    entries = [Entry(name, "BF16", shape) for name, (shape, _) in shapes(num_blocks).items()]
    plan = make_plan(entries, size_in_bytes(max_shard_size))
    return sum(file.num_bytes for file in plan.files) + len(plan.index or b"")


def main(argv: list[str] | None = None) -> dict[tuple[str, str], Measured]:
    """Print the table and give it: for each layout and way the medians of seconds, the most memory and bytes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    parser.add_argument("--way", action="append", choices=WAYS)
    parser.add_argument("--blocks", type=int, default=12, help="103 MB each, beside 262 MB")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--max-shard-size", default="10GB")
    parser.add_argument("--folder", help="where to write, a folder for temporary files by default")
    args = parser.parse_args(argv)
    size = expected_bytes(args.blocks, args.max_shard_size)
    found: dict[tuple[str, str], Measured] = {}
    print(f"{size} bytes over {NUM_RANKS} ranks, {args.repeat} times in turn; files of {args.max_shard_size}")
    heads = f"{'returns s':>9} {'DCP / way':>9} {'on disk s':>9} {'DCP / way':>9} {'extra MiB':>11}"
    heads += f" {'read':>12} {'written':>12}"
    print(f"{'layout':<14} {'way':<10} {heads}")
    with tempfile.TemporaryDirectory(dir=args.folder) as base:
        for layout in args.layout or LAYOUTS:
            seen: dict[str, list[list[Measured]]] = {}
            for _ in range(args.repeat):
                for way in args.way or WAYS:
                    told = run_ranks(
                        measure, NUM_RANKS, way, layout, args.blocks, args.max_shard_size, base, timeout_s=600
                    )
                    seen.setdefault(way, []).append(told)
            for way, runs in seen.items():
                seconds, on_disk = (statistics.median(max(rank[i] for rank in run) for run in runs) for i in (0, 1))
                extra = max(rank[2] for run in runs for rank in run)
                read, written = (max(sum(rank[i] for rank in run) for run in runs) for i in (3, 4))
                found[layout, way] = seconds, on_disk, extra, read, written
            for way in seen:
                seconds, on_disk, extra, read, written = found[layout, way]
                dcp_seconds = found.get((layout, "DCP"), (float("nan"), float("nan")))
                times = (
                    f"{seconds:>9.2f} {dcp_seconds[0] / seconds:>9.2f} {on_disk:>9.2f} {dcp_seconds[1] / on_disk:>9.2f}"
                )
                print(f"{layout:<14} {way:<10} {times} {extra / 2**20:>11.1f} {read:>12} {written:>12}", flush=True)
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import export  # the ranks import it by this name

    export.main()
