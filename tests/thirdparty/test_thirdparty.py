"""Installed networks, unmodified, against one process: outputs and all gradients, and what they gather.

The packages are not among those that the other tests need, so these tests have a command of their own:

    pip install -r tests/thirdparty/requirements.txt -c constraints.txt
    python -m pytest -m thirdparty

A package that is missing is a failure that says so, not a skip.
"""

from __future__ import annotations

import functools

import pytest
from installed import NETWORKS, bring_in, build, inputs

from meshpar.testing import assert_equivalent, run_ranks
from meshpar.testing.meshes import ranks_of

pytestmark = [
    pytest.mark.thirdparty,
    pytest.mark.filterwarnings("default"),  # they warn of their own, as they are imported and as they run
]

GATHERS: dict[tuple[str, str], set[str]] = {
    # Rows and columns lie in one dim, over two axes, once the attention has flattened them.
    ("diffusers-unet2d", "data=1,domain=2,domain_w=2"): {"F.group_norm"},
}
"""What is gathered, by network and mesh; whatever is not named here gathers nothing."""

IMPORT_S = 600.0  # every rank imports the package for itself


@functools.cache
def brought_in(package: str, num_ranks: int) -> None:
    bring_in(package)
    run_ranks(bring_in, num_ranks, package, timeout_s=IMPORT_S)


CASES = [(name, mesh) for name, network in NETWORKS.items() for mesh in network.meshes]


@pytest.mark.parametrize(("name", "mesh"), CASES, ids=[f"{name}-{mesh}" for name, mesh in CASES])
def test_installed_network_equals_one_process(name: str, mesh: str) -> None:
    network = NETWORKS[name]
    brought_in(network.package, ranks_of(mesh))
    report = assert_equivalent(
        functools.partial(build, name),
        inputs(name),
        mesh,
        tolerance=network.tolerance,
        dtype=network.dtype,
        gathers=True,
    )
    assert {entry.op for entry in report.log.gathers()} == GATHERS.get((name, mesh), set())
