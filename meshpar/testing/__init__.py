"""For tests: ranks that stay alive, and the checkers of equality with one process."""

from meshpar.testing.equivalence import Difference, Report, assert_same
from meshpar.testing.meshes import mesh_for
from meshpar.testing.models import assert_equivalent
from meshpar.testing.pool import RankError, run_ranks, shutdown_pool

__all__ = [
    "Difference",
    "RankError",
    "Report",
    "assert_equivalent",
    "assert_same",
    "mesh_for",
    "run_ranks",
    "shutdown_pool",
]
