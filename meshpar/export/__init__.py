"""Hugging Face checkpoints, written and read without a gather."""

from meshpar.export.save import Exported, export_hf

__all__ = ["Exported", "export_hf"]
