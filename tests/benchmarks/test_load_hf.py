"""The bound of memory that `load_hf.py` measures, and that no rank reads what is not its own but for short gaps."""

import math

import export
import load_hf
import pytest

from meshpar.testing import run_ranks

HEADERS_BYTES = 256 << 10
"""What a rank reads beside tensors: headers, and its own /proc files to count."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", export.LAYOUTS)
def test_a_rank_reads_its_own_rows_in_little_memory(layout, tmp_path):
    run_ranks(load_hf.write, export.NUM_RANKS, "FSDP 4", 1, str(tmp_path), "100MB", timeout_s=160)
    total = export.expected_bytes(1, "100MB")
    for way in ("load_hf", "load_hf meta"):
        told = run_ranks(load_hf.measure, export.NUM_RANKS, way, layout, 1, str(tmp_path), timeout_s=160)
        for _, extra, _, largest in told:
            assert extra <= largest
        read = sum(read for *_, read, _ in told)
        # Norms are whole on every rank; weights that are split by columns are read with the short gaps in them.
        columns = sum(2 * math.prod(shape) for shape, split in export.shapes(1).values() if split == "columns")
        others = 3 * 2 * 3 * 2048 + (0 if layout == "FSDP 4" else 3 * columns)
        assert read <= total + others + export.NUM_RANKS * HEADERS_BYTES
