"""Which tests the README's command leaves to `pytest -m slow`, which `.ci/run` runs as well.

The drawn layers of `rules/test_layers.py` (all families), convolutions, pools and norms, exchanges, records, sabotage
and some whole networks stay in the quick run, which must end in two minutes or so; the other families, drawn cases,
exhaustive lists of functions, compilation, and the scenes with dying processes come in the slow one.
"""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

SLOW_FILES = (
    *("test_reduce.py", "test_moments.py", "test_pointwise.py", "test_pointwise_writing.py", "test_shortcut.py"),
    *("test_dead_peers.py", "test_rank_pool.py", "test_guard.py"),
    *(
        "test_compile.py",
        "test_integration.py",
        "test_attention.py",
        "test_attention_drawn.py",
        "test_multihead.py",
        "test_contract.py",
        "test_lookup.py",
    ),
    *(
        "test_patches.py",
        "test_recurrent.py",
        "test_dropout.py",
        "test_sample.py",
        "test_fft.py",
        "test_along.py",
        "test_differences.py",
    ),
    *("test_matrices.py", "test_factory.py", "test_layers_sphere.py", "test_parts.py", "test_index.py", "test_join.py"),
    *("test_view.py", "test_views.py", "test_reshape.py", "test_domain_axes.py", "test_field_composition.py"),
    *("test_users.py", "test_random.py", "test_pad.py", "test_resample.py", "test_loss.py", "test_adaptive.py"),
    "test_killed.py",
    *("test_reading.py", "test_forecast_zarr.py", "test_same_samples.py", "test_sampler.py"),
    *("test_data_modes.py", "test_precision.py", "test_units.py", "test_materialize.py", "test_recompute.py"),
    *("test_accumulation.py", "test_clip.py", "test_optimizers.py", "test_chain.py", "test_runs.py", "test_hostile.py"),
    *("test_shares.py", "test_compact.py", "test_lost.py", "test_killed_peers.py", "test_two_hosts.py"),
    *("test_measured.py", "test_misuse.py"),
    *("test_load.py", "test_load_misfits.py", "test_modelopt.py"),
    *("test_byte_runs.py", "test_export_hostile.py", "test_killed_export.py", "test_pages.py"),
    *("test_notebooks.py", "test_simulated_ranks.py"),
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
    "thirty_steps",
    "needs_no_launcher",
    "field_25",
    "two_sharded_dims",
    "coverage_page",
    "rows_and_columns_merge",
    "dtype_form_and_mode",
    "hard_sizes",
    "policy_by_hand",
    "computed_unrounded",
    "running_statistics_stay",
    "bits_of_the_hand",
    "plain_files_load",
    "split_over_tensor",
    "two_parts_share",
    "peak_memory_of_a_rank",
    "chain_of_meshes",
    "over_the_tensor_axis",
    "values_of_one_process",
    "later_updates",
    "gradients_of_gradients",
    "generators_go_on",
    "two_epochs_are",
    "resumes_in_the_middle",
    "does_not_come",
    "the_default_collate",
    "two_ranks_under_torchrun",
    "start_two_ranks_and",
    "axes_of_two_ranks",
    "raises_in_the_block",
    "small_dev_shm",
    "half_a_file",
    "shared_memory_does_not_reach",
    "runs_under_torchrun",
    *("odd_tensors_keep", "more_than_142", "options_change_the_plan", "search_ranks", "that_is_found_gives"),
    *("ranks_that_do_not_come_are_said", "scales_that_lie_over_ranks"),
    "ties_that_lie_apart",
    *("two_equal_curves", "curves_that_differ"),
)
QUICK_NAMES = (
    *(
        "side_by_side_are_one_call",
        "does_not_fit_is_named",
        "one_name_of_a_tie",
        "from_one_layout_to_another[meshpar-ful",
    ),
    *("drawn_layers", "same_function", "fewer_bytes_are_kept", "a_mix_of_plain_and_all_meshes"),
    *("rows_that_do_not_divide", "values_from_a_checkpoint", "three_small_batches", "further_objects_reshard"),
)
SLOW_CASES = (
    *("one row on a rank", "empty_tensors[3]", "empty_tensors[5]", "empty_tensors[7]", "empty_tensors[9]"),
    *("a_gather[unet-data=1,domain=3", "a_gather[unet-data=4", "windows_need[37-data=1", "windows_need[13-data=2"),
    *("field_40_spectral", "transformers_are_the_same", "round_trips_from_one", "batch[data=2,domain=2]"),
    *("further_objects_reshard", "header_that_readers_refuse", "empty[data=1,domain=2,tensor=2]"),
    *("quickly[swin]", "quickly[diffusion]", "quickly[sfno]", "every_rank_holds_a_quarter", "that_is_alone_plans"),
)
"""Cases of tests that are quick but for these."""


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """Let no test leave a group behind in this process: the checkers would take it for a rank of a job."""
    yield
    left = dist.is_initialized()
    if left:
        dist.destroy_process_group()  # one test fails, not all that follow
    assert not left


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        drawn = any(part in item.name for part in SLOW_NAMES) or item.path.name in SLOW_FILES
        quick = any(part in item.name for part in QUICK_NAMES)
        own_command = any(item.get_closest_marker(name) for name in ("long", "thirdparty"))
        case = any(part in item.name for part in SLOW_CASES)
        if ((drawn and not quick) or case) and not own_command:
            item.add_marker(pytest.mark.slow)
