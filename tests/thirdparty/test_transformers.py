"""Unmodified models of transformers under the plan that `auto_plan` finds: the numbers of one process, no gather."""

import functools
import importlib

import pytest
import torch
from torch import nn

from meshpar.autoplan import auto_plan
from meshpar.testing import assert_equivalent
from meshpar.testing.meshes import ranks_of

pytestmark = pytest.mark.thirdparty

HEADS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "Bert": ({**HEADS, **QUIET, "vocab_size": 20}, 12),
    "Llama": ({**HEADS, "num_key_value_heads": 2, "vocab_size": 20, "pad_token_id": 0, "eos_token_id": 1}, 14),
    "ViT": ({**HEADS, **QUIET, "image_size": 32, "patch_size": 8}, 12),
    "Phi3": ({**HEADS, "num_key_value_heads": 4, "vocab_size": 20, "pad_token_id": 0, "eos_token_id": 1}, 8),
}
"""For each model its configuration, and the number of layers that the plan splits."""


class LastState(nn.Module):
    """Give the one output that is compared; the rest of what transformers return is not a tensor, or None."""

    def __init__(self, name: str) -> None:
        super().__init__()
        transformers = importlib.import_module("transformers")
        config = getattr(transformers, f"{name}Config")(**MODELS[name][0])
        config.use_cache = False
        self.model = getattr(transformers, f"{name}Model")(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).last_hidden_state


@pytest.mark.parametrize("mesh", ["data=1,tensor=2", "data=2,tensor=2", "data=1,domain=2,tensor=2"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_runs_split(name: str, mesh: str) -> None:
    torch.manual_seed(0)
    model = LastState(name)
    assert len(auto_plan(model, 2)) == MODELS[name][1]
    x = torch.randn(2, 3, 32, 32) if name == "ViT" else torch.randint(2, 20, (2, 6))
    assert ranks_of(mesh) in (2, 4)
    assert_equivalent(functools.partial(LastState, name), [x], mesh, options={"tensor_plan": "auto"})
