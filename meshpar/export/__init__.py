"""Hugging Face checkpoints, written and read without a gather."""
