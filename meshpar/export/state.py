"""The state dict of a checkpoint of Hugging Face."""

from __future__ import annotations

from torch import Tensor, nn


def exported_state(
    model: nn.Module,
    *,
    kv_cache_format: str | None = None,
    maxbound: float | None = None,
    is_modelopt_qlora: bool = False,
) -> dict[str, Tensor]:
    """Give the state dict of a model without the further names of tied weights."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            found[name] = value
    return found
