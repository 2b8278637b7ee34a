"""Where the time of a step goes, on 2 ranks: `python tests/benchmarks/step_trace.py`.

torch's profiler lists the ops of one training step of two blocks (convolution, norm, activation). The table sums them
up by kind for each rank; the picture (`--picture trace.svg`) shows them one after the other, and `--chrome FOLDER`
writes what `chrome://tracing` and Perfetto read.
"""

from __future__ import annotations

import argparse
import html
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import meshpar
from meshpar.showing.picture import COLOURS
from meshpar.testing import mesh_for, run_ranks

KINDS = {
    "convolutions": ("aten::mkldnn_convolution", "aten::convolution_backward", "aten::thnn_conv2d"),
    "norms": ("aten::native_group_norm", "aten::native_batch_norm"),
    "activations": ("aten::silu",),
    "messages, and waiting in them": ("c10d::", "meshpar::"),
}
REST = "the rest: small ops, copies, Python"


@dataclass(frozen=True)
class Span:
    """Hold an op of the main thread: its kind, and begin and end in ms from the beginning of the step."""

    kind: str
    begin: float
    end: float


def kind_of(name: str) -> str:
    """Name the kind of an op; "" for one that is not told apart from the rest."""
    return next((kind for kind, starts in KINDS.items() if name.startswith(starts)), "")


def outermost(spans: Sequence[Span]) -> list[Span]:
    """Leave out what lies within another one of the list."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        if not found or span.begin >= found[-1].end:
            found.append(span)
    return found


def measure(rows: int, columns: int, folder: str) -> tuple[float, list[Span]]:
    """Give how many ms a step takes on this rank, and its ops that are told apart."""
    torch.manual_seed(0)
    layers = [(nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.SiLU()) for _ in range(2)]
    mesh = mesh_for("data=1,domain=2")
    model = meshpar.parallelize(nn.Sequential(*itertools.chain(*layers)), mesh)
    x = meshpar.shard(torch.randn(1, 32, rows, columns), mesh)

    def step() -> None:
        with meshpar.spmd():
            loss = model(x).square().mean()
        loss.backward()
        model.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as prof, torch.profiler.record_function("step"):
        step()
    if folder:
        prof.export_chrome_trace(str(Path(folder) / f"rank{dist.get_rank()}.json"))
    events = prof.profiler.kineto_results.events()  # type: ignore[union-attr]
    (whole,) = [e for e in events if e.name() == "step"]
    told = [
        Span(kind, (e.start_ns() - whole.start_ns()) / 1e6, (e.end_ns() - whole.start_ns()) / 1e6)
        for e in events
        if (kind := kind_of(e.name())) and e.start_thread_id() == whole.start_thread_id()
    ]
    return whole.duration_ns() / 1e6, outermost(told)


def sums(took: float, spans: Sequence[Span]) -> dict[str, float]:
    """Sum up the ms of each kind."""
    found = Counter({kind: 0.0 for kind in KINDS})
    for span in spans:
        found[span.kind] += span.end - span.begin
    return dict(found) | {REST: took - sum(found.values())}


def picture(ranks: Sequence[tuple[float, list[Span]]]) -> str:
    """Draw the ops of each rank, one after the other, as SVG."""
    left, wide, high, top = 60.0, 860.0, 30.0, 40.0
    scale = wide / max(took for took, _ in ranks)
    colours = dict(zip(KINDS, (COLOURS[0], COLOURS[2], COLOURS[3], COLOURS[1]), strict=True))
    parts = []
    for i, (kind, colour) in enumerate(colours.items()):
        parts += [f'<rect x="{left + i * 200:.0f}" y="8" width="12" height="12" fill="{colour}"/>']
        parts += [_text(left + i * 200 + 17, 18, kind)]
    for rank, (took, spans) in enumerate(ranks):
        y = top + rank * (high + 14)
        parts.append(_text(8, y + high / 2 + 4, f"rank {rank}"))
        box = f'y="{y:.0f}" height="{high:.0f}"'
        parts.append(f'<rect x="{left:.0f}" {box} width="{took * scale:.1f}" fill="none" stroke="#8888"/>')
        for span in spans:
            size = max((span.end - span.begin) * scale, 0.6)
            at = left + span.begin * scale
            parts.append(f'<rect x="{at:.1f}" {box} width="{size:.1f}" fill="{colours[span.kind]}"/>')
    bottom = top + len(ranks) * (high + 14)
    parts.append(_text(left, bottom + 10, f"one training step, {max(took for took, _ in ranks):.0f} ms"))
    size = f'viewBox="0 0 {left + wide + 20:.0f} {bottom + 20:.0f}" font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n' + "\n".join(parts) + "\n</svg>\n"


def _text(x: float, y: float, told: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="#777">{html.escape(told)}</text>'


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    """Print the table, and give ms by kind for each rank."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--chrome", default="", help="folder for the traces of the ranks")
    parser.add_argument("--grid", type=int, nargs=2, default=(256, 512))
    args = parser.parse_args(argv)
    ranks = run_ranks(measure, 2, *args.grid, args.chrome, timeout_s=300)
    found = [sums(*rank) for rank in ranks]
    print(f"{'ms of one step':<38} {'rank 0':>8} {'rank 1':>8}")
    for kind in found[0]:
        print(f"{kind:<38} " + " ".join(f"{rank[kind]:>8.1f}" for rank in found))
    if args.picture:
        args.picture.write_text(picture(ranks))
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import step_trace  # the ranks import it by this name

    step_trace.main()
