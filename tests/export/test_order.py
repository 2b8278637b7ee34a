"""In which order the bytes of a rank are written."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from meshpar import export_hf
from meshpar.export import writers
from meshpar.testing import mesh_for, run_ranks

ROWS, COLUMNS = (2048, 512), (64, 4096)


class Split(nn.Module):
    """A weight that is split by columns, and by name before one that is split by rows."""

    def __init__(self, mesh):
        super().__init__()
        for name, shape, dim in (("a_columns", COLUMNS, 1), ("b_rows", ROWS, 0)):
            piece = torch.arange(shape[0] * shape[1] // 2, dtype=torch.float32).view(
                *(n // 2 if d == dim else n for d, n in enumerate(shape))
            )
            self.register_parameter(name, nn.Parameter(DTensor.from_local(piece, mesh["domain"], [Shard(dim)])))


def sizes_of_writes(folder):
    model, written, kept = Split(mesh_for("data=1,domain=2")), [], writers.write_all

    def counting(handle, data, at):
        written.append(len(data))
        return kept(handle, data, at)

    writers.write_all = counting
    try:
        export_hf(model, folder, writer="direct")
    finally:
        writers.write_all = kept
    return written


def test_columns_are_written_when_the_disk_has_the_rows_to_write(tmp_path):
    for written in run_ranks(sizes_of_writes, 2, str(tmp_path / "model")):
        rows = ROWS[0] * ROWS[1] * 4 // 2
        at = written.index(rows)
        assert written[at + 1 :] == [COLUMNS[1] * 4 // 2] * COLUMNS[0]
        assert COLUMNS[1] * 4 // 2 not in written[:at]
