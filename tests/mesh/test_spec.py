"""What a `MeshSpec` reads, refuses and resolves to."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshpar.errors import SpecError
from meshpar.spec import AXES, MeshSpec

SIZES = st.integers(1, 12)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("data=2,domain=4", (2, 4, 1)),
        ("domain=4,data=2", (2, 4, 1)),
        (" data = 2 ,\tdomain=4 , tensor = 3 ", (2, 4, 3)),
        ("tensor=2", (-1, 1, 2)),
        ("data=2,domain=-1", (2, -1, 1)),
        ("data=2,", (2, 1, 1)),
        ("", (-1, 1, 1)),
        ({"domain": 2}, (-1, 2, 1)),
        ({}, (-1, 1, 1)),
        ({"data": 1, "domain": 2, "tensor": -1}, (1, 2, -1)),
        (MeshSpec(3, 2, 1), (3, 2, 1)),
    ],
)
def test_parse_reads(text, sizes):
    spec = MeshSpec.parse(text)
    assert tuple(spec.sizes().values()) == sizes
    assert tuple(spec.sizes()) == AXES
    assert MeshSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("date=2", "unknown axis 'date'"),
        ("Data=2", "unknown axis 'Data'"),
        ({"rows": 2, "cols": 3}, "unknown axis 'cols'"),
        ({3: 4}, "unknown axis '3'"),
        ("data=2,data=2", "data named twice"),
        ("data=2,data=3", "data named twice"),
        ("data=0", "sizes not zero"),
        ({"data": 0}, "data=0"),
        ("domain=-2", "domain=-2"),
        ({"tensor": -7}, "tensor=-7"),
        ("data=-1,domain=-1", "one size of -1"),
        ("domain=-1", "one size of -1"),  # data is -1 unless named
        ({"data": -1, "tensor": -1}, "one size of -1"),
        ("data=2.0", "'data=2.0'"),
        ("data=two", "'data=two'"),
        ("data=", "'data='"),
        ("data", "'data'"),
        ("=2", "unknown axis ''"),
        ("data=2 domain=4", "parts like domain=4"),
        ("data=2;domain=4", "parts like domain=4"),
        ("2,4", "'2'"),
        ({"data": 2.0}, "data=2.0"),
        ({"data": True}, "data=True"),
        ({"domain": "2"}, "domain='2'"),
        ({"domain": None}, "domain=None"),
        (4, "a string, mapping or MeshSpec"),
        (None, "a string, mapping or MeshSpec"),
        ([("data", 2)], "a string, mapping or MeshSpec"),
    ],
)
def test_parse_refuses(text, says):
    with pytest.raises(SpecError) as caught:
        MeshSpec.parse(text)
    assert says in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert all(word in str(caught.value) for word in ("got:", "needs:", "fix:"))


def test_all_wrong_sizes_are_said_at_once():
    with pytest.raises(SpecError) as caught:
        MeshSpec(data=0, domain=-3, tensor=1.5)
    assert all(part in str(caught.value) for part in ("data=0", "domain=-3", "tensor=1.5"))


def test_a_spec_is_a_value():
    spec = MeshSpec(2, 4, 1)
    assert spec == MeshSpec.parse("data=2,domain=4")
    assert hash(spec) == hash(MeshSpec(2, 4, 1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.data = 3


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, SIZES, st.sampled_from((None, *AXES)))
def test_resolve_fills_in_the_open_size(data, domain, tensor, opened):
    sizes = dict(zip(AXES, (data, domain, tensor), strict=True))
    asked = {**sizes, opened: -1} if opened else sizes
    world = data * domain * tensor
    assert MeshSpec(**asked).resolve(world).sizes() == sizes


@settings(max_examples=100, deadline=None)
@given(SIZES, SIZES, SIZES, st.sampled_from((None, *AXES)), st.integers(1, 64))
def test_resolve_refuses_every_other_world_and_names_what_fits(data, domain, tensor, opened, world):
    sizes = {**dict(zip(AXES, (data, domain, tensor), strict=True)), **({opened: -1} if opened else {})}
    spec = MeshSpec(**sizes)
    known = math.prod(size for size in sizes.values() if size != -1)
    if world == known or (opened and world % known == 0):
        assert math.prod(spec.resolve(world).sizes().values()) == world
        return
    with pytest.raises(SpecError) as caught:
        spec.resolve(world)
    text = str(caught.value)
    assert all(f"{axis}={size}" in text for axis, size in sizes.items())
    assert f"the world has {world}" in text
    assert str(known) in text
    named = text.partition("one of ")[2].partition(";")[0].split(", ")
    assert named
    for fit in named:
        assert math.prod(MeshSpec.parse(fit).resolve(world).sizes().values()) == world


def test_the_nearest_specs_come_first():
    with pytest.raises(SpecError, match="one of data=2,domain=4,tensor=1"):
        MeshSpec(2, 3, 1).resolve(8)
    with pytest.raises(SpecError, match="one of data=1,domain=4,tensor=1, data=2,domain=2,tensor=1"):
        MeshSpec(domain=3).resolve(4)
    with pytest.raises(SpecError, match="or start a multiple of 3 ranks"):
        MeshSpec(domain=3).resolve(4)
    with pytest.raises(SpecError, match="or start 6 ranks"):
        MeshSpec(2, 3, 1).resolve(8)
