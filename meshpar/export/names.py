"""Which name a tensor of a state dict gets in a checkpoint of Hugging Face, and which tensors stay out of it.

Invariant: names alone decide. They are matched part by part between the dots, never by pieces of words: a module that
is called `exploration` has no LoRA in it, and the codebooks of a `vector_quantizer` are no state of a quantizer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Parts that wrappers of torch put into names."""

CACHE_SCALES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("k_bmm_quantizer", "_amax"): ("k_proj", "k_scale"),
    ("v_bmm_quantizer", "_amax"): ("v_proj", "v_scale"),
}
"""The last parts of a name whose value becomes the scale of a key or value cache, and those that it gets."""

_RENAMED: dict[tuple[str, ...], tuple[str, ...]] = {
    **CACHE_SCALES,
    ("k_bmm_quantizer", "_bias_value"): ("k_proj", "k_bias"),
    ("v_bmm_quantizer", "_bias_value"): ("v_proj", "v_bias"),
    ("input_quantizer", "_pre_quant_scale"): ("pre_quant_scale",),
}

_QUANTIZER = re.compile(r"(?:.*_)?(?:input|output|weight|bmm|softmax)_quantizers?")
_LORA = re.compile(r"(?:^|[._])loras?(?:[._]|$)")


def module_name(name: str) -> str:
    """Give the name that a tensor has without the wrappers of torch around its modules.

    Example:
        >>> module_name("_orig_mod.blocks.0._checkpoint_wrapped_module.weight")
        'blocks.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def is_cache_scale(name: str) -> bool:
    """Tell whether a value becomes the scale of a key or value cache."""
    return tuple(name.split(".")[-2:]) in CACHE_SCALES


def exported_name(name: str, *, qlora: bool = False) -> str | None:
    """Give the name that a tensor has in a checkpoint, None where it stays out of it.

    Args:
        name: the name in the state dict.
        qlora: whether the model is a quantized one with LoRA on it, of which only the base is wanted.

    Example:
        >>> exported_name("h.0.attn.k_bmm_quantizer._amax")
        'h.0.attn.k_proj.k_scale'
        >>> exported_name("fc.input_quantizer._pre_quant_scale")
        'fc.pre_quant_scale'
        >>> exported_name("fc.weight_quantizer._scale") is None
        True
        >>> exported_name("q.base_layer.weight", qlora=True), exported_name("q.lora_A.weight", qlora=True)
        ('q.weight', None)
    """
    parts = module_name(name).split(".")
    if qlora:
        if _LORA.search(name):
            return None
        parts = [part for part in parts[:-1] if part != "base_layer"] + parts[-1:]
    new = _RENAMED.get(tuple(parts[-2:]))
    if new is not None:
        return ".".join([*parts[:-2], *new])
    return None if _is_quantizer_state(parts) else ".".join(parts)


def _is_quantizer_state(parts: Sequence[str]) -> bool:
    last = parts[-1]
    return (
        last in ("_amax", "_bias_value", "weight_shape")
        or last.endswith(("quantizer_amax", "quantizers_amax"))
        or "output_quantizer" in parts[:-1]
        or (last.startswith("_") and any(_QUANTIZER.fullmatch(part) for part in parts[:-1]))
    )


def companions(name: str, names: Sequence[str]) -> list[str]:
    """List the scales that belong to a weight, among some names: what stands beside it and is called after it.

    Example:
        >>> companions("head.weight", ["head.weight_scale", "head.input_scale", "head.scale", "body.weight_scale"])
        ['head.weight_scale', 'head.input_scale']
    """
    owner, _, leaf = name.rpartition(".")
    own = rf"{re.escape(leaf)}(?:_weight|_input|_output|_pre_quant)?_scale(?:_\w+)?"
    if leaf == "weight":
        own = rf"(?:{own}|(?:input|output|pre_quant)_scale(?:_\w+)?)"
    pattern = re.compile((re.escape(owner) + r"\." if owner else "") + own)
    return [other for other in names if pattern.fullmatch(other)]


def without_ones(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Give the shape that a tensor has in a checkpoint: scales of one block lose that dim.

    Example:
        >>> without_ones("fc.weight_scale", (1, 4, 2)), without_ones("fc.weight", (1, 4, 2))
        ((4, 2), (1, 4, 2))
    """
    return tuple(shape[1:]) if "scale" in name and len(shape) == 3 and shape[0] == 1 else tuple(shape)


def odd(name: object) -> str | None:
    """Say what is wrong with a name for a header of safetensors, None where nothing is."""
    if not isinstance(name, str):
        return f"a {type(name).__name__}, not a string"
    if not name:
        return "empty"
    if name == "__metadata__":
        return "taken by the format"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "not text in UTF-8"
    return None
