"""Which tests the README's command leaves to `pytest -m slow`, which `.ci/run` runs as well.

The drawn layers of `rules/test_layers.py` and every explicit case stay in the quick run; the drawn cases of single
families, the exhaustive lists of functions, and the scenes with dying processes come in the slow one.
"""

import pytest

SLOW_FILES = (
    *("test_reduce.py", "test_moments.py", "test_pointwise.py", "test_shortcut.py"),
    *("test_dead_peers.py", "test_rank_pool.py", "test_guard.py"),
    "test_compile.py",
)
SLOW_NAMES = (
    "equals_one_process",
    "property",
    "any_loss",
    "any_norm",
    "groups",
    "brute_force",
    "opcheck",
    "loss_curve",
    "twenty_steps",
    "needs_no_launcher",
    "field_25",
    "two_sharded_dims",
    "coverage_page",
)
QUICK_NAMES = ("drawn_layers", "same_function")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        drawn = any(part in item.name for part in SLOW_NAMES) and not any(part in item.name for part in QUICK_NAMES)
        if (drawn or item.path.name in SLOW_FILES) and item.get_closest_marker("long") is None:
            item.add_marker(pytest.mark.slow)
