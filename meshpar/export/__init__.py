"""Hugging Face checkpoints, written and read without a gather."""

from meshpar.export.load import LoadedHf, load_hf
from meshpar.export.modelopt import distributed_save_hf_checkpoint
from meshpar.export.save import Exported, export_hf
from meshpar.export.state import exported_state

__all__ = ["Exported", "LoadedHf", "distributed_save_hf_checkpoint", "export_hf", "exported_state", "load_hf"]
