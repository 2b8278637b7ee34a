"""Drawn norms: kinds, sizes, layouts; each equals one process."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from norm_cases import CROSSED, LAYOUTS, RANKS, check_norm

from meshpar.testing import run_ranks


@st.composite
def cases(draw, spec, largest):
    kind = draw(st.sampled_from(["group", "instance", "batch", "layer", "rms"]))
    num_dims = draw(st.sampled_from([4, 4, 4, 3, 5] if spec != CROSSED else [4]))
    shape = [draw(st.integers(1, 5)) for _ in range(num_dims)]
    given = {"eps": draw(st.sampled_from([1e-5, 1e-2, 1e-14]))}
    if kind == "group":
        given["groups"] = draw(st.integers(1, 3))
        shape[1] = given["groups"] * draw(st.integers(1, 3))
    for dim in range(2, num_dims):
        shape[dim] = draw(st.integers(1, largest))
    if kind in ("layer", "rms"):
        given["dims"] = draw(st.integers(1, num_dims - 1))
    if kind == "rms":
        given["eps"] = draw(st.sampled_from([None, 1e-5]))
    if kind in ("instance", "batch"):
        given["tracked"] = draw(st.booleans())
        given["training"] = draw(st.booleans()) or not given["tracked"]
        given["momentum"] = draw(st.sampled_from([0.1, 0.0, 1.0]))
    num_weights = draw(st.integers(0, 1 if kind == "rms" else 2))
    layout = LAYOUTS[num_dims]
    if spec == CROSSED:
        layout = draw(st.sampled_from(["_ _ domain tensor", "_ tensor domain _"][: 1 if kind == "group" else 2]))
    form = draw(st.sampled_from([None, "channels_last"])) if num_dims == 4 else None
    return kind, tuple(shape), given, layout, num_weights, draw(st.integers(0, 99)), form


@st.composite
def batches(draw, num, largest):
    """Draw a mesh and several cases for it: a call of the ranks costs more than a case."""
    spec = draw(st.sampled_from([*RANKS, CROSSED]))
    return spec, draw(st.lists(cases(spec, largest), min_size=1, max_size=num))


def check_norms(spec, drawn):
    for case in drawn:
        try:
            check_norm(spec, *case)
        except BaseException as error:
            error.add_note(f"in the case {case}")
            raise


def run_batch(batch):
    run_ranks(check_norms, RANKS.get(batch[0], 4), *batch)


ANY = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=25, **ANY)
@given(batches(12, largest=7))
def test_any_norm(batch):
    run_batch(batch)


@pytest.mark.long
@settings(max_examples=150, **ANY)
@given(batches(20, largest=40))
def test_any_norm_long(batch):
    run_batch(batch)
