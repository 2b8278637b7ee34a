"""`auto_plan`: the layers of a model that gain from `tensor`, found by names and shapes.

Pairs are split by columns and then by rows, so that one sum over `tensor` ends each MLP and each attention. Names are
those of timm, transformers, diffusers and torch.nn; a pair is taken only where the shapes agree with what the names
say, and where its channels, and the heads of an attention, are shared out equally.

Invariant: whatever is chosen is a plan that `plan_splits` accepts; a wrong guess only costs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from torch import nn

MLPS: Sequence[tuple[tuple[str, ...], str]] = (
    (("fc1",), "fc2"),
    (("fc1_g", "fc1_x"), "fc2"),
    (("linear1",), "linear2"),
    (("lin1",), "lin2"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("w1", "w3"), "w2"),
    (("w1",), "w2"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("pwconv1",), "pwconv2"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("intermediate.dense",), "output.dense"),
    (("net.0.proj",), "net.2"),
)
"""What makes the hidden features, and what reads them. Names are paths from a common parent."""

ATTENTIONS: Sequence[tuple[tuple[str, ...], str]] = (
    (("q_proj", "k_proj", "v_proj"), "o_proj"),
    (("q_proj", "k_proj", "v_proj"), "out_proj"),
    (("query", "key", "value"), "output"),
    (("self.query", "self.key", "self.value"), "output.dense"),
    (("attention.query", "attention.key", "attention.value"), "output.dense"),
    (("q_lin", "k_lin", "v_lin"), "out_lin"),
    (("to_q", "to_k", "to_v"), "to_out.0"),
    (("q", "k", "v"), "o"),
    (("q", "k", "v"), "proj"),
)
"""What makes queries, keys and values, and what joins the heads."""

FUSED: Sequence[tuple[str, str, str]] = (
    ("qkv", "proj", "packed:3"),
    ("qkv", "out_proj", "packed:3"),
    ("qkv", "out", "packed:3"),
    ("to_qkv", "to_out", "packed:3"),
    ("qkv_proj", "o_proj", "packed:3"),
    ("qkv_proj", "out_proj", "packed:3"),
    ("query_key_value", "dense", "colwise"),  # each head has its query, key and value side by side
    ("gate_up_proj", "down_proj", "packed:2"),
)
"""What makes queries, keys and values (or gate and up) at once, what reads them, and how the first is split."""

HEADS = ("num_heads", "n_heads", "num_attention_heads", "heads", "nheads", "n_head", "num_key_value_heads")
"""Where an attention, or its configuration, keeps the numbers of its heads."""


def auto_plan(model: nn.Module, ranks: int) -> dict[str, str]:
    """Choose a tensor plan for a model.

    Args:
        model: any module; only names, classes and shapes matter.
        ranks: ranks of `tensor`.

    Returns:
        From names of modules to styles; empty where nothing was found.

    Example:
        >>> auto_plan(nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)), 2)
        {'0': 'colwise', '2': 'rowwise'}
        >>> auto_plan(nn.TransformerEncoderLayer(8, 2, 16), 2)
        {'linear1': 'colwise', 'linear2': 'rowwise', 'self_attn': 'colwise'}
    """
    plan: dict[str, str] = {}
    for path, module in model.named_modules():
        if any(path == taken or path.startswith(f"{taken}.") for taken in plan):
            continue
        for name, style in _found(module, ranks):
            full = ".".join(filter(None, (path, name)))
            plan.setdefault(full, style)
    return plan


def _found(module: nn.Module, ranks: int) -> Iterator[tuple[str, str]]:
    if isinstance(module, nn.MultiheadAttention):
        if module.num_heads % ranks == 0:
            yield "", "colwise"
        return
    if isinstance(module, nn.Sequential):
        yield from _in_sequence(module, ranks)
    for first, last, style in FUSED:
        parts = 2 if style == "packed:2" else 3
        fits = _fits(module, (first,), last, ranks, parts=parts)
        if fits and (parts == 2 or _heads_divide(module, ranks)):
            yield from ((first, style), (last, "rowwise"))
            return
    for names, last in ATTENTIONS:
        if _fits(module, names[:1], last, ranks) and _keys_fit(module, names, ranks) and _heads_divide(module, ranks):
            yield from (*((name, "colwise") for name in names), (last, "rowwise"))
            return
    for names, last in MLPS:
        if _fits(module, names, last, ranks):
            yield from (*((name, "colwise") for name in names), (last, "rowwise"))
            return


def _in_sequence(module: nn.Sequential, ranks: int) -> Iterator[tuple[str, str]]:
    """Find two layers with nothing but what works element by element between them: the first widens."""
    layers = [(name, layer) for name, layer in module.named_children() if not _is_elementwise(layer)]
    taken = ""
    for (a, first), (b, last) in itertools.pairwise(layers):
        sizes = _sizes(first), _sizes(last)
        if a == taken or None in sizes or not _is_pointwise(first) or not _is_pointwise(last):
            continue
        (num_in, hidden), (reads, _) = sizes  # type: ignore[misc]
        if hidden == reads and hidden > num_in and hidden % ranks == 0:
            taken = b
            yield from ((a, "colwise"), (b, "rowwise"))


def _is_elementwise(layer: nn.Module) -> bool:
    return type(layer).__module__ in ("torch.nn.modules.activation", "torch.nn.modules.dropout") and not isinstance(
        layer, nn.MultiheadAttention | nn.Softmax | nn.LogSoftmax | nn.Softmin | nn.Softmax2d | nn.GLU
    )


def _is_pointwise(layer: nn.Module) -> bool:
    """Tell whether a layer mixes channels and nothing else."""
    return isinstance(layer, nn.Linear) or set(getattr(layer, "kernel_size", (2,))) == {1}


def _sizes(layer: object) -> tuple[int, int] | None:
    """Give the input and output channels of a layer that has a style."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) and layer.groups == 1:
        return layer.in_channels, layer.out_channels
    return None


def _child(module: nn.Module, path: str) -> nn.Module | None:
    found: object = module
    for name in path.split("."):
        found = getattr(found, "_modules", {}).get(name)
    return found if isinstance(found, nn.Module) else None


def _fits(module: nn.Module, names: Sequence[str], last: str, ranks: int, parts: int = 1) -> bool:
    """Tell whether a module has children of these names, and what the first ones give is what the last one reads."""
    first = [_sizes(_child(module, name)) for name in names]
    reads = _sizes(_child(module, last))
    if reads is None or any(sizes is None for sizes in first):
        return False
    outs = {sizes[1] for sizes in first if sizes is not None}
    return outs == {parts * reads[0]} and reads[0] % ranks == 0


def _keys_fit(module: nn.Module, names: Sequence[str], ranks: int) -> bool:
    """Tell whether keys and values are layers alike; they may have fewer heads than the queries."""
    _, key, value = (_sizes(_child(module, name)) for name in names)
    return key is not None and key == value and key[1] % ranks == 0


def _heads_divide(module: nn.Module, ranks: int) -> bool:
    """Tell whether the heads are shared out equally; they are taken not to be where nothing tells their number."""
    owners = (module, *module.children())
    holders = [*owners, *(getattr(owner, "config", None) for owner in owners)]
    found = [getattr(holder, name, None) for holder in holders for name in HEADS]
    numbers = [number for number in found if isinstance(number, int) and not isinstance(number, bool)]
    return bool(numbers) and all(number % ranks == 0 for number in numbers)
