"""The trace of a step: what is told apart, and the picture of it."""

import pytest
import step_trace
from step_trace import REST, Span


def test_ops_are_told_apart_by_kind():
    assert step_trace.kind_of("aten::convolution_backward") == "convolutions"
    assert step_trace.kind_of("c10d::recv_") == step_trace.kind_of("meshpar::all_gather") != ""
    assert step_trace.kind_of("aten::add") == ""


def test_what_lies_within_another_op_counts_once():
    spans = [Span("norms", 1.0, 4.0), Span("norms", 2.0, 3.0), Span("activations", 4.0, 5.0)]
    kept = step_trace.outermost(spans)
    assert kept == [spans[0], spans[2]]
    found = step_trace.sums(6.0, kept)
    assert (found["norms"], found["activations"], found[REST]) == (3.0, 1.0, 2.0)


@pytest.mark.slow
def test_one_command_prints_the_table_and_draws_the_picture(tmp_path, capsys):
    found = step_trace.main(["--grid", "32", "64", "--picture", str(tmp_path / "t.svg"), "--chrome", str(tmp_path)])
    assert len(found) == 2
    assert all(rank[kind] > 0 for rank in found for kind in (*step_trace.KINDS, REST))
    picture = (tmp_path / "t.svg").read_text()
    assert "rank 0" in picture
    assert "rank 1" in picture
    assert picture.count("<rect") > 30
    assert (tmp_path / "rank1.json").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert all(kind in printed for kind in found[0])
