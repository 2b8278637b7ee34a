"""Layers of every family, drawn with all their arguments, over meshes of 2 to 4 ranks: none wrong, none gathered."""

import collections
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshpar.testing import run_ranks
from meshpar.testing.meshes import ranks_of
from meshpar.testing.strategies import LayerCase, layers, meshes

SETTINGS = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
}
NUM_LONG = int(os.environ.get("MESHPAR_CASES", "2000"))


def check_all(cases: list[LayerCase], mesh: str) -> int:
    for case in cases:
        try:
            case.check(mesh)
        except Exception as error:
            error.add_note(f"in {case} on {mesh}")
            raise
    return len(cases)


def run_cases(cases: list[LayerCase], mesh: str) -> int:
    return run_ranks(check_all, ranks_of(mesh), cases, mesh)[0]


@given(cases=st.lists(layers(), min_size=3, max_size=6), mesh=meshes())
@settings(max_examples=40, **SETTINGS)
def test_drawn_layers_equal_one_process(cases, mesh):
    assert run_cases(cases, mesh) == len(cases)


@pytest.mark.long
def test_two_thousand_drawn_layers_equal_one_process(capsys):
    """At least NUM_LONG layers, none wrong, none gathered; prints how many of each kind."""
    seen: collections.Counter[str] = collections.Counter()

    @given(cases=st.lists(layers(), min_size=5, max_size=8), mesh=meshes())
    @settings(max_examples=NUM_LONG // 5, **SETTINGS)
    def search(cases, mesh):
        run_cases(cases, mesh)
        seen.update(case.name for case in cases)
        seen.update([mesh])

    search()
    num_cases = sum(count for name, count in seen.items() if "=" not in name)
    with capsys.disabled():
        print(f"\n{num_cases} layer cases: {dict(sorted(seen.items()))}")
    assert num_cases >= NUM_LONG
