"""Recurrent layers and cells: samples wherever they lie, time moved to the samples where it is sharded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rule_cases import MESHES, TENSOR, Case, check_all, real, run
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from meshpar.batch import shard
from meshpar.record import record
from meshpar.scope import spmd
from meshpar.testing import assert_equivalent, assert_same, mesh_for, run_ranks
from meshpar.testing.meshes import ranks_of

KINDS = ("LSTM", "GRU", "RNN tanh", "RNN relu")


def _layer(kind: str, *sizes: int, **options: Any) -> nn.Module:
    torch.manual_seed(3)
    name, _, nonlinearity = kind.partition(" ")
    more = {"nonlinearity": nonlinearity} if nonlinearity else {}
    return getattr(nn, name)(*sizes, **options, **more).double()


def _called(layer: nn.Module, names: tuple[str, ...]) -> Any:
    """Make a function of input, states and weights of a layer."""

    def fn(x: Tensor, *rest: Any) -> Any:
        states, weights = rest[: len(rest) - len(names)], rest[len(rest) - len(names) :]
        hx = None if not states else states if len(states) > 1 else states[0]
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x, hx))

    return fn


def _case(
    kind: str, shape: tuple[int, ...], layout: str, *, given: bool = False, gathers: bool = False, **options: Any
) -> Case:
    layer = _layer(kind, shape[-1], 4, **options)
    names, weights = zip(*layer.named_parameters(), strict=True)
    inputs, layouts = [real(*shape)], [layout]
    if given:
        dims = layout.split()
        at = 0 if options.get("batch_first") else 1
        num = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
        for i, size in enumerate((options.get("proj_size", 0) or 4, 4)[: 2 if kind == "LSTM" else 1]):
            inputs.append(real(num, shape[at], size, salt=i))
            layouts.append(f"_ {dims[at]} _")
    return Case(
        f"{kind} {shape} {layout} {given} {options}",
        _called(layer, names),
        inputs,
        layouts,
        [w.detach() for w in weights],
        tolerance=1e-9,
        gathers=gathers,
        quiet=False,
    )


def _explicit(mesh: str) -> Iterator[Case]:
    for kind, batch_first in itertools.product(KINDS, (True, False)):
        shape, layout = ((4, 3, 5), "data _ _") if batch_first else ((3, 4, 5), "_ data _")
        for states in (False, True):
            yield _case(kind, shape, layout, given=states, batch_first=batch_first)
            yield _case(kind, shape, layout.replace("data", "domain"), given=states, batch_first=batch_first)
            yield _case(
                kind, shape, layout, given=states, batch_first=batch_first, num_layers=2, bidirectional=True, bias=False
            )
        few = (1, 3, 5) if batch_first else (3, 1, 5)
        yield _case(kind, few, layout, batch_first=batch_first, given=True)
        time = ("_ domain _", (5, 7, 5)) if batch_first else ("domain _ _", (7, 5, 5))
        yield _case(kind, time[1], time[0], batch_first=batch_first, given=True)
        yield _case(kind, time[1], time[0], batch_first=batch_first, num_layers=2, bidirectional=True)
    yield _case("LSTM", (4, 3, 5), "data _ _", batch_first=True, proj_size=2, given=True)
    yield _case("LSTM", (4, 6, 5), "_ domain _", batch_first=True, proj_size=2, num_layers=2, bidirectional=True)


def _some(mesh: str) -> Iterator[Case]:
    return itertools.islice(_explicit(mesh), 0, None, 4)


def test_layers() -> None:
    run(_some, "data=2,domain=2", at_least=18)


@pytest.mark.parametrize("mesh", ["data=2,domain=2", "data=1,domain=3"])
def test_layers_equals_one_process(mesh: str) -> None:
    run(_explicit, mesh, at_least=70)


def _gathered(mesh: str) -> Iterator[Case]:
    for kind in KINDS:
        yield _case(kind, (1, 7, 5), "_ domain _", batch_first=True, gathers=True)
        yield _case(kind, (3, 4, 5), "_ data domain", gathers=True)
        yield _case(kind, (4, 6, 5), "data domain _", batch_first=True, given=True, gathers=True)


def test_what_cannot_be_shared_out_is_gathered_and_right() -> None:
    run(_gathered, "data=2,domain=2", at_least=12)


def _cells(mesh: str) -> Iterator[Case]:
    for kind, layout, size in itertools.product(KINDS, ("data _", "domain _", "_ _"), (5, 1)):
        name, _, nonlinearity = kind.partition(" ")
        cell = _layer(f"{name}Cell {nonlinearity}".strip(), 5, 4)
        names, weights = zip(*cell.named_parameters(), strict=True)
        given = [w.detach() for w in weights]
        states = [real(size, 4, salt=i) for i in range(2 if kind == "LSTM" else 1)]
        x = real(size, 5)
        fn = _called(cell, names)
        yield Case(f"{kind} {layout}", fn, [x], [layout], given, tolerance=1e-9, keeps=True, quiet=True)
        layouts = [layout] * (1 + len(states))
        yield Case(f"{kind} {layout} states", fn, [x, *states], layouts, given, tolerance=1e-9, keeps=True, quiet=True)
        layouts = [layout, *["_ _"] * len(states)]
        yield Case(f"{kind} {layout} other states", fn, [x, *states], layouts, given, tolerance=1e-9, keeps=True)
        if size == 5:
            swapped = lambda h, x, *rest, fn=fn: fn(x, h, *rest)  # noqa: E731
            if kind != "LSTM":
                args = ([states[0]], [layout], [x, *given])
                yield Case(f"{kind} {layout} plain input", swapped, *args, tolerance=1e-9, keeps=True)
        one = Case(f"{kind} one sample", fn, [x[0]], ["_"], given, tolerance=1e-9)
        yield one


def test_cells() -> None:
    run(_cells, "data=1,domain=3", at_least=80)


@pytest.mark.parametrize("mesh", ["data=2,domain=2", TENSOR])
def test_cells_equals_one_process(mesh: str) -> None:
    run(_cells, mesh, at_least=80)


def _moves() -> None:
    """Sharded time costs one all-to-all before and one after, each sending what the others will own."""
    mesh = mesh_for("data=1,domain=4")
    case = _case("GRU", (8, 12, 5), "_ domain _", batch_first=True)
    report = assert_same(case.fn, case.inputs, mesh=mesh, layouts=case.layouts, weights=case.weights)
    there, back = 6 * 3 * 5 * 8, 3 * 2 * 3 * 4 * 8  # 6 other samples of 3 steps; 3 other ranks' steps of 2 samples
    for backward in (False, True):
        sent = report.log.num_bytes(kind="redistribute", backward=backward)
        assert sent == there + back if not backward else sent == 2 * 9 * 5 * 8 + 6 * 3 * 4 * 8
    assert not report.log.select(kind="gather")


def test_sharded_time_moves_to_the_samples_and_back() -> None:
    run_ranks(_moves, 4)


def _packed() -> None:
    mesh = mesh_for("data=2,domain=2")
    layer = _layer("LSTM", 5, 4)

    def fn(x: Tensor) -> Tensor:
        out, _ = layer(pack_padded_sequence(x, torch.tensor([4, 3, 3, 1]), batch_first=True))
        return pad_packed_sequence(out, batch_first=True)[0]

    assert_same(fn, (real(4, 4, 5),), mesh=mesh, layouts=("data _ _",), gathers=True)


def test_packed_sequences_are_gathered_and_right() -> None:
    run_ranks(_packed, 4)


def _errors() -> None:
    mesh = mesh_for("data=1,domain=2")
    x = shard(real(3, 4, 5), mesh, "_ domain _")
    layer, cell = _layer("LSTM", 5, 4), _layer("GRUCell", 5, 4)
    with record() as log, spmd(on_gather="error"):
        for args in ((x[..., :4],), (x, (torch.zeros(1, 3, 4).double(), torch.zeros(1, 4, 4).double())), (x[:0],)):
            with pytest.raises(RuntimeError):
                layer(*args)
        with pytest.raises(RuntimeError):
            torch.gru(x, torch.zeros(1, 4, 3).double(), list(_layer("GRU", 5, 4).parameters()), *_REST)
        with pytest.raises(RuntimeError):
            torch.gru(x, torch.zeros(1, 3, 4).double(), list(_layer("GRU", 5, 4).parameters()), *_REST)
        with pytest.raises(RuntimeError):
            cell(shard(real(3, 4), mesh, "domain _"))
        with pytest.raises(RuntimeError):
            cell(shard(real(3, 5), mesh, "domain _"), torch.zeros(2, 4).double())
    assert not log.select(kind="gather")


_REST = (True, 1, 0.0, False, False, False)


def test_what_torch_refuses_is_refused() -> None:
    run_ranks(_errors, 2)


def _between_layers() -> None:
    """Dropout between layers: other masks over the ranks that share out samples, the same over the others."""
    mesh = mesh_for("data=2,domain=2")
    layer = _layer("GRU", 3, 64, num_layers=2, dropout=0.5, batch_first=True)
    with torch.no_grad():
        for p in layer.parameters():
            dist.broadcast(p, 0)
    same = real(1, 3, 3).expand(4, 3, 3).contiguous()
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with record() as log, spmd(on_gather="error"):
            out, _ = layer(shard(same, mesh, "data _ _"))
        assert {e.kind for e in log.entries} == {"random"}
        pair = out.to_local().clone()
        dist.broadcast(pair, group=mesh.get_group("domain"), group_src=0)
        assert torch.equal(pair, out.to_local())
        outs.append(out.full_tensor().detach())
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    assert not any(torch.equal(outs[0][i], outs[0][j]) for i, j in itertools.combinations(range(4), 2))
    layer.eval()
    with spmd(on_gather="error"):
        assert torch.allclose(layer(shard(same, mesh, "data _ _"))[0].full_tensor(), layer(same)[0])


def test_dropout_between_layers() -> None:
    run_ranks(_between_layers, 4)


# networks


class Forecaster(nn.Module):
    """Every grid point is a sequence: (B, T, C, H, W) to (B*H*W, T, C), through an LSTM, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C, H, W = x.shape
        series = x.permute(0, 3, 4, 1, 2).reshape(B * H * W, T, C)
        out, (h, _) = self.lstm(series)
        return (self.head(out) + h.mean((0, 2))[:, None, None]).reshape(B, H, W, T, C).permute(0, 3, 4, 1, 2)


class ConvLSTMCell(nn.Module):
    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.gates = nn.Conv2d(channels + hidden, 4 * hidden, 3, padding=1)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        i, f, o, g = torch.chunk(self.gates(torch.cat((x, h), 1)), 4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class ConvLSTM(nn.Module):
    """A rollout of 4 steps that feeds its outputs back; states begin as plain zeros, or as zeros like x."""

    def __init__(self, zeros: str = "plain") -> None:
        super().__init__()
        self.zeros = zeros
        self.cells = nn.ModuleList([ConvLSTMCell(3, 4), ConvLSTMCell(4, 4)])
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        B, _, H, W = x.shape

        def zeros() -> Tensor:
            if self.zeros == "plain":
                return torch.zeros(B, 4, H, W, dtype=x.dtype, device=x.device)
            return x.new_zeros(B, 4, H, W) if self.zeros == "new" else torch.zeros_like(x[:, :1]).expand(-1, 4, -1, -1)

        states = [(zeros(), zeros()) for _ in self.cells]
        outputs = []
        for _ in range(4):
            h = x
            for k, cell in enumerate(self.cells):
                states[k] = cell(h, states[k])
                h = states[k][0]
            x = x + self.head(h)
            outputs.append(x)
        return torch.stack(outputs, 1)


class Stepper(nn.Module):
    """Cells stepped by hand over a sequence of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(3, 4), nn.GRUCell(4, 4), nn.RNNCell(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state, g = None, torch.zeros(x.shape[0], 4, dtype=x.dtype)
        step, outputs = x[:, 0], []
        for t in range(x.shape[1]):
            state = self.lstm(step + x[:, t], state)
            g = self.gru(state[0], g)
            step = self.rnn(g)
            outputs.append(step)
        return torch.stack(outputs, 1)


NETWORKS: dict[str, tuple[Any, tuple[int, ...], str]] = {
    "every point a sequence": (Forecaster, (2, 3, 2, 5, 4), "data _ _ domain _"),
    "ConvLSTM plain": (lambda: ConvLSTM("plain"), (2, 3, 7, 5), "data _ domain _"),
    "ConvLSTM new": (lambda: ConvLSTM("new"), (2, 3, 7, 5), "data _ domain _"),
    "ConvLSTM like": (lambda: ConvLSTM("like"), (2, 3, 7, 5), "data _ domain _"),
    "cells": (Stepper, (4, 3, 3), "data _ _"),
    "cells over domain": (Stepper, (5, 3, 3), "domain _ _"),
}


def _network(name: str, mesh: str) -> None:
    factory, shape, layout = NETWORKS[name]
    report = assert_equivalent(factory, [real(*shape)], mesh_for(mesh), layouts=[layout])
    assert not report.log.gathers(), report.log.summary()


@pytest.mark.parametrize("name", list(NETWORKS))
def test_networks(name: str) -> None:
    run_ranks(_network, 4, name, "data=2,domain=2")


@pytest.mark.parametrize("mesh", ["data=1,domain=4", "data=1,domain=3"])
@pytest.mark.parametrize("name", list(NETWORKS))
def test_network_equals_one_process(name: str, mesh: str) -> None:
    run_ranks(_network, ranks_of(mesh), name, mesh)


# drawn cases


@st.composite
def drawn_cases(draw: st.DrawFn) -> tuple[Any, ...]:
    kind, batch_first, given = draw(st.sampled_from(KINDS)), draw(st.booleans()), draw(st.booleans())
    options: dict[str, Any] = {
        "batch_first": batch_first,
        "num_layers": draw(st.integers(1, 3)),
        "bidirectional": draw(st.booleans()),
        "bias": draw(st.booleans()),
    }
    if kind == "LSTM" and draw(st.booleans()):
        options["proj_size"] = draw(st.integers(1, 3))
    batch, time, features = draw(st.integers(1, 9)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    return kind, batch, time, features, draw(st.sampled_from(("data", "domain", "time"))), given, options


def _drawn(cases: list[tuple[Any, ...]], mesh: str) -> list[str]:
    def build(_: str) -> Iterator[Case]:
        for kind, batch, time, features, where, states, options in cases:
            p = mesh_for(mesh).size(1)
            dims = ["_", "domain", "_"] if where == "time" else [where, "_", "_"]
            shape = [batch, time, features]
            if not options["batch_first"]:
                shape[:2], dims[:2] = shape[1::-1], dims[1::-1]
            gathers = where == "time" and batch < p
            case = _case(kind, tuple(shape), " ".join(dims), given=states, gathers=False, **options)
            yield Case(case.label, case.fn, case.inputs, case.layouts, case.weights, tolerance=1e-9, gathers=gathers)

    return check_all(build, mesh)[1]


def _property(mesh: str, cases: list[tuple[Any, ...]]) -> None:
    wrong = [text for texts in run_ranks(_drawn, ranks_of(mesh), cases, mesh, timeout_s=300.0) for text in texts]
    assert not wrong, "\n".join(wrong[:10])


@given(mesh=st.sampled_from(MESHES), cases=st.lists(drawn_cases(), min_size=3, max_size=8))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_recurrent_layers_property(mesh: str, cases: list[tuple[Any, ...]]) -> None:
    _property(mesh, cases)


@pytest.mark.long
@given(mesh=st.sampled_from(MESHES), cases=st.lists(drawn_cases(), min_size=6, max_size=12))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_recurrent_layers_on_every_mesh_property(mesh: str, cases: list[tuple[Any, ...]]) -> None:
    _property(mesh, cases)
