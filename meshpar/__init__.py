"""meshpar: any `torch.nn.Module` on a mesh of data x domain x tensor ranks, with the same numbers."""

from meshpar import layers, rules
from meshpar.agree import check_same_samples
from meshpar.batch import gather, shard, shard_batch
from meshpar.errors import (
    GatherError,
    GatherWarning,
    MeshparError,
    PeerError,
    ShardingError,
    SpecError,
)
from meshpar.exchange import fetch
from meshpar.layers import SpherePad2d, sphere_pad
from meshpar.mesh import (
    AXES,
    MeshSpec,
    axis_group,
    axis_ranks,
    axis_size,
    coordinate,
    is_first,
    is_last,
    make_mesh,
    neighbours,
)
from meshpar.parallelize import mesh_of, parallelize
from meshpar.reading import read_rows, read_sharded, shard_slices
from meshpar.record import Entry, Record, record
from meshpar.rewrite import rewrite
from meshpar.sampling import DataSampler, collate_or_empty, in_step
from meshpar.scope import spmd

__all__ = [
    "AXES",
    "DataSampler",
    "Entry",
    "GatherError",
    "GatherWarning",
    "MeshSpec",
    "MeshparError",
    "PeerError",
    "Record",
    "ShardingError",
    "SpecError",
    "SpherePad2d",
    "axis_group",
    "axis_ranks",
    "axis_size",
    "check_same_samples",
    "collate_or_empty",
    "coordinate",
    "fetch",
    "gather",
    "in_step",
    "is_first",
    "is_last",
    "layers",
    "make_mesh",
    "mesh_of",
    "neighbours",
    "parallelize",
    "read_rows",
    "read_sharded",
    "record",
    "rewrite",
    "rules",
    "shard",
    "shard_batch",
    "shard_slices",
    "sphere_pad",
    "spmd",
]
