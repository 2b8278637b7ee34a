"""Batches as they come: every tensor of any tree is cut, everything else passes, and nothing is lost in silence."""

import collections
import copy
import dataclasses
import datetime
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, default_collate

import meshpar
from meshpar.testing import RankError, mesh_for, run_ranks

MESH = "data=2,domain=2"
TENSOR = "data=2,domain=1,tensor=2"


class Pair(NamedTuple):
    """A named tuple."""

    image: torch.Tensor
    name: str


@dataclasses.dataclass(frozen=True)
class Sample:
    """A frozen dataclass."""

    image: torch.Tensor
    name: str = "a"
    more: Any = None


@dataclasses.dataclass
class Slotted:
    """A dataclass with slots, one of them empty."""

    __slots__ = ("image", "other")
    image: torch.Tensor
    other: Any


class Encoding(collections.UserDict):
    """What tokenizers give: a mapping that is no dict, with more attributes."""

    def __init__(self, data=None, encodings=None):
        super().__init__(data)
        self.encodings = encodings


class Named(dict):
    """A dict with an attribute."""

    note = ""


class Items(list):
    """A list of its own."""


class Duo(tuple):
    """A tuple of its own."""


def x_of() -> torch.Tensor:
    return torch.arange(80.0).view(2, 2, 5, 4)


def trees() -> dict[str, Any]:
    named = Named(image=x_of())
    named.note = "kept"
    return {
        "dict": {"image": x_of(), "name": "a"},
        "ordered": collections.OrderedDict(image=x_of()),
        "default": collections.defaultdict(list, image=x_of()),
        "user dict": Encoding({"image": x_of()}, encodings="kept"),
        "dict subclass": named,
        "proxy": types.MappingProxyType({"image": x_of()}),
        "named tuple": Pair(x_of(), "a"),
        "dataclass": Sample(x_of(), "a", {"deep": [x_of()]}),
        "slots": Slotted(x_of(), None),
        "list subclass": Items([x_of(), "a"]),
        "tuple subclass": Duo([x_of(), "a"]),
        "deque": collections.deque([x_of(), 3]),
        "nested": [{"a": (Encoding({"image": x_of()}), Items([Sample(x_of())]))}, []],
    }


def tensors_of(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    meshpar.trees.map_tensors(found.append, tree)
    return found


def same_structure(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if dataclasses.is_dataclass(a):
        for item in dataclasses.fields(a):
            same_structure(getattr(a, item.name), getattr(b, item.name))
    elif isinstance(a, collections.abc.Mapping):
        assert list(a) == list(b)
        for key in a:
            same_structure(a[key], b[key])
        if isinstance(a, Encoding):
            assert a.encodings == b.encodings
        if isinstance(a, Named):
            assert a.note == b.note
        if isinstance(a, collections.defaultdict):
            assert a.default_factory is b.default_factory
    elif isinstance(a, list | tuple | collections.deque):
        assert len(a) == len(b)
        for i, j in zip(a, b, strict=True):
            same_structure(i, j)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


def in_and_out(layouts: bool) -> None:
    """Cut each tree and gather it again: the batch of two data ranks; the tree that was given is as it was."""
    mesh = mesh_for(MESH)
    for name, tree in trees().items():
        before = copy.deepcopy(tree) if name != "proxy" else types.MappingProxyType(dict(tree))
        layout = {"image": "data domain _ _"} if layouts and hasattr(tree, "items") else None
        placed = meshpar.shard_batch(tree, mesh, layout)
        same_structure(tree, before)
        assert type(placed) is type(tree)
        assert all(isinstance(x, DTensor) and x.shape == (4, 2, 5, 4) for x in tensors_of(placed)), name
        if layout:
            assert placed["image"].placements[1].dim == 1
        whole = meshpar.gather(placed)
        same_structure(meshpar.trees.map_tensors(lambda x: x[:2], whole), before)
        assert all(torch.equal(x[2:], x_of()) for x in tensors_of(whole))


@pytest.mark.parametrize("layouts", [False, True])
def test_trees_of_every_kind_are_cut_and_gathered_and_not_touched(layouts):
    run_ranks(in_and_out, 4, layouts)


def layouts_by_field() -> None:
    mesh = mesh_for(MESH)
    placed = meshpar.shard_batch(
        Sample(x_of(), more=[x_of()]), mesh, {"image": "data domain _ _", "more": ["data _ _ domain"]}
    )
    assert placed.image.placements[1].dim == 1
    assert placed.more[0].placements[1].dim == 3
    placed = meshpar.shard_batch(Pair(x_of(), "a"), mesh, {"image": "data domain _ _"})
    assert placed.image.placements[1].dim == 1
    for tree, layout in ((Sample(x_of()), {"picture": "_"}), (Pair(x_of(), "a"), ("_",)), (x_of(), {"a": "_"})):
        with pytest.raises(meshpar.SpecError, match="layout"):
            meshpar.shard_batch(tree, mesh, layout)


def test_layouts_go_by_fields_of_dataclasses_and_named_tuples():
    run_ranks(layouts_by_field, 4)


PASSING = {
    "number": 3,
    "float": 0.5,
    "flag": True,
    "none": None,
    "text": "2099-01-01",
    "bytes": b"raw",
    "texts": ["a", "b"],
    "date": datetime.datetime(2099, 1, 1),
    "span": datetime.timedelta(hours=6),
    "time": np.datetime64("2099-01-01T00"),
    "times": np.array(["2099-01-01", "2099-01-02"], dtype="datetime64[D]"),
    "names": np.array(["a", "b"]),
    "objects": np.array([None, "x"], dtype=object),
    "scalar": np.float32(2.5),
    "point": np.array(2.5),
    "range": range(3),
    "slice": slice(0, 2),
    "set": {1, 2},
    "dtype": torch.float16,
    "device": torch.device("cpu"),
    "size": torch.Size([2, 3]),
}


class Reading(nn.Module):
    """Give back what came with the image, and use a number of it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, image: torch.Tensor, **meta: Any) -> Any:
        return self.conv(image) * meta["number"], meta


def passing() -> None:
    mesh = mesh_for(MESH)
    placed = meshpar.shard_batch({"image": x_of(), **PASSING}, mesh)
    assert all(placed[name] is value for name, value in PASSING.items())
    model = meshpar.parallelize(Reading(), mesh)
    y, meta = model(x_of(), **PASSING)
    assert y.shape == (4, 1, 5, 4)
    assert all(meta[name] is value for name, value in PASSING.items())


def test_what_is_no_tensor_passes_as_it_is():
    run_ranks(passing, 4)


class Hidden:
    """An object that holds what it is given."""

    def __init__(self, x: Any) -> None:
        self.x = x


class HiddenInSlots:
    """One without a __dict__."""

    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


class Sealed(collections.abc.Mapping):
    """A mapping that cannot be made from a dict."""

    def __init__(self) -> None:
        self.x = x_of()

    def __getitem__(self, key):
        return {"x": self.x}[key]

    def __iter__(self):
        return iter(["x"])

    def __len__(self):
        return 1


REFUSED = {
    "array": (lambda: np.zeros((2, 3)), r"\['it'\]: an array that is no tensor(.|\n)*ndarray \(2, 3\) float64"),
    "flags": (lambda: np.zeros(2, dtype=bool), "an array that is no tensor"),
    "memory map like": (lambda: np.zeros((2, 3)).view(np.recarray), "an array that is no tensor"),
    "packed": (
        lambda: nn.utils.rnn.pack_sequence([torch.zeros(3, 1), torch.zeros(2, 1)]),
        "PackedSequence(.|\n)*pad it",
    ),
    "hidden": (lambda: Hidden(x_of()), r"holds \['x'\]"),
    "hidden list": (lambda: Hidden([{"a": x_of()}]), r"holds \['x'\]"),
    "slots": (lambda: HiddenInSlots(x_of()), r"holds \['x'\]"),
    "set": (lambda: {x_of()}, "a tensor"),
    "generator": (lambda: (x for x in [x_of()]), "only once"),
    "zip": (lambda: zip([x_of()], [1], strict=True), "only once"),
    "sealed": (Sealed, "cannot be built from its values"),
    "sparse": (lambda: torch.eye(4).to_sparse(), r"layout torch.sparse_coo(.|\n)*to_dense"),
    "csr": (lambda: sparse_csr(), "layout torch.sparse_csr"),
    "nested": (lambda: nested(), "a nested tensor"),
    "quantized": (lambda: quantized(), "a quantized tensor"),
}


def sparse_csr():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(4).to_sparse_csr()


def nested():
    return torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)], layout=torch.jagged)


def quantized():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.zeros(2, 3), 0.1, 0, torch.qint8)


def refused(name: str, through_model: bool) -> None:
    make, _ = REFUSED[name]
    mesh = mesh_for(MESH)
    if through_model:
        meshpar.parallelize(Reading(), mesh)(x_of(), number=1, it=make())
    else:
        meshpar.shard_batch({"image": x_of(), "it": make()}, mesh)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("through_model", [False, True])
def test_what_no_rank_would_cut_is_refused_on_all(name, through_model):
    with pytest.raises(RankError) as caught:
        run_ranks(refused, 4, name, through_model)
    assert len(caught.value.exceptions) == 4
    text = REFUSED[name][1].replace(r"\['it'\]", "it" if through_model else r"\['it'\]")
    for error in caught.value.exceptions.values():
        assert isinstance(error, meshpar.SpecError)
    with pytest.raises(meshpar.SpecError, match=text):
        raise caught.value.exceptions[0]


def other_structures(spec: str, kind: str) -> None:
    """Rank 3 gives another batch than the others."""
    mesh = mesh_for(spec)
    model = meshpar.parallelize(Reading(), mesh)
    odd = torch.distributed.get_rank() == 3
    image = x_of()
    meta: dict[str, Any] = {"number": 1, "extra": None if odd and kind == "fewer" else x_of()}
    if odd and kind == "dtype":
        image = image.double()
    if odd and kind == "dims":
        meta["extra"] = x_of()[0]
    if odd and kind == "columns":
        image = image[..., :3]
    model(image, **meta)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("fewer", r"2 tensors on rank 0; other ones on ranks \[3\]: 1 on rank 3"),
        ("dtype", r"other ones on ranks \[3\]"),
        ("dims", r"other ones on ranks \[3\]"),
        ("columns", r"image: shape \(2, 2, 5, 4\) on rank 0\n *image: shape \(2, 2, 5, 3\) on rank 3"),
    ],
)
@pytest.mark.parametrize("spec", [MESH, TENSOR])
def test_a_batch_of_another_structure_on_one_rank_is_refused_on_all(spec, kind, text):
    with pytest.raises(RankError) as caught:
        run_ranks(other_structures, 4, spec, kind)
    assert len(caught.value.exceptions) == 4
    with pytest.raises(meshpar.SpecError, match=text):
        raise caught.value.exceptions[1]


def one_refuses(check: bool) -> str:
    """Rank 3 alone is given an array; it says so, and the others do not wait for it."""
    mesh = mesh_for(MESH)
    model = meshpar.parallelize(Reading(), mesh, check_inputs=check)
    image = x_of().numpy() if torch.distributed.get_rank() == 3 else x_of()
    with pytest.raises(meshpar.MeshparError) as caught:
        model(image, number=1)
    return str(caught.value)


@pytest.mark.parametrize("check", [False, True])
def test_what_one_rank_refuses_is_an_error_on_all(check):
    *others, told = run_ranks(one_refuses, 4, check, timeout_s=20)
    assert "image: an array that is no tensor" in told
    for text in others:
        assert ("ranks that should hold the same samples" if check else r"rank(s) [3] refused") in text


def many_tensors() -> None:
    """More dims than the one message has room for."""
    mesh = mesh_for(MESH)
    batch = {str(i): torch.full((2, 1, 5, 1 + i), float(i)) for i in range(9)}
    with meshpar.record() as log:
        placed = meshpar.shard_batch(batch, mesh)
    assert [tuple(placed[str(i)].shape) for i in range(9)] == [(4, 1, 5, 1 + i) for i in range(9)]
    assert len(log.select(kind="batch")) == 2
    with meshpar.record() as log:
        meshpar.shard_batch({"a": x_of(), "b": x_of(), "c": x_of()}, mesh)
    assert [(e.axis, e.num_bytes) for e in log.select(kind="batch")] == [("mesh", 256 * 3)]


def test_all_shapes_of_a_batch_travel_in_one_message():
    run_ranks(many_tensors, 4)


def collated() -> None:
    """What torch's default collate makes of samples, with and without workers."""
    mesh = mesh_for(MESH)
    samples = [
        {"image": x_of()[0].numpy(), "label": i, "weight": 0.5 * i, "name": f"s{i}", "pair": (i, torch.ones(3) * i)}
        for i in range(4)
    ]
    for workers in (0, 1):
        for batch in DataLoader(samples, batch_size=2, num_workers=workers):
            placed = meshpar.shard_batch(batch, mesh)
            assert placed["image"].shape == (4, 2, 5, 4)
            assert placed["label"].shape == placed["weight"].shape == (4,)
            assert placed["label"].dtype == torch.int64
            assert placed["weight"].dtype == torch.float64
            assert placed["pair"][1].shape == (4, 3)
            assert placed["name"] == batch["name"]
    assert default_collate(["a", "b"]) == meshpar.shard_batch(default_collate(["a", "b"]), mesh)


def test_the_default_collate():
    run_ranks(collated, 4)
