"""The plan of files: sizes as text, the split of huggingface_hub, the bytes of safetensors."""

import json
import random

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save

from meshpar.errors import SpecError
from meshpar.export.plan import DTYPES, Entry, dtype_name, make_plan, size_in_bytes, torch_dtype

TORCH = [torch_dtype(name) for name, _, _ in DTYPES]


def entries_of(state):
    return [Entry(name, dtype_name(x.dtype), tuple(x.shape)) for name, x in state.items()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10GB", 10**10),
        ("5MB", 5_000_000),
        (" 1.5 KiB ", 1536),
        ("2TiB", 2**41),
        ("3tb", 3 * 10**12),
        ("1mib", 2**20),
        ("0.1GB", 10**8),
        ("4.3GB", int(4.3 * 10**9)),
        ("1000", 1000),
        ("12B", 12),
        (17, 17),
    ],
)
def test_sizes(text, expected):
    assert size_in_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    [0, -1, "0", "0GB", "-5GB", "GB", "", "5 apples", "5G", "5iB", "1e3MB", "infGB", "nan", 1.5, True, None, "0.1B"],
)
def test_sizes_that_are_none(text):
    with pytest.raises(SpecError, match="max_shard_size: no size"):
        size_in_bytes(text)


def drawn(chance):
    """Draw a state dict of meta tensors, and a size around those of its tensors."""
    state = {}
    for i in range(chance.choice([1, 1, 2, 3, 5, 8, 20, 60])):
        shape = [chance.choice([0, 1, 2, 3, 7, 16, 50]) for _ in range(chance.randrange(4))]
        dtype = chance.choice(TORCH if shape else TORCH[2:])
        state[chance.choice(["", "a.", "layers.3."]) + str(i)] = torch.empty(shape, dtype=dtype, device="meta")
    largest = max(x.numel() * x.element_size() for x in state.values())
    total = sum(x.numel() * x.element_size() for x in state.values())
    return state, chance.choice(
        [1, 2, largest, largest + 1, max(largest - 1, 1), 2 * largest, total, total // 3, "1KB", "5GB"]
    )


def compare(numbers):
    for number in numbers:
        chance = random.Random(number)
        state, size = drawn(chance)
        size = size or 1
        theirs = split_torch_state_dict_into_shards(state, max_shard_size=size)
        plan = make_plan(entries_of(state), size_in_bytes(size))
        assert [f.name for f in plan.files] == list(theirs.filename_to_tensors)
        for file in plan.files:
            assert sorted(p.entry.name for p in file.tensors) == sorted(theirs.filename_to_tensors[file.name])
        assert plan.total_bytes == theirs.metadata["total_size"]
        assert (plan.index is not None) == theirs.is_sharded
        if plan.index is not None:
            told = json.loads(plan.index)
            assert told == {"metadata": theirs.metadata, "weight_map": theirs.tensor_to_filename}
            assert list(told["weight_map"]) == sorted(told["weight_map"])


def test_the_split_of_300_drawn_state_dicts_is_that_of_huggingface_hub():
    compare(range(300))


def test_the_split_of_2000_drawn_state_dicts_is_that_of_huggingface_hub_property():
    compare(range(300, 2300))


def whole_file(file, state):
    data = bytearray(file.num_bytes)
    data[: len(file.header)] = file.header
    for placed in file.tensors:
        x = state[placed.entry.name]
        assert placed.offset % placed.entry.item_bytes == 0
        data[placed.offset : placed.offset + placed.entry.num_bytes] = bytes(x.reshape(-1).view(torch.uint8).tolist())
    return bytes(data)


def test_a_file_is_the_bytes_of_safetensors():
    torch.manual_seed(0)
    state = {}
    for i, dtype in enumerate(TORCH):
        for shape in [(), (0,), (3,), (2, 0, 3), (3, 5)]:
            if dtype is torch.float4_e2m1fn_x2 and not shape:
                continue
            item = torch.empty((), dtype=dtype).element_size()
            numbers = torch.randint(0, 2 if dtype is torch.bool else 256, (*(shape or (1,)), item), dtype=torch.uint8)
            x = numbers.view(dtype).squeeze(-1) if item > 1 else numbers.squeeze(-1).view(dtype)
            state[f"{'zyx'[i % 3]}.{i}.{len(shape)}.{shape[:1]}"] = x.reshape(shape)
    state |= {
        'quote " back \\ tab \t nul \x00 bell \x07 del \x7f': torch.ones(2),
        "é€😀/\u2028": torch.ones(3),
        "": torch.ones(1),
    }
    (file,) = make_plan(entries_of(state), 10**9).files
    assert whole_file(file, state) == save(state, metadata={"format": "pt"})


def test_no_tensors_are_a_file_all_the_same():
    (file,) = make_plan([], 10).files
    assert file.header == save({}, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["__metadata__", "lone \ud800 surrogate"])
def test_names_that_no_file_can_have(name):
    with pytest.raises(SpecError, match="names that a file cannot have"):
        make_plan([Entry(name, "F32", (1,))], 10)


def test_a_header_that_readers_refuse():
    entries = [Entry("n" * 50_000_000 + str(i), "F32", (1,)) for i in range(2)]
    with pytest.raises(SpecError, match=r"a header that readers refuse.*\n.*for 2 tensors of model.safetensors"):
        make_plan(entries, 10**9)
