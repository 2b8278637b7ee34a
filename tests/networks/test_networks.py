"""Networks written for one GPU, unedited, against one process: outputs and all gradients; docs/coverage.md is true."""

from __future__ import annotations

import pytest
from catalogue import GATHERS, NETWORKS
from write_coverage import PAGE, page, run

CASES = [(name, mesh) for name, network in NETWORKS.items() for mesh in network.meshes]


@pytest.mark.parametrize(("name", "mesh"), CASES, ids=[f"{name}-{mesh}" for name, mesh in CASES])
def test_network_equals_one_process(name: str, mesh: str) -> None:
    assert {entry.op for entry in run(name, mesh).log.gathers()} == GATHERS.get((name, mesh), set())


@pytest.mark.parametrize("name", ["swin", "vit", "fno", "sfno", "convlstm", "diffusion"])
def test_some_networks_quickly(name: str) -> None:
    assert not run(name, "data=2,domain=2").log.gathers()


def test_the_coverage_page_is_what_a_run_says() -> None:
    assert PAGE.read_text() == page(), "run python tests/networks/write_coverage.py"
