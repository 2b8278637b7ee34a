"""`nn.MultiheadAttention` and torch's transformers, unmodified: arguments, masks, training, dropout."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rule_cases import Case, real, run
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from meshpar.batch import shard
from meshpar.record import record
from meshpar.rewrite import rewrite
from meshpar.scope import spmd
from meshpar.testing import assert_equivalent, mesh_for, run_ranks


def _attention(**told: Any) -> nn.MultiheadAttention:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = nn.MultiheadAttention(8, 4, **told).double()
        for p in made.parameters():
            nn.init.uniform_(p, -0.5, 0.5)
    return made


def _call(module: nn.Module, names: list[str], told: dict[str, Any], *args: Tensor) -> Any:
    """Call a module with its parameters as weights of the case."""
    split = len(args) - len(names)
    inputs = args[:split] * 3 if split == 1 else args[:split]
    return torch.func.functional_call(module, dict(zip(names, args[split:], strict=True)), inputs, told)


MODULES: tuple[dict[str, Any], ...] = (
    {},
    {"bias": False},
    {"kdim": 5, "vdim": 6},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True},
)


def _modules(mesh: str, *, every: int = 1, start: int = 0) -> Iterator[Case]:
    num = start
    for length, keys in ((7, 7), (2, 2), (5, 9)):
        hidden = torch.zeros(3, keys, dtype=torch.bool)
        hidden[0, 1:], hidden[1, :1] = True, True
        masks: tuple[dict[str, Any], ...] = (
            {},
            {"attn_mask": real(length, keys, salt=3)},
            {"attn_mask": real(12, length, keys, salt=4), "key_padding_mask": real(3, keys, salt=5)},
            {"key_padding_mask": hidden},
            {"attn_mask": torch.ones(length, keys, dtype=torch.bool).triu(1), "is_causal": True},
        )
        for first in (True, False):
            layout, flat = ("data domain _", "domain _") if first else ("domain data _", "domain _")
            for made in MODULES:
                module = _attention(batch_first=first, **made)
                names = [name for name, _ in module.named_parameters()]
                weights = [p.detach() for p in module.parameters()]
                sizes = (length, 8), (keys, made.get("kdim", 8)), (keys, made.get("vdim", 8))
                x = [real(*((3, n, e) if first else (n, 3, e)), salt=i) for i, (n, e) in enumerate(sizes)]
                told = [
                    (m, need) for m in masks for need in ({}, {"need_weights": False}, {"average_attn_weights": False})
                ]
                for mask, need in told:
                    num += 1
                    if num % every == 0:
                        fn = functools.partial(_call, module, names, {**mask, **need})
                        yield Case(f"{made} {length} {keys} {first} {[*mask]} {need}", fn, x, (layout,) * 3, weights)
                num += 1
                if num % max(every // 3, 1) == 0 and length == keys and "kdim" not in made:
                    fn = functools.partial(_call, module, names, {"need_weights": first})
                    yield Case(f"self {made} {length} {first}", fn, x[:1], (layout,), weights)
                    yield Case(f"unbatched {made} {length}", fn, [real(length, 8)], (flat,), weights)


def _some_modules(mesh: str) -> Iterator[Case]:
    yield from _modules(mesh, every=19, start=3 if mesh.endswith("3") else 0)


def _most_modules(mesh: str) -> Iterator[Case]:
    yield from _modules(mesh, every=4)


@pytest.mark.parametrize("mesh", ["data=2,domain=2", "data=1,domain=3"])
def test_multihead(mesh: str) -> None:
    run(_some_modules, mesh, at_least=20)


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["data=2,domain=2", "data=1,domain=4"])
def test_multihead_with_all_arguments(mesh: str) -> None:
    run(_most_modules, mesh, at_least=100)


def _masks_here(mesh: str) -> Iterator[Case]:
    module = _attention(batch_first=True)
    names, weights = [n for n, _ in module.named_parameters()], [p.detach() for p in module.parameters()]
    x, padding, hidden = real(3, 7, 8), real(3, 7, salt=5), real(3, 7, salt=6) > 1.0

    def with_padding(x: Any, m: Any, *ws: Tensor) -> Any:
        return _call(module, names, {"key_padding_mask": m, "need_weights": False}, x, x, x, *ws)

    def with_attn_mask(x: Any, m: Any, *ws: Tensor) -> Any:
        return _call(module, names, {"attn_mask": m, "need_weights": False}, x, x, x, *ws)

    yield Case("padding", with_padding, (x, padding), ("data domain _", "data domain"), weights)
    yield Case("hidden", with_padding, (x, hidden), ("data domain _", "data domain"), weights)
    yield Case("bias", with_attn_mask, (x, real(7, 7, salt=5)), ("data domain _", "domain _"), weights)
    yield Case("bias a head", with_attn_mask, (x, real(12, 7, 7, salt=5)), ("data domain _", "data domain _"), weights)


def test_masks_that_are_activations() -> None:
    run(_masks_here, "data=2,domain=2", at_least=4)


def _refused() -> None:
    mesh = mesh_for("data=1,domain=2")
    module = _attention(batch_first=True)
    x = shard(real(3, 7, 8), mesh, "data domain _")
    wrong = real(6, 7)
    with record() as log, spmd(on_gather="error"):
        for told in (
            {"attn_mask": wrong},
            {"key_padding_mask": torch.zeros(2, 7, dtype=torch.bool)},
            {"is_causal": True},
            {"attn_mask": torch.ones(7, 7, dtype=torch.int64)},
        ):
            with pytest.raises((RuntimeError, AssertionError)):
                module(x, x, x, **told)
        with pytest.raises((RuntimeError, AssertionError)):
            module(x, x[:, :, :4], x)
    assert log.num_bytes() == 0


def test_multihead_refuses_what_torch_refuses() -> None:
    run_ranks(_refused, 2)


# transformers


class Padded(nn.Module):
    """Hide the last tokens of one sample, and later tokens where asked for."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.net = nn.TransformerEncoder(_layer(), 2)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        pad = torch.zeros(x.shape[0], n, dtype=x.dtype)
        pad[0, n // 2 + 1 :] = -math.inf
        mask = nn.Transformer.generate_square_subsequent_mask(n, dtype=x.dtype) if self.causal else None
        return self.net(x, mask=mask, src_key_padding_mask=pad, is_causal=self.causal)


def _layer(**told: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 4, dim_feedforward=12, dropout=0.0, **{"batch_first": True, **told})


def _model(name: str) -> nn.Module:
    plain: dict[str, Any] = {"dim_feedforward": 12, "dropout": 0.0}
    makers: dict[str, Callable[[], nn.Module]] = {
        "layer": _layer,
        "norm first": lambda: _layer(norm_first=True, activation="gelu"),
        "eval": lambda: nn.TransformerEncoder(_layer(), 2, norm=nn.LayerNorm(8)).eval(),
        "length first": lambda: _layer(batch_first=False),
        "padded": lambda: Padded(causal=False),
        "padded eval": lambda: Padded(causal=False).eval(),
        "padded causal": lambda: Padded(causal=True),
        "decoder": lambda: nn.TransformerDecoderLayer(8, 4, batch_first=True, **plain),
        "transformer": lambda: nn.Transformer(8, 4, 1, 1, batch_first=True, **plain),
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return makers[name]()


def _models(mesh: str, names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    the_mesh = mesh_for(mesh)
    for name in names:
        for length in sizes:
            layout, x = "data domain _", real(3, length, 8)
            if name == "length first":
                layout, x = "domain data _", real(length, 3, 8)
            if name in ("decoder", "transformer"):
                for other in ("data domain _", "data _ _"):
                    for layouts in ((layout, other), (other, layout)):
                        assert_equivalent(_model(name), [x, real(3, 5, 8, salt=1)], the_mesh, layouts=layouts)
                continue
            report = assert_equivalent(_model(name), [x], the_mesh, layouts=[layout])
            assert not report.log.gathers()


def test_transformers_are_the_same_function() -> None:
    run_ranks(_models, 4, "data=2,domain=2", ("layer", "padded causal", "padded eval"), (7,))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2,domain=2", "data=1,domain=3"])
def test_all_transformers_property(mesh: str) -> None:
    names = ("layer", "norm first", "eval", "length first", "padded", "padded eval", "padded causal")
    run_ranks(_models, 4 if "2" in mesh else 3, mesh, (*names, "decoder", "transformer"), (7, 2), timeout_s=300.0)


def _without_gradients() -> None:
    """The fast paths of torch, which need no gradients, are not for pieces."""
    mesh = mesh_for("data=2,domain=2")
    for made in (_model("layer"), _model("eval"), _attention(batch_first=True)):
        model = made.double().eval()
        x, pad = real(3, 7, 8), torch.zeros(3, 7, dtype=torch.bool)
        pad[0, 4:] = True
        for told in ({}, {"src_key_padding_mask": pad}):
            if isinstance(model, nn.MultiheadAttention):
                args: Any = [x, x, x]
                told = {"key_padding_mask": pad} if told else {}
            else:
                args = [x]
            with torch.no_grad(), spmd(on_gather="error"):
                mine = shard(x, mesh, "data domain _")
                found = rewrite(model)(*[mine] * len(args), **told)
            with torch.no_grad():
                expected = model(*args, **told)
            found, expected = (y if isinstance(y, Tensor) else y[0] for y in (found, expected))
            assert found.placements[:2] == (Shard(0), Shard(1))
            seen = ~pad if told else torch.ones_like(pad)
            assert torch.allclose(found.full_tensor()[seen], expected[seen], rtol=0, atol=1e-12)


def test_without_gradients_the_rules_hold_too() -> None:
    run_ranks(_without_gradients, 4)


def _train_with_dropout() -> None:
    mesh = mesh_for("data=2,domain=2")
    torch.manual_seed(0)
    model = rewrite(nn.TransformerEncoderLayer(8, 4, 12, dropout=0.3, batch_first=True).double())
    x = shard(real(4, 8, 8), mesh, "data domain _")
    for weights in (True, False):
        module = rewrite(_attention(dropout=0.5, batch_first=True))
        torch.manual_seed(3)
        a = module(x, x, x, need_weights=weights)[0].full_tensor()
        torch.manual_seed(3)
        b = module(x, x, x, need_weights=weights)[0].full_tensor()
        c = module(x, x, x, need_weights=weights)[0].full_tensor()
        assert torch.equal(a, b)
        assert not torch.equal(b, c)
    torch.manual_seed(3)
    y = model(x)
    assert y.placements[:2] == (Shard(0), Shard(1))


def test_dropout_of_modules_follows_the_seed() -> None:
    run_ranks(_train_with_dropout, 4)
