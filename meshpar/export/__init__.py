"""Hugging Face checkpoints, written and read without a gather."""

from meshpar.export.load import LoadedHf, load_hf
from meshpar.export.state import exported_state

__all__ = ["LoadedHf", "exported_state", "load_hf"]
