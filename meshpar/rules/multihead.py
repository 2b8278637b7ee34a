"""`F.multi_head_attention_forward`, out of the rules for products with weights and for attention.

Invariant: samples and tokens stay where they are; batch and heads are never merged, so that nothing is re-chunked
between the projections. Masks are added on the local pieces alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshpar import pieces, private
from meshpar.gathering import gather_call
from meshpar.packed import call_with_packed, is_packed
from meshpar.registry import rule
from meshpar.rules.attention import Local, attention, autocast, lifted
from meshpar.rules.linear import linear
from meshpar.rules.pointwise import map_pieces
from meshpar.rules.random import seeded
from meshpar.rules.spatial import settle
from meshpar.spmd import call

OP = "F.multi_head_attention_forward"


def _do(function: Any, x: Tensor, *args: Any) -> Any:
    """Run a function of a tensor by its rule where the tensor is an activation."""
    return call(function, (x, *args), {}) if isinstance(x, DTensor) else function(x, *args)


def _moved_dims(x: DTensor, shape: Sequence[int], to: Mapping[int, int], piece: Tensor) -> DTensor:
    """Give an activation whose dims were renumbered locally."""
    placements = [type(p)(to[p.dim]) if p.is_shard() else p for p in x.placements]  # type: ignore[attr-defined,call-arg]
    return pieces.whole(piece, x.device_mesh, placements, shape)


def _split_heads(x: DTensor, start: int, num_features: int, num_heads: int) -> DTensor:
    """Take features of (length, batch, features), and give (batch, heads, length, features of a head)."""
    length, batch, _ = x.shape
    if pieces.shard_axes(x, 2):  # features, so heads, over tensor
        x = _do(Tensor.narrow, x, 2, start, num_features)
        x = _do(Tensor.reshape, x, (length, batch, num_heads, num_features // num_heads))
        return _do(Tensor.permute, x, (1, 2, 0, 3))  # type: ignore[no-any-return]
    piece = pieces.local(x).narrow(-1, start, num_features)
    piece = piece.unflatten(-1, (num_heads, num_features // num_heads)).permute(1, 2, 0, 3)
    shape = (batch, num_heads, length, num_features // num_heads)
    return _moved_dims(x, shape, {0: 2, 1: 0, 2: 1}, piece)


def _thirds(w: Tensor | None) -> list[Tensor | None]:
    """Give the parts of a packed weight that make queries, keys and values."""
    if w is None:
        return [None] * 3
    n = w.shape[0] // 3
    return [_do(Tensor.narrow, w, 0, i * n, n) for i in range(3)]


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Give a mask that is added to scores: minus infinity where a boolean one says that a key is hidden."""
    if mask is None or mask.is_floating_point():
        return mask

    def hidden(m: Tensor) -> Tensor:
        return torch.zeros(m.shape, dtype=dtype, device=m.device).masked_fill_(m, float("-inf"))

    return map_pieces(hidden, (mask,), {}) if isinstance(mask, DTensor) else hidden(mask)


@private.asked_once
def _checked(tensors: tuple[Any, ...], others: tuple[Any, ...]) -> None:
    """Raise torch's own errors: it runs the function on tensors without data."""
    args = dict(others)
    for name, shape, dtype in tensors:
        args[name] = torch.empty(shape, dtype=dtype, device="meta")
    F.multi_head_attention_forward(**args)


def _is_usual(given: Mapping[str, Any]) -> bool:
    """Tell whether the sizes of a usual call fit; any other call is for torch to judge."""
    query, key, value = (given[name] for name in ("query", "key", "value"))
    weight, bias = given["in_proj_weight"], given["in_proj_bias"]
    attn_mask, padding = given["attn_mask"], given["key_padding_mask"]
    if query.dim() != 3 or key.shape != value.shape or query.shape[1:] != key.shape[1:] or weight is None:
        return False
    length, batch, n = query.shape
    heads, keys = given["num_heads"], key.shape[0]
    shapes = (length, keys), (batch * heads, length, keys)
    dtypes = {x.dtype for x in (query, key, value, weight, given["out_proj_weight"])}
    return (
        n == given["embed_dim_to_check"]
        and n % heads == 0
        and weight.shape == (3 * n, n)
        and (bias is None or bias.shape == (3 * n,))
        and given["out_proj_weight"].shape[1:] == (n,)
        and len(dtypes) == 1
        and (attn_mask is None or (tuple(attn_mask.shape) in shapes and attn_mask.is_floating_point()))
        and (padding is None or (tuple(padding.shape) == (batch, keys) and padding.is_floating_point()))
        and not (given["is_causal"] and attn_mask is None)
        and all(given[name] is None for name in ("bias_k", "bias_v", "static_k", "static_v"))
        and not given["use_separate_proj_weight"]
    )


def _check(given: Mapping[str, Any], mesh: DeviceMesh) -> None:
    if _is_usual(given):
        return
    free = torch.is_autocast_enabled(mesh.device_type)  # weights and inputs may differ in dtype then

    def dtype(x: Tensor) -> torch.dtype:
        return torch.float32 if free and x.is_floating_point() else x.dtype

    tensors = tuple((key, tuple(x.shape), dtype(x)) for key, x in given.items() if isinstance(x, Tensor))
    others = {key: x for key, x in given.items() if not isinstance(x, Tensor)}
    _checked(tensors, tuple({**others, "need_weights": False, "dropout_p": 0.0}.items()))


def _with_weights(x: Local) -> tuple[Tensor, Tensor]:
    """Attend as torch does where the weights are asked for too: a softmax without care for rows that see no key."""
    s = (x.q * x.scale) @ x.k.transpose(-2, -1)
    s = s if x.mask is None else s + x.mask
    weights = torch.softmax(s, -1)
    if x.dropout:
        with seeded(s.device, x.seed):
            weights = F.dropout(weights, x.dropout)
    return weights @ x.v, weights


def _attended(
    q: DTensor, k: DTensor, v: DTensor, masks: Sequence[Tensor], *, causal: bool, dropout: float, weights: bool
) -> tuple[DTensor, DTensor | None]:
    """Attend; give the heads' outputs, (batch, heads, length, features), and their weights where asked for."""
    shape = (*q.shape[:-1], v.shape[-1])
    if weights:
        pair, parts, placements = attention(
            q, k, v, masks, shape=shape, causal=causal, dropout=dropout, whole_keys=_with_weights
        )
        shares = pieces.whole(pair[1], parts.mesh, placements, (*q.shape[:-1], k.shape[-2]))
        return pieces.whole(pair[0], parts.mesh, placements, shape), shares
    with autocast(q.device_mesh, [q, k, v, *masks]) as (q, k, v, *masks):
        out, parts, placements = attention(q, k, v, masks, shape=shape, causal=causal, dropout=dropout)
    return pieces.whole(out, parts.mesh, placements, shape), None


def _joined(out: DTensor) -> DTensor:
    """Give (length, batch, features) from (batch, heads, length, features of a head)."""
    if pieces.shard_axes(out, 1):
        out = _do(Tensor.permute, out, (2, 0, 1, 3))
        return _do(Tensor.flatten, out, 2)  # type: ignore[no-any-return]
    out = settle(out, (0, 2), OP, nested=(0,))
    batch, heads, length, features = out.shape
    piece = pieces.local(out).permute(2, 0, 1, 3).flatten(2)
    return _moved_dims(out, (length, batch, heads * features), {0: 1, 2: 0, 1: 2, 3: 2}, piece)


NAMES = tuple(inspect.signature(F.multi_head_attention_forward).parameters)
DEFAULTS = {
    name: p.default
    for name, p in inspect.signature(F.multi_head_attention_forward).parameters.items()
    if p.default is not p.empty
}


@rule(F.multi_head_attention_forward)
def multi_head_attention_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Project, attend with several heads, project back: what `nn.MultiheadAttention` calls.

    Args:
        args: arguments of torch. query has the global shape (L, B, E), or (L, E), key and value (S, B, ...); lengths
            and batch may be sharded, and plain tensors are taken as replicated. Masks may be activations or plain.
        kwargs: the same, by name. With need_weights the keys are gathered.

    Returns:
        The output, global shape (L, B, E), in the placements of the query; the weights, (B, L, S) or
        (B, heads, L, S), or None.

    Communication:
        That of `scaled_dot_product_attention`; a row from a neighbour where keys are appended.

    Raises:
        AssertionError, RuntimeError: arguments that torch refuses, on all ranks, before any communication.
    """
    given = {**DEFAULTS, **dict(zip(NAMES, args, strict=False)), **kwargs}
    found = [x for x in given.values() if isinstance(x, DTensor)]
    _check(given, found[0].device_mesh)
    inputs = [given[name] for name in ("query", "key", "value")]
    if not any(isinstance(x, DTensor) for x in inputs):
        why = "queries, keys and values are plain"
        return gather_call(F.multi_head_attention_forward, args, kwargs, why=why)  # type: ignore[no-any-return]
    query, key, value = _batched(inputs, found[0].device_mesh)
    batch, heads, weights = query.shape[1], given["num_heads"], given["need_weights"]
    attn_mask, padding, causal = given["attn_mask"], given["key_padding_mask"], given["is_causal"]
    if causal and padding is None and not weights:
        attn_mask = None
    else:
        causal = False  # the mask says it
    q, k, v = _project((query, key, value), given)
    (k, v), extra = _with_more_keys(k, v, given)
    masks = _masks(_additive(attn_mask, query.dtype), _additive(padding, query.dtype), batch, heads, extra)
    dropout = given["dropout_p"] if given["training"] else 0.0
    attended, shares = _attended(q, k, v, masks, causal=causal, dropout=dropout, weights=weights)
    out = linear(_joined(attended), given["out_proj_weight"], given["out_proj_bias"])
    if shares is not None and given["average_attn_weights"]:
        shares = _do(Tensor.mean, shares, 1)
    if inputs[0].dim() == 2:
        out, shares = _do(Tensor.squeeze, out, 1), None if shares is None else _do(Tensor.squeeze, shares, 0)
    return out, shares


@rule(private.NESTED_FROM_MASK, status="plain")
def left_aligned(t: Tensor, mask: Tensor) -> bool:
    """Tell `nn.TransformerEncoder` in eval mode not to pack its input into a nested tensor.

    Torch takes that way in no mode of torch functions, ours or another. It would fill padded positions with zeros;
    without it they hold what the layers give, as in training.
    """
    return False


def _batched(inputs: Sequence[Tensor], mesh: DeviceMesh) -> list[DTensor]:
    """Give (length, batch, features) of all; one tensor in several places stays one."""
    memo: dict[int, DTensor] = {}
    for x in inputs:
        if id(x) not in memo:
            y = lifted(x, mesh)
            memo[id(x)] = y if x.dim() == 3 else _do(Tensor.unsqueeze, y, 1)
    return [memo[id(x)] for x in inputs]


def _project(inputs: tuple[DTensor, DTensor, DTensor], given: Mapping[str, Any]) -> list[DTensor]:
    """Project to (batch, heads, length, features of a head): at once, where all come from one input."""
    num_heads, weight, bias = given["num_heads"], given["in_proj_weight"], given["in_proj_bias"]
    if given["use_separate_proj_weight"]:
        weights = [given[f"{name}_proj_weight"] for name in "qkv"]
    elif inputs[0] is inputs[1] is inputs[2]:
        all_three, n = linear(inputs[0], weight, bias), weight.shape[0] // 3
        if is_packed(all_three):
            thirds = call_with_packed(torch.chunk, (all_three, 3, -1), {}, call)
            return [_split_heads(third, 0, n, num_heads) for third in thirds]
        return [_split_heads(all_three, i * n, n, num_heads) for i in range(3)]
    else:
        weights = _thirds(weight)
    parts = zip(inputs, weights, _thirds(bias), strict=True)
    return [_split_heads(linear(x, w, b), 0, w.shape[0], num_heads) for x, w, b in parts]


def _with_more_keys(k: DTensor, v: DTensor, given: Mapping[str, Any]) -> tuple[list[DTensor], int]:
    """Append learned keys, and a key of zeros, where asked for; keys that were given replace the projected ones."""
    batch, heads = k.shape[:2]
    found, extra = [], 0
    for x, name in ((k, "k"), (v, "v")):
        bias, static, extra = given[f"bias_{name}"], given[f"static_{name}"], 0
        if static is not None:
            x = lifted(_do(Tensor.reshape, static, (batch, heads, *static.shape[1:])), k.device_mesh)
        if bias is not None:
            row = _do(Tensor.reshape, bias, (1, heads, 1, x.shape[-1]))
            x, extra = _appended(x, _do(Tensor.expand, row, (batch, heads, 1, x.shape[-1]))), extra + 1
        if given["add_zero_attn"]:
            zeros = torch.zeros((batch, heads, 1, x.shape[-1]), dtype=x.dtype, device=x.device)
            x, extra = _appended(x, zeros), extra + 1
        found.append(x)
    return found, extra


def _appended(x: DTensor, row: Tensor) -> DTensor:
    return call(torch.cat, ([x, row], -2), {})  # type: ignore[no-any-return]


def _masks(attn_mask: Tensor | None, padding: Tensor | None, batch: int, num_heads: int, extra: int) -> list[Tensor]:
    """Bring masks to four dims, with columns for the keys that were appended: those are seen by all."""
    out = []
    if attn_mask is not None:
        sizes = (1, 1) if attn_mask.dim() == 2 else (batch, num_heads)
        out.append(_do(Tensor.reshape, attn_mask, (*sizes, *attn_mask.shape[-2:])))
    if padding is not None:
        out.append(_do(Tensor.reshape, padding, (batch, 1, 1, padding.shape[-1])))
    return [_do(F.pad, m, (0, extra)) if extra else m for m in out]
