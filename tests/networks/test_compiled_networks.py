"""Networks written for one GPU, unedited, as one graph of `torch.compile`, against one process in eager mode."""

from __future__ import annotations

import functools

import pytest
from catalogue import NETWORKS, build, inputs

from meshpar.testing import assert_equivalent


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet2d", "encoder", "vit", "swin"])
def test_compiled_network_equals_one_process(name: str) -> None:
    """Outputs, gradients of inputs and of all parameters, buffers; no gather."""
    job = functools.partial(build, name)
    assert_equivalent(job, inputs(name), "data=1,domain=2", layouts=NETWORKS[name].layouts, compiled="aot_eager")
