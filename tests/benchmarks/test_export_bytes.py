"""The bounds that `export.py` measures, but for time: memory of a rank, and every byte written once, none read."""

import export
import pytest

from meshpar.testing import run_ranks

# What a process reads to count (its own /proc files), to know its host and its file systems.
COUNTING_BYTES = 64 << 10


@pytest.mark.slow
@pytest.mark.parametrize("layout", export.LAYOUTS)
def test_every_byte_is_written_once_and_none_read_in_little_memory(layout, tmp_path):
    expected = export.expected_bytes(1, "100MB")
    told = run_ranks(export.measure, export.NUM_RANKS, "direct", layout, 1, "100MB", str(tmp_path), timeout_s=160)
    assert max(extra for _, _, extra, _, _ in told) <= export.DIRECT_BYTES
    assert sum(read for _, _, _, read, _ in told) <= export.NUM_RANKS * COUNTING_BYTES
    assert 0 <= sum(written for *_, written in told) - expected <= export.NUM_RANKS * COUNTING_BYTES  # messages, too
    told = run_ranks(export.measure, export.NUM_RANKS, "two-phase", layout, 1, "100MB", str(tmp_path), timeout_s=160)
    assert max(extra for _, _, extra, _, _ in told) <= export.TWO_PHASE_BYTES
    assert sum(read for _, _, _, read, _ in told) <= export.NUM_RANKS * COUNTING_BYTES
