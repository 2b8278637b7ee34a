"""meshpar: any `torch.nn.Module` on a mesh of data x domain x tensor ranks, with the same numbers."""

from meshpar import layers, rules
from meshpar.batch import gather, shard, shard_batch
from meshpar.checkpoint import (
    Loaded,
    Saved,
    Saving,
    full_state_dict,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from meshpar.errors import (
    CheckpointError,
    GatherError,
    GatherWarning,
    MeshparError,
    PeerError,
    ShardingError,
    SpecError,
)
from meshpar.exchange import fetch
from meshpar.layers import SpherePad2d, sphere_pad
from meshpar.materialize import materialize
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
from meshpar.record import Entry, Record, record
from meshpar.rewrite import rewrite
from meshpar.scope import spmd

__all__ = [
    "AXES",
    "CheckpointError",
    "Entry",
    "GatherError",
    "GatherWarning",
    "Loaded",
    "MeshSpec",
    "MeshparError",
    "PeerError",
    "Record",
    "Saved",
    "Saving",
    "ShardingError",
    "SpecError",
    "SpherePad2d",
    "axis_group",
    "axis_ranks",
    "axis_size",
    "coordinate",
    "fetch",
    "full_state_dict",
    "gather",
    "is_first",
    "is_last",
    "latest_checkpoint",
    "layers",
    "list_checkpoints",
    "load_checkpoint",
    "make_mesh",
    "materialize",
    "mesh_of",
    "neighbours",
    "parallelize",
    "record",
    "rewrite",
    "rules",
    "save_checkpoint",
    "shard",
    "shard_batch",
    "sphere_pad",
    "spmd",
]
