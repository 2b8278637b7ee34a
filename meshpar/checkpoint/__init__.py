"""Checkpoints: a training run in a folder, on any mesh; and the state dict of one process."""

from meshpar.checkpoint.folders import Saved, latest_checkpoint, list_checkpoints
from meshpar.checkpoint.full import full_state_dict
from meshpar.checkpoint.load import Loaded, load_checkpoint
from meshpar.checkpoint.save import Saving, save_checkpoint

__all__ = [
    "Loaded",
    "Saved",
    "Saving",
    "full_state_dict",
    "latest_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "save_checkpoint",
]
