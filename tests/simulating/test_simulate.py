"""`simulate`: a step on ranks and on one process, its pieces and tables, and what is refused before any rank hears."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import meshpar
from meshpar.errors import SpecError
from meshpar.simulating import ranks as ranks_module
from meshpar.testing import run_ranks


def small_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 3, 1)).double()


def grid(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def test_a_step_gives_outputs_gradients_pieces_and_bytes():
    """All that is returned is held against one process, here, and the pieces make up the whole."""
    net, x, target = small_net(), grid(1, 2, 5, 6).requires_grad_(), grid(1, 3, 5, 6)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    run = meshpar.simulate("domain=2", net, x, loss=lambda y: F.l1_loss(y, target))
    assert not dist.is_initialized()
    assert x.grad is None
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    y = net(x)
    F.l1_loss(y, target).backward()
    torch.testing.assert_close(run.output, y.detach())
    torch.testing.assert_close(run.input_gradients[0], x.grad)
    assert run.loss == pytest.approx(F.l1_loss(y, target).item())
    assert list(run.gradients) == [name for name, _ in net.named_parameters()]
    for name, p in net.named_parameters():
        torch.testing.assert_close(run.gradients[name], p.grad)
    expected = {f"gradient of {name}" for name in run.gradients} | {"loss", "output", "gradient of input 0"}
    assert set(run.errors) == expected
    assert run.difference == max(run.errors.values()) < 1e-12
    assert torch.equal(torch.cat([on.output.values for on in run.ranks], 2), run.output)
    assert [on.output.rows for on in run.ranks] == [(0, 3), (3, 5)]
    assert [on.inputs[0].lines() for on in run.ranks] == ["rows 0 to 2", "rows 3 to 4"]
    assert torch.equal(torch.cat([on.gradients["0.weight"].values for on in run.ranks]), run.gradients["0.weight"])
    assert run.ranks[1].parameters["0.weight"].part[0] == (2, 4)
    conv = next(row for row in run.ranks[1].explanation.rows if row.where == "0")
    assert (conv.num_rows, conv.forward_bytes, conv.backward_bytes) == (2, 2 * 6 * 8, 2 * 6 * 8)
    assert run.ranks[0].num_bytes == run.ranks[0].explanation.log.num_bytes() > 0


class Median(nn.Module):
    def forward(self, x):
        return x - torch.median(x)


def test_text_and_page_tell_the_same_and_mark_what_gathers():
    run = meshpar.simulate("domain=2", nn.Sequential(nn.Conv2d(1, 1, 3), Median()), torch.randn(1, 1, 7, 6))
    text, page = str(run), run._repr_html_()
    assert run.gathers() == ["1: torch.median"]
    assert "a step on domain=2" in text
    assert "1 gathers: 1: torch.median" in text
    assert "<svg" in page
    assert page.count("<tr style=") == 1
    for cell in ("rows 0 to 2", "rows 3 to 4", "F.conv2d", "torch.float32"):
        assert cell in text
        assert cell in page
    assert page.count("<tr") == text.count("\n") - 5


class Wrong(nn.Module):
    """Be another function on ranks than on one process."""

    def forward(self, x):
        return x - x.to_local().mean() if isinstance(x, DTensor) else x - x.mean()


class OtherShape(nn.Module):
    def forward(self, x):
        return x.flatten(2) if isinstance(x, DTensor) else x


@pytest.mark.parametrize("model", [Wrong(), OtherShape()])
def test_a_model_that_is_another_function_on_ranks_is_seen(model):
    """Sabotage: a report that never differs proves nothing."""
    assert meshpar.simulate("domain=2", model, grid(1, 1, 5, 4)).difference > 1e-3


def test_random_numbers_are_said():
    run = meshpar.simulate("domain=2", nn.Dropout(0.5), torch.ones(1, 1, 4, 4))
    assert run.is_random
    assert "dropout draws other ones" in str(run)
    assert not meshpar.simulate("domain=2", nn.Dropout(0.5).eval(), torch.ones(1, 1, 4, 4)).is_random


def whereabouts(mesh, word, *, more=""):
    print(f"{word}{more}")
    return meshpar.coordinate(mesh, "domain"), dist.get_rank()


def test_a_function_runs_on_all_ranks_and_what_it_prints_is_said(capsys):
    assert meshpar.simulate({"domain": 2}).run(whereabouts, "one", more=" word") == [(0, 0), (1, 1)]
    assert capsys.readouterr().out == "[all ranks] one word\n"
    meshpar.simulate("domain=2").run(lambda mesh: print("on", dist.get_rank()))
    assert capsys.readouterr().out == "[rank 0] on 0\n[rank 1] on 1\n"


def test_functions_and_classes_of_a_notebook_go_and_come_back():
    class Local:
        def __init__(self, x):
            self.x = x

    def make(mesh, factor):
        return Local(meshpar.axis_size(mesh, "domain") * factor), meshpar.shard(torch.arange(5.0), mesh, "domain")

    make.__module__ = Local.__module__ = "__main__"
    answers = meshpar.simulate("domain=2").run(make, 10)
    assert [type(made) for made, _ in answers] == [Local, Local]
    assert [made.x for made, _ in answers] == [20, 20]
    assert [piece.values.tolist() for _, piece in answers] == [[0, 1, 2], [3, 4]]
    assert repr(answers[1][1]) == "Piece(rank 1: rows 3 to 4 of 5/domain, torch.float32)"


def test_without_cloudpickle_what_can_be_imported_works_and_the_rest_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cloudpickle", None)
    assert meshpar.simulate("domain=2", nn.Identity(), torch.ones(1, 1, 2, 2)).difference == 0
    with pytest.raises(SpecError, match=r"loss(.|\n)*pip install \"meshpar\[notebook\]\""):
        meshpar.simulate("domain=2", nn.Identity(), torch.ones(1, 1, 2, 2), loss=lambda y: y.sum())


def test_what_cannot_be_sent_is_named_and_no_rank_hears_of_it():
    with pytest.raises(SpecError, match=r"argument 1\n(.|\n)*generator"):
        meshpar.simulate("domain=2").run(whereabouts, "word", (i for i in range(3)))


def test_what_all_ranks_raise_is_said_with_ranks_tracebacks_and_prints():
    def broken(mesh):
        print("so far")
        msg = f"rank {dist.get_rank()} cannot"
        raise KeyError(msg)

    with pytest.raises(meshpar.RankError, match=r"failed on 2 ranks(.|\n)*rank 1: raised KeyError") as caught:
        meshpar.simulate("domain=2").run(broken)
    assert "in broken" in caught.value.tracebacks[1]
    assert "It had printed:\nso far" in caught.value.tracebacks[1]
    assert isinstance(caught.value.__cause__, KeyError)
    assert isinstance(caught.value, meshpar.MeshparError)
    assert meshpar.simulate("domain=2").run(whereabouts, "again") == [(0, 0), (1, 1)]


def test_a_result_that_cannot_come_back_is_an_error_in_words():
    with pytest.raises(meshpar.RankError, match="what the function returns cannot be sent back"):
        meshpar.simulate("domain=2").run(lambda mesh: (i for i in range(3)))


def in_a_job() -> str:
    with pytest.raises(SpecError, match="a rank of a job") as caught:
        meshpar.simulate("domain=2", nn.Identity(), torch.ones(1, 1, 2, 2))
    return str(caught.value)


def test_a_rank_of_a_job_starts_no_ranks():
    assert "2 ranks" in run_ranks(in_a_job, 2)[0]


ONES = torch.ones(1, 1, 4, 4)
IDENTITY = nn.Identity()


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        (("domain=17",), {}, "17 processes(.|\n)*at most 16"),
        (("rows=2",), {}, "unknown axis 'rows'"),
        (("domain=2",), {"timeout_s": 0}, "timeout_s=0"),
        (("domain=2",), {"loss": abs}, "no model"),
        (("domain=2",), {"tensor_plan": "auto"}, "no model"),
        (("domain=2", len), {}, "not a model(.|\n)*run"),
        (("domain=2", IDENTITY, ONES), {"presicion": "bf16"}, "presicion(.|\n)*precision"),
        (("domain=2", IDENTITY, ONES), {"layouts": "data _ domain _"}, "layouts that do not fit"),
        (("domain=2", IDENTITY, ONES), {"layouts": [None, None]}, "2 layouts"),
        (("domain=2", nn.Linear(2, 2, device="meta"), ONES), {}, "parameter weight on meta"),
        (("domain=2", IDENTITY, {"x": ONES.to("meta")}), {}, "input 0 on meta"),
    ],
)
def test_what_cannot_be_simulated_is_refused_at_once(arguments, options, says):
    with pytest.raises(SpecError, match=says):
        meshpar.simulate(*arguments, **options)


def test_too_little_memory_is_said_with_both_sizes(monkeypatch):
    monkeypatch.setattr(ranks_module, "rooms", lambda: {"memory of the host": 100_000_000})
    with pytest.raises(
        SpecError, match=r"2 ranks, \S+ K?B of model(.|\n)*12\d MB(.|\n)*100 MB left \(memory of the host\)"
    ):
        meshpar.simulate("domain=2", IDENTITY, ONES)
