"""The bound that `memory.py` measures: activations of a rank of 4 are a quarter of one process, within a tenth."""

import memory
import pytest

from meshpar.testing import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("name", list(memory.networks()))
def test_a_rank_of_four_holds_a_quarter(name):
    (one,) = run_ranks(memory.measure, 1, name, "", timeout_s=300)
    ranks = run_ranks(memory.measure, 4, name, "data=1,domain=4", timeout_s=300)
    assert max(ranks) * 4 <= memory.BOUND * one
