"""Recurrent layers and cells: the functions behind `nn.RNN`, `nn.LSTM`, `nn.GRU` and their cells.

Invariant: every sequence is run through by one rank, from its first step to its last. Samples are shared out as they
lie; where time is sharded, the shards move to the samples and back if there are enough of them, else the sequences are
gathered. Weights are whole on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshpar import pieces
from meshpar.gathering import gather_call
from meshpar.registry import name_of, rule
from meshpar.rules.random import piece_seed, seeded
from meshpar.rules.spatial import settle, sharded_dims, whole_along
from meshpar.transpose import transposed

LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
CELLS = ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
_NAMES = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")

Call = Callable[[Tensor, Any, Sequence[Tensor | None]], Any]
"""A torch function of input, states and weights, its other arguments filled in."""


def _states(hx: Any) -> list[Tensor]:
    return list(hx) if isinstance(hx, list | tuple) else [hx]


def _like(hx: Any, states: Sequence[Tensor]) -> Any:
    return list(states) if isinstance(hx, list | tuple) else states[0]


def _placed(input: Tensor, hx: Any, batch: int, op: str) -> DTensor:
    """Give the input as an activation; a plain one goes where the first state lies, whose samples are in dim -2."""
    if isinstance(input, DTensor):
        return input
    state = next(s for s in _states(hx) if isinstance(s, DTensor))
    state = settle(state, (state.dim() - 2,), op, nested=(state.dim() - 2,))
    placements = [Shard(batch) if p.is_shard() else Replicate() for p in state.placements]
    return pieces.lift(input, state.device_mesh, placements)


def _check(call: Call, input: Tensor, hx: Any, weights: Sequence[Tensor | None], batch: int) -> None:
    """Let torch refuse what it would: on no samples it makes every check and no work."""

    def none(x: Tensor, dim: int) -> Tensor:
        shape = list(x.shape)
        shape[dim] = 0
        return torch.empty(shape, dtype=x.dtype, device=x.device)

    for state in _states(hx):
        if state.dim() != 1 and state.shape[-2] != input.shape[batch]:
            msg = f"hidden states of {state.shape[-2]} samples, input of {input.shape[batch]}"
            raise RuntimeError(msg)
    if input.dim() > 1 and not any(isinstance(w, DTensor) for w in weights):
        with torch.no_grad():
            call(none(input, batch), _like(hx, [none(s, s.dim() - 2) for s in _states(hx)]), weights)


def _run(call: Call, x: DTensor, hx: Any, weights: Sequence[Tensor | None], batch: int, op: str) -> tuple[Any, Any]:
    """Run on the samples of this rank; gives the pieces and the placements of the states."""
    mesh = x.device_mesh

    def lies(state: Tensor) -> list[Placement]:
        return [Shard(state.dim() - 2) if p == Shard(batch) else Replicate() for p in x.placements]

    def enter(state: Tensor) -> Tensor:
        if isinstance(state, DTensor):
            return pieces.local(pieces.moved(state, lies(state), op))
        return pieces.cut(pieces.as_part(state, mesh, x.placements), mesh, lies(state))

    own = [None if w is None else pieces.companion(w, mesh, x.placements) for w in weights]
    states = _states(hx)
    return call(pieces.local(x), _like(hx, [enter(s) for s in states]), own), lies(states[0])


def _layer(func: Callable[..., Any]) -> Callable[..., Any]:
    op = name_of(func)

    def handler(*args: Any, **kwargs: Any) -> Any:
        """Run a recurrent layer.

        Communication:
            None where time is whole. Where it is sharded, an all-to-all before and one after; a gather where the
            samples are fewer than the ranks, or sharded themselves.
        """
        if len(args) > 3 and isinstance(args[3], list | tuple):
            return gather_call(func, args, kwargs, why="its sequences are packed")
        given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
        hx, weights, rest = given["hx"], given["params"], [given[name] for name in _NAMES[3:]]
        num_layers, dropout, train, batch_first = rest[1], rest[2], rest[3], rest[5]
        batch, time = (0, 1) if batch_first else (1, 0)

        def call(x: Tensor, states: Any, own: Sequence[Tensor | None]) -> Any:
            return func(x, states, own, *rest)

        _check(call, given["input"], hx, weights, batch)
        x = settle(_placed(given["input"], hx, batch, op), (0, 1), op, nested=(batch,))
        before, mesh = x.placements, x.device_mesh
        over = sharded_dims(x).get(time)
        if over is not None:
            if x.shape[batch] >= mesh.size(over) and not pieces.shard_axes(x, batch):
                x = transposed(x, over, batch, op)
            else:
                x = whole_along(x, [over], op, "time is sharded, and the samples cannot be shared out instead")
        draws = train and dropout > 0 and num_layers > 1
        seed = seeded(x.device, piece_seed(mesh, x.placements, op)) if draws else contextlib.nullcontext()
        with seed:
            (out, *last), lies = _run(call, x, hx, weights, batch, op)
        result = pieces.whole(out, mesh, x.placements, (*x.shape[:2], out.shape[-1]))
        if over is not None:
            moves = result.placements[over].is_shard()
            result = transposed(result, over, time, op) if moves else pieces.moved(result, before, op)
        shapes = [(s.shape[0], x.shape[batch], s.shape[2]) for s in last]
        return (result, *(pieces.whole(s, mesh, lies, shape) for s, shape in zip(last, shapes, strict=True)))

    return handler


def _cell(func: Callable[..., Any]) -> Callable[..., Any]:
    op = name_of(func)

    def handler(
        input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Any:
        """Run one step of a recurrent layer; no communication."""
        weights = (w_ih, w_hh, b_ih, b_hh)

        def call(x: Tensor, states: Any, own: Sequence[Tensor | None]) -> Any:
            return func(x, states, *own)

        batch = max(input.dim() - 2, 0)
        _check(call, input, hx, weights, batch)
        x = _placed(input, hx, batch, op)
        x = settle(x, range(x.dim() - 1), op, nested=range(x.dim() - 1))
        found, lies = _run(call, x, hx, weights, batch, op)
        shape = _states(hx)[0].shape
        states = [pieces.whole(s, x.device_mesh, lies, shape) for s in _states(found)]
        return tuple(states) if isinstance(found, tuple) else states[0]

    return handler


for _name in LAYERS:
    rule(getattr(torch, _name))(_layer(getattr(torch, _name)))
for _name in CELLS:
    rule(getattr(torch, _name))(_cell(getattr(torch, _name)))
