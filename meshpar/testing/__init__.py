"""Test sharded models: run a function on real ranks."""

from meshpar.testing.pool import RankError, run_ranks, shutdown_pool

__all__ = ["RankError", "run_ranks", "shutdown_pool"]
