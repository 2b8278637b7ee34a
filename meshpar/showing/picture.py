"""`show`: pictures of a mesh, and of a tensor shared out over it, as SVG, text, or a PNG by matplotlib.

Invariant: a picture is a value; drawing it communicates nothing and needs no rank to be there.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshpar.errors import SpecError, explain
from meshpar.showing.cells import AxesOf, Cell, axes_of_tensor, cells_of, read_layout, sizes_of
from meshpar.spec import MeshSpec

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#e07b39")
"""Of the ranks, by their place along the axes that cut the grid; told apart by colour-blind people, too."""

MAX_PANELS = 12
"""How many of the parts that look alike (data, tensor) are drawn."""

_WIDTH = 300.0
_GAP = 28.0
_LETTER = 7.5  # of a title of 14 px, on the wide side


@dataclass(frozen=True)
class Box:
    """Hold one rank's rectangle, in rows and columns of the grid."""

    cell: Cell
    rows: tuple[int, int]
    cols: tuple[int, int]
    colour: str

    def told(self) -> str:
        """Say which rank has what."""
        return f"rank {self.cell.rank}: {_lines(self.rows, 'rows')}, {_lines(self.cols, 'columns')}"

    def grown(self, reach: tuple[int, int], grid: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Give its rows and columns with those that a layer needs around them."""
        (a, b), (c, d) = self.rows, self.cols
        rows = (max(a - reach[0], 0), min(b + reach[0], grid[0]))
        return rows, (max(c - reach[1], 0), min(d + reach[1], grid[1]))


def _lines(interval: tuple[int, int], what: str) -> str:
    return f"{what} {interval[0]} to {interval[1] - 1}" if interval[1] > interval[0] else f"no {what}"


@dataclass(frozen=True)
class Panel:
    """Hold one grid: the ranks that share out the same samples and channels."""

    title: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Picture:
    """Hold a picture; a notebook draws it, `print` writes it, `save` keeps it.

    Args:
        title: what it shows.
        panels: the grids, those left out counted in `num_left`.
        grid: rows and columns of a grid.
        reach: rows and columns around a rank's own that a layer needs.
        num_left: panels that are not drawn.
    """

    title: str
    panels: tuple[Panel, ...]
    grid: tuple[int, int]
    reach: tuple[int, int] = (0, 0)
    num_left: int = 0

    def __str__(self) -> str:
        """Write the picture as text: for each grid a line a rank."""
        lines = [self.title]
        for panel in self.panels:
            lines.append(panel.title)
            for box in panel.boxes:
                rows, cols = box.grown(self.reach, self.grid)
                needs = f"; needs {_lines(rows, 'rows')}, {_lines(cols, 'columns')}"
                lines.append(f"  {box.told()}{needs if any(self.reach) and not box.cell.is_empty else ''}")
        return "\n".join([*lines, *([f"and {self.num_left} more alike"] if self.num_left else [])])

    def svg(self) -> str:
        """Draw the picture as SVG."""
        rows, cols = self.grid
        height = max(min(_WIDTH * rows / max(cols, 1), 2 * _WIDTH), 60.0)
        across = min(len(self.panels), 4) or 1
        down = -(-len(self.panels) // across) or 1
        width = max(across * (_WIDTH + _GAP) + _GAP, 2 * _GAP + _LETTER * len(self.title))
        total = down * (height + 2 * _GAP) + (2 * _GAP if self.num_left else _GAP)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{total:.0f}" '
            f'viewBox="0 0 {width:.0f} {total:.0f}" font-family="sans-serif" font-size="12" fill="currentColor">',
            f'<text x="{_GAP:.0f}" y="20" font-size="14">{html.escape(self.title)}</text>',
        ]
        for i, panel in enumerate(self.panels):
            x, y = _GAP + i % across * (_WIDTH + _GAP), 2 * _GAP + i // across * (height + 2 * _GAP)
            parts += _panel_svg(panel, x, y, _WIDTH / max(cols, 1), height / max(rows, 1), self)
        if self.num_left:
            parts.append(f'<text x="{_GAP:.0f}" y="{total - 8:.0f}">and {self.num_left} more alike</text>')
        return "\n".join([*parts, "</svg>"])

    def _repr_svg_(self) -> str:
        return self.svg()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the picture to a file: .svg, .html, .txt, or .png (by matplotlib).

        Raises:
            SpecError: another ending, or a PNG without matplotlib.
        """
        file = Path(path)
        if file.suffix == ".svg":
            file.write_text(self.svg())
        elif file.suffix == ".html":
            page = f"<!doctype html><meta charset='utf-8'><title>{html.escape(self.title)}</title>{self.svg()}"
            file.write_text(page)
        elif file.suffix == ".txt":
            file.write_text(f"{self}\n")
        elif file.suffix == ".png":
            _draw_png(self, file)
        else:
            got, needs = f"{file.name!r}", ".svg, .html, .png or .txt"
            raise SpecError(explain("show: cannot save.", got=got, needs=needs, fix=f"{file.stem}.svg"))
        return file


def show(
    what: str | Mapping[str, int] | MeshSpec | DeviceMesh | DTensor,
    shape: Sequence[int] | None = None,
    *,
    layout: str | None = None,
    halo: int = 0,
) -> Picture:
    """Draw which rank holds what: of a mesh, of a tensor of some shape over it, or of a DTensor.

    Args:
        what: a mesh, also one that is not there, or a DTensor.
        shape: global shape (B, C, H, W), or any other; for a mesh alone None: its ranks.
        layout: as for `shard_batch`; the default layout where it is None.
        halo: rows (and columns, where they are cut) that a layer needs around a rank's own, drawn as a band:
            (kernel - 1) * dilation // 2.

    Returns:
        A `Picture`. Rows are dim -2 and columns dim -1 (one dim: rows); ranks that differ along other dims, or along
        axes that cut nothing, have a grid of their own.

    Communication:
        None.

    Raises:
        SpecError: a mesh, shape or layout that cannot be shown.

    Example:
        >>> print(show("data=1,domain=4", (1, 1, 5, 8), halo=1))
        (1, 1, 5, 8) on data=1 x domain=4 x tensor=1, halo of 1
        data 0, tensor 0
          rank 0: rows 0 to 1, columns 0 to 7; needs rows 0 to 2, columns 0 to 7
          rank 1: rows 2 to 3, columns 0 to 7; needs rows 1 to 4, columns 0 to 7
          rank 2: rows 4 to 4, columns 0 to 7; needs rows 3 to 4, columns 0 to 7
          rank 3: no rows, columns 0 to 7
    """
    if isinstance(halo, bool) or not isinstance(halo, int) or halo < 0:
        raise SpecError(explain("show: no halo.", got=f"halo={halo!r}", needs="rows, 0 or more", fix="halo=1"))
    if isinstance(what, DTensor):
        sizes, axes = axes_of_tensor(what)
        return tensor_picture(sizes, axes, tuple(what.shape), halo)
    if isinstance(what, DeviceMesh):
        names = what.mesh_dim_names or tuple(f"axis {i}" for i in range(what.ndim))
        sizes = dict(zip(names, what.shape, strict=True))
    else:
        sizes = sizes_of(MeshSpec.parse(what))
    if shape is None:
        return _mesh_picture(sizes)
    numbers = tuple(shape)
    if not numbers or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
        raise SpecError(explain("show: no shape.", got=repr(shape), needs="sizes of the dims", fix="(1, 3, 37, 49)"))
    return tensor_picture(sizes, read_layout(layout, sizes, len(numbers)), numbers, halo)


def _told(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items())


def tensor_picture(sizes: dict[str, int], axes: AxesOf, shape: tuple[int, ...], halo: int) -> Picture:
    """Draw a tensor over a mesh: `sizes` of its axes, and for each dim the axes that shard it, the outer one first."""
    grid = (shape[-2], shape[-1]) if len(shape) > 1 else (shape[0] if shape else 1, 1)
    plane = [axis for dim_axes in axes[-2:] for axis in dim_axes]
    grouped: dict[tuple[int, ...], list[Box]] = {}
    others = [axis for axis in sizes if axis not in plane]
    for cell in cells_of(sizes, axes, shape):
        part = cell.part or ((0, 1),)
        rows, cols = (part[-2], part[-1]) if len(part) > 1 else (part[0], (0, 1))
        place = 0
        for axis in plane:
            place = place * sizes[axis] + cell.place[axis]
        key = tuple(cell.place[axis] for axis in others)
        grouped.setdefault(key, []).append(Box(cell, rows, cols, COLOURS[place % len(COLOURS)]))
    panels = [
        Panel(", ".join(f"{axis} {i}" for axis, i in zip(others, key, strict=True)) or "all ranks", tuple(boxes))
        for key, boxes in grouped.items()
    ]
    told = f"{shape} on {_told(sizes)}" + (f", halo of {halo}" if halo else "")
    cut = [bool(names) for names in axes[-2:]] if len(axes) > 1 else [bool(axes and axes[0]), False]
    reach = (halo * cut[0], halo * cut[1])
    return Picture(told, tuple(panels[:MAX_PANELS]), grid, reach, max(len(panels) - MAX_PANELS, 0))


def _mesh_picture(sizes: dict[str, int]) -> Picture:
    """Draw the ranks of a mesh: domain axes down, tensor across, a panel for each data coordinate."""
    down = [axis for axis in sizes if axis.startswith("domain")]
    across = [axis for axis in sizes if axis == "tensor"]
    shape, axes = [], []
    for names in (down, across):
        n = 1
        for axis in names:
            n *= sizes[axis]
        shape.append(n)
        axes.append(tuple(names))
    found = tensor_picture(sizes, tuple(axes), tuple(shape), 0)
    return Picture(f"mesh {_told(sizes)}", found.panels, found.grid, (0, 0), found.num_left)


def _panel_svg(panel: Panel, x: float, y: float, sx: float, sy: float, picture: Picture) -> list[str]:
    parts = [f'<text x="{x:.1f}" y="{y - 6:.1f}">{html.escape(panel.title)}</text>']
    for box in panel.boxes:
        (a, b), (c, d) = box.rows, box.cols
        if a >= b or c >= d:
            continue
        left, top, w, h = x + c * sx, y + a * sy, (d - c) * sx, (b - a) * sy
        parts.append(
            f'<rect x="{left:.2f}" y="{top:.2f}" width="{w:.2f}" height="{h:.2f}" fill="{box.colour}" '
            f'fill-opacity="0.75" stroke="white"><title>{html.escape(box.told())}</title></rect>'
        )
        if any(picture.reach):
            (a, b), (c, d) = box.grown(picture.reach, picture.grid)
            parts.append(
                f'<rect x="{x + c * sx:.2f}" y="{y + a * sy:.2f}" width="{(d - c) * sx:.2f}" '
                f'height="{(b - a) * sy:.2f}" fill="{box.colour}" fill-opacity="0.2" stroke="{box.colour}" '
                'stroke-dasharray="3 2"/>'
            )
        if h >= 11:
            parts.append(
                f'<text x="{left + w / 2:.1f}" y="{top + h / 2 + 4:.1f}" text-anchor="middle" '
                f'fill="white" stroke="#333" stroke-width="2" paint-order="stroke">{box.cell.rank}</text>'
            )
    empty = [str(box.cell.rank) for box in panel.boxes if box.cell.is_empty]
    if empty:
        bottom = y + picture.grid[0] * sy + 14
        parts.append(f'<text x="{x:.1f}" y="{bottom:.1f}">without rows: rank {", ".join(empty)}</text>')
    return parts


def _draw_png(picture: Picture, file: Path) -> None:
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        fix = 'pip install "meshpar[examples]", or save an .svg'
        text = explain("show: no PNG.", got="matplotlib is not installed", needs="matplotlib", fix=fix)
        raise SpecError(text) from error
    rows, cols = picture.grid
    across = min(len(picture.panels), 4) or 1
    down = -(-len(picture.panels) // across) or 1
    figure: Any = Figure(figsize=(3.2 * across, 3.2 * down + 0.4))
    figure.suptitle(picture.title, fontsize=9)
    for i, panel in enumerate(picture.panels):
        axes = figure.add_subplot(down, across, i + 1)
        axes.set_title(panel.title, fontsize=8)
        axes.set_xlim(0, max(cols, 1))
        axes.set_ylim(max(rows, 1), 0)
        for box in panel.boxes:
            (a, b), (c, d) = box.rows, box.cols
            if a >= b or c >= d:
                continue
            axes.add_patch(Rectangle((c, a), d - c, b - a, facecolor=box.colour, alpha=0.75, edgecolor="white"))
            axes.text((c + d) / 2, (a + b) / 2, str(box.cell.rank), ha="center", va="center", color="white")
            if any(picture.reach):
                (a, b), (c, d) = box.grown(picture.reach, picture.grid)
                kind: dict[str, Any] = {
                    "facecolor": box.colour,
                    "alpha": 0.2,
                    "edgecolor": box.colour,
                    "linestyle": "--",
                }
                axes.add_patch(Rectangle((c, a), d - c, b - a, **kind))
    figure.savefig(file, dpi=110, bbox_inches="tight")
