"""meshpar: any `torch.nn.Module` on a mesh of data x domain x tensor ranks, with the same numbers."""

from meshpar import layers, rules
from meshpar.accumulation import no_sync
from meshpar.agree import check_same_samples
from meshpar.autoplan import auto_plan
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
    ShareError,
    SpecError,
)
from meshpar.exchange import fetch
from meshpar.export import (
    Exported,
    LoadedHf,
    distributed_save_hf_checkpoint,
    export_hf,
    exported_state,
    load_hf,
)
from meshpar.layers import SpherePad2d, sphere_pad
from meshpar.materialize import materialize
from meshpar.mesh import (
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
from meshpar.planning import Plan, Rates, Search, plan, search
from meshpar.precision import Precision
from meshpar.reading import read_rows, read_sharded, shard_slices
from meshpar.record import Entry, Record, record
from meshpar.rewrite import rewrite
from meshpar.sampling import DataSampler, collate_or_empty, in_step
from meshpar.scope import spmd
from meshpar.share import NFSWorkspace, get_configs_parallel, get_tensors_parallel
from meshpar.showing import Explanation, Picture, explain, show
from meshpar.simulating import OnRank, Piece, Ranks, Simulation, simulate
from meshpar.spec import AXES, MeshSpec
from meshpar.testing.pool import RankError

__all__ = [
    "AXES",
    "EMA",
    "CheckpointError",
    "DataSampler",
    "Entry",
    "Explanation",
    "Exported",
    "GatherError",
    "GatherWarning",
    "Loaded",
    "LoadedHf",
    "MeshSpec",
    "MeshparError",
    "NFSWorkspace",
    "NonFiniteError",
    "OnRank",
    "PeerError",
    "Picture",
    "Piece",
    "Plan",
    "Precision",
    "RankError",
    "Ranks",
    "Rates",
    "Record",
    "Saved",
    "Saving",
    "Search",
    "ShardingError",
    "ShareError",
    "Simulation",
    "SpecError",
    "SpherePad2d",
    "auto_plan",
    "axis_group",
    "axis_ranks",
    "axis_size",
    "check_same_samples",
    "clip_grad_norm_",
    "collate_or_empty",
    "coordinate",
    "distributed_save_hf_checkpoint",
    "explain",
    "export_hf",
    "exported_state",
    "fetch",
    "full_state_dict",
    "gather",
    "get_configs_parallel",
    "get_tensors_parallel",
    "grad_norm",
    "in_step",
    "is_first",
    "is_last",
    "latest_checkpoint",
    "layers",
    "list_checkpoints",
    "load_checkpoint",
    "load_hf",
    "make_mesh",
    "materialize",
    "mesh_of",
    "neighbours",
    "no_sync",
    "parallelize",
    "parallelize_from_config",
    "plan",
    "read_rows",
    "read_sharded",
    "record",
    "replicas",
    "rewrite",
    "rules",
    "save_checkpoint",
    "search",
    "shard",
    "shard_batch",
    "shard_slices",
    "should_not_checkpoint",
    "show",
    "simulate",
    "sphere_pad",
    "spmd",
]
