"""The table of speeds: how its numbers come about; what they are is for a quiet machine."""

import math

import pytest
import speed


def test_the_slowest_rank_counts_in_each_round_and_the_median_over_rounds():
    ranks = [{("way", "step"): [1.0, 5.0, 2.0]}, {("way", "step"): [3.0, 1.0, 2.5]}]
    assert speed.slowest(ranks) == {("way", "step"): 3.0}


def test_a_row_is_ours_over_the_other():
    assert speed.Row("what", 3.0, 2.0, 1.1).ratio == pytest.approx(1.5)


@pytest.mark.slow
def test_one_command_prints_the_table(capsys):
    rows = speed.main(["--part", "exchange", "--part", "norms", "--rounds", "1"])
    assert len(rows) == 9
    assert all(math.isfinite(row.ratio) and row.ratio > 0 for row in rows)
    printed = capsys.readouterr().out
    assert all(row.what in printed for row in rows)
