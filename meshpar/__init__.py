"""meshpar: any `torch.nn.Module` on a mesh of data x domain x tensor ranks, with the same numbers."""

from meshpar import layers, rules
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
    replicas,
)
from meshpar.parallelize import mesh_of, parallelize
from meshpar.precision import Precision
from meshpar.record import Entry, Record, record
from meshpar.rewrite import rewrite
from meshpar.scope import spmd

__all__ = [
    "AXES",
    "Entry",
    "GatherError",
    "GatherWarning",
    "MeshSpec",
    "MeshparError",
    "PeerError",
    "Precision",
    "Record",
    "ShardingError",
    "SpecError",
    "SpherePad2d",
    "axis_group",
    "axis_ranks",
    "axis_size",
    "coordinate",
    "fetch",
    "gather",
    "is_first",
    "is_last",
    "layers",
    "make_mesh",
    "mesh_of",
    "neighbours",
    "parallelize",
    "record",
    "replicas",
    "rewrite",
    "rules",
    "shard",
    "shard_batch",
    "sphere_pad",
    "spmd",
]
