"""The table of speeds: how its numbers come about; what they are is for a quiet machine."""

import math

import pytest
import side_by_side
import speed


def test_the_slowest_rank_counts_in_each_round():
    ranks = [{("way", "step"): [1.0, 5.0, 2.0]}, {("way", "step"): [3.0, 1.0, 2.5]}]
    assert side_by_side.slowest(ranks) == {("way", "step"): [3.0, 5.0, 2.5]}


def test_a_ratio_is_the_median_of_those_of_the_rounds():
    row = side_by_side.Row("what", [3.0, 4.0, 50.0], [2.0, 4.0, 5.0], 1.1, [2.0, 4.0, 6.0])
    assert row.ratio == pytest.approx(1.5)
    assert str(row).split() == ["what", "4000.00", "4000.00", "1.50", "1.10", "1.00"]


@pytest.mark.slow
def test_one_command_prints_the_table(capsys):
    rows = speed.main(["--part", "exchange", "--part", "norms", "--rounds", "1"])
    assert len(rows) == 9
    assert all(math.isfinite(row.ratio) and row.ratio > 0 for row in rows)
    printed = capsys.readouterr().out
    assert all(row.what in printed for row in rows)
