"""Hugging Face checkpoints from models that lie over ranks, and back, without a gather."""

from meshpar.export.state import exported_state

__all__ = ["exported_state"]
