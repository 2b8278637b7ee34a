"""meshpar: any `torch.nn.Module` on a mesh of data x domain x tensor ranks, with the same numbers."""

from meshpar import layers, rules
from meshpar.accumulation import no_sync
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
from meshpar.chosen import should_not_checkpoint
from meshpar.ema import EMA
from meshpar.errors import (
    CheckpointError,
    GatherError,
    GatherWarning,
    MeshparError,
    NonFiniteError,
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
    replicas,
)
from meshpar.optim import clip_grad_norm_, grad_norm
from meshpar.parallelize import mesh_of, parallelize, parallelize_from_config
from meshpar.precision import Precision
from meshpar.record import Entry, Record, record
from meshpar.rewrite import rewrite
from meshpar.scope import spmd

__all__ = [
    "AXES",
    "EMA",
    "CheckpointError",
    "Entry",
    "GatherError",
    "GatherWarning",
    "Loaded",
    "MeshSpec",
    "MeshparError",
    "NonFiniteError",
    "PeerError",
    "Precision",
    "Record",
    "Saved",
    "Saving",
    "ShardingError",
    "SpecError",
    "SpherePad2d",
    "axis_group",
    "axis_ranks",
    "axis_size",
    "clip_grad_norm_",
    "coordinate",
    "fetch",
    "full_state_dict",
    "gather",
    "grad_norm",
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
    "no_sync",
    "parallelize",
    "parallelize_from_config",
    "record",
    "replicas",
    "rewrite",
    "rules",
    "save_checkpoint",
    "shard",
    "shard_batch",
    "should_not_checkpoint",
    "sphere_pad",
    "spmd",
]
