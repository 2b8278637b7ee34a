"""Pictures of placements: every rank's part is what `shard` gives it, and every form tells the same."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

import meshpar
from meshpar.errors import SpecError
from meshpar.showing.cells import cells_of
from meshpar.testing import mesh_for, run_ranks


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.data(),
)
def test_the_parts_are_disjoint_and_make_up_the_whole(ranks, shape, data):
    sizes = {f"axis{i}": n for i, n in enumerate(ranks)}
    axes: list[tuple[str, ...]] = [() for _ in shape]
    for name in sizes:
        dim = data.draw(st.integers(-1, len(shape) - 1))
        if dim >= 0:
            axes[dim] = (*axes[dim], name)
    cutting = {name for names in axes for name in names}
    seen: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for cell in cells_of(sizes, tuple(axes), shape):
        key = tuple(cell.place[name] for name in sizes if name not in cutting)
        held = torch.zeros(shape, dtype=torch.bool)
        held[tuple(slice(a, b) for a, b in cell.part)] = True
        points = {tuple(p) for p in held.nonzero().tolist()}
        assert not seen.setdefault(key, set()) & points
        seen[key] |= points
    assert all(len(points) == torch.zeros(shape).numel() for points in seen.values())


def pieces_and_picture() -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], str]:
    mesh = mesh_for("data=1,domain=2,domain_w=2")
    x = meshpar.shard(torch.arange(35.0).view(1, 1, 7, 5), mesh)
    picture = meshpar.show(x)
    rank = torch.distributed.get_rank()
    (box,) = [b for panel in picture.panels for b in panel.boxes if b.cell.rank == rank]
    local = x.to_local()
    part = torch.arange(35.0).view(7, 5)[slice(*box.rows), slice(*box.cols)]
    assert torch.equal(local[0, 0], part)
    nested = meshpar.shard(torch.zeros(1, 1, 7, 5), mesh).redistribute(placements=[Replicate()] * 4)
    assert len(meshpar.show(nested).panels) == 4
    return box.rows, box.cols, tuple(local.shape[2:]), meshpar.show(mesh).title


def test_a_tensor_is_shown_as_it_lies():
    answers = run_ranks(pieces_and_picture, 4)
    assert [(r[1] - r[0], c[1] - c[0]) for r, c, _, _ in answers] == [s for _, _, s, _ in answers]
    assert answers[0][3] == "mesh data=1 x domain=2 x domain_w=2 x tensor=1"


def test_svg_text_and_halo_tell_the_same():
    picture = meshpar.show("data=2,domain=4", (2, 3, 37, 49), halo=2)
    root = ET.fromstring(picture.svg())
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    rects = list(root.iter("{http://www.w3.org/2000/svg}rect"))
    assert [t for t in texts if t and re.fullmatch(r"\d+", t)] == [str(i) for i in range(8)]
    assert len(rects) == 8 + 8  # what a rank has, and what it needs
    assert "rank 5: rows 10 to 19, columns 0 to 48; needs rows 8 to 21, columns 0 to 48" in str(picture)
    heights = [float(r.get("height", "0")) for r in rects if r.get("stroke") == "white"]
    assert heights[:3] == [heights[0]] * 3
    assert heights[3] == pytest.approx(heights[0] * 7 / 10, abs=0.02)


def test_a_halo_reaches_over_rows_and_columns_that_are_cut():
    picture = meshpar.show({"data": 1, "domain": 2, "domain_w": 2}, (1, 1, 8, 6), halo=1)
    assert "rank 0: rows 0 to 3, columns 0 to 2; needs rows 0 to 4, columns 0 to 3" in str(picture)


def test_ranks_without_rows_and_long_lists():
    picture = meshpar.show("data=1,domain=4", (1, 1, 5, 8))
    assert "without rows: rank 3" in picture.svg()
    many = meshpar.show("data=64,domain=2", (64, 1, 4, 4))
    assert len(many.panels) == 12
    assert many.num_left == 52
    assert "52 more" in str(many)
    assert "52 more" in many.svg()


def test_a_mesh_alone_shows_its_ranks():
    picture = meshpar.show("data=2,domain=2,tensor=2")
    assert [[b.cell.rank for b in p.boxes] for p in picture.panels] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert picture.grid == (2, 2)
    assert picture._repr_svg_() == picture.svg()


def test_a_layout_of_tokens():
    picture = meshpar.show("data=1,domain=3", (1, 10, 8), layout="data domain _")
    assert [b.rows for b in picture.panels[0].boxes] == [(0, 4), (4, 8), (8, 10)]


@pytest.mark.parametrize("ending", [".svg", ".html", ".txt", ".png"])
def test_pictures_are_saved(tmp_path, ending):
    file = meshpar.show("data=1,domain=4", (1, 1, 37, 49), halo=1).save(tmp_path / f"grid{ending}")
    assert file.stat().st_size > 100
    start = {".svg": b"<svg", ".html": b"<!doc", ".txt": b"(1, 1", ".png": b"\x89PNG"}[ending]
    assert file.read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("what", "shape", "kwargs", "says"),
    [
        ("data=2", (1, "a"), {}, "no shape"),
        ("data=2", (), {}, "no shape"),
        ("data=2", (2, -1), {}, "no shape"),
        ("data=-1", (2, 2), {}, "number of ranks"),
        ("data=2", (2, 2), {"halo": -1}, "halo=-1"),
        ("data=2", (2, 2), {"halo": True}, "halo=True"),
        ("data=2", (2, 2), {"layout": "data"}, "1 dims, for a shape of 2"),
        ("data=2", (2, 2), {"layout": "data rows"}, "unknown axis 'rows'"),
        ("data=2", (2, 2), {"layout": "data data"}, "axis 'data' twice"),
        ("rows=2", (2, 2), {}, "rows"),
    ],
)
def test_what_cannot_be_shown_is_an_error(what, shape, kwargs, says):
    with pytest.raises(SpecError, match=says):
        meshpar.show(what, shape, **kwargs)


def test_an_unknown_ending_is_an_error(tmp_path):
    with pytest.raises(SpecError, match=r"cannot save"):
        meshpar.show("data=2").save(tmp_path / "grid.gif")


def packed_layout() -> str:
    mesh = mesh_for("data=1,domain=2")
    placements = [Replicate(), meshpar.private.StridedShard(0, split_factor=2), Replicate()]
    x = torch.distributed.tensor.DTensor.from_local(torch.zeros(2, 2), mesh, placements, run_check=False)
    with pytest.raises(SpecError, match="no picture"):
        meshpar.show(x)
    return str(Shard(0))


def test_a_strided_layout_is_refused():
    run_ranks(packed_layout, 2)
