"""The table of a step: every op with its layouts, rows and bytes, and a model that is as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshpar
from meshpar.errors import SpecError
from meshpar.testing import mesh_for, run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.median(self.drop(torch.relu(self.norm(self.conv(x)))))


def explained() -> tuple[str, str, int, tuple[tuple[str, ...], ...], bool]:
    torch.manual_seed(0)
    net = Net()
    net.conv.weight.grad = None
    model = meshpar.parallelize(net, mesh_for("data=1,domain=4"), on_gather="allow")
    x = torch.randn(2, 2, 10, 4, requires_grad=False)
    before = [b.clone() for b in model.buffers()]
    state = torch.get_rng_state()
    found = meshpar.explain(model, x, loss=lambda y: y.square())
    same = all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    same &= torch.equal(state, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())
    return str(found), found._repr_html_(), found.log.num_bytes(), tuple(row.cells() for row in found.rows), same


def test_every_op_stands_in_the_table_with_layouts_rows_and_bytes():
    for rank, (text, page, num_bytes, rows, same) in enumerate(run_ranks(explained, 4)):
        assert same
        by_op = {row[1]: row for row in rows}
        conv = by_op["F.conv2d"]
        assert conv[0] == "conv"
        assert conv[3:5] == ("2 x 2 x 10/domain x 4", "2 x 4 x 10/domain x 4")
        sends = {0: 1, 1: 2, 2: 2, 3: 1}[rank]  # 3, 3, 3 and 1 rows
        assert conv[5:7] == (str(sends), f"{sends * 2 * 2 * 4 * 4} B")
        assert by_op["F.batch_norm"][0] == "norm"
        assert by_op["torch.median"][2] == "gather"
        assert text.count("\n") == len(rows) + 1
        assert "1 gathers" in text
        assert page.count("<tr") == len(rows) + 1
        assert page.count("background") == 1
        assert num_bytes > 0


def refused() -> None:
    model = meshpar.parallelize(nn.Identity(), mesh_for("data=1,domain=2"))
    with pytest.raises(SpecError, match="nothing to make it of"):
        meshpar.explain(model, torch.ones(1, 1, 4, 4, dtype=torch.int64))
    with pytest.raises(SpecError, match="no mesh"):
        meshpar.explain(nn.Identity(), torch.ones(1))


def test_what_cannot_be_explained_is_an_error():
    run_ranks(refused, 2)
