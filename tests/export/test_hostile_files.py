"""Files that lie: every one is an error that says what is wrong with it, on all ranks, and the model is as it was."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from files import write
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

import meshpar
from meshpar.errors import CheckpointError
from meshpar.export import load_hf
from meshpar.export.headers import MAX_HEADER_BYTES, find_checkpoint
from meshpar.testing import RankError, mesh_for, run_ranks

GOOD = {
    "bias": {"dtype": "F32", "shape": [2], "data_offsets": [24, 32]},
    "weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
}


def changed(name: str, **changes) -> dict:
    told = json.loads(json.dumps(GOOD))
    told[name].update(changes)
    return told


def raw(header: dict | bytes, data: bytes = bytes(32), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def file_of(folder: Path, content: bytes) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    return path


HOSTILE = {
    "nothing": (b"", "0 bytes"),
    "seven bytes": (bytes(7), "7 bytes"),
    "no header": (bytes(8), "8 bytes, with a header of 0"),
    "a header longer than the file": (raw(GOOD, b"", 10**6), "with a header of 1000000"),
    "a header longer than any": (raw(GOOD, b"", 2**63), f"a header of at most {MAX_HEADER_BYTES} bytes"),
    "a short header": (raw(GOOD, bytes(32), 50), "JSONDecodeError"),
    "truncated": (raw(GOOD, bytes(31)), "175 bytes, of which 144 are the header and 32 belong to tensors"),
    "bytes at the end": (raw(GOOD, bytes(33)), "of which"),
    "no JSON": (raw(b"{]"), "JSONDecodeError"),
    "not UTF-8": (raw(b'{"a\xff": 1}'), "UnicodeDecodeError"),
    "a list": (raw(b"[1]"), "begin with b'['"),
    "a pickle": (pickle.dumps({"weight": 1}), "with a header of"),
    "deep": (raw(b'{"a":' * 100_000), "RecursionError"),
    "a number of a million digits": (raw(b'{"a":' + b"9" * 10**6 + b"}"), "ValueError"),
    "a name twice": (raw(b'{"weight": 1, "weight": 2}'), "a name that is there twice"),
    "metadata of numbers": (raw({"__metadata__": {"format": 1}, **GOOD}), "__metadata__ of other things than texts"),
    "metadata of a list": (raw({"__metadata__": [], **GOOD}), "__metadata__ of other things than texts"),
    "no object": (raw({**GOOD, "bias": 3}), "bias: not a dtype, a shape and data_offsets"),
    "no shape": (raw({**GOOD, "bias": {"dtype": "F32", "data_offsets": [24, 32]}}), "bias: not a dtype, a shape"),
    "more than is needed": (raw(changed("bias", code="import os")), "bias: not a dtype, a shape"),
    "unknown dtype": (raw(changed("bias", dtype="F33")), "bias: dtype 'F33'"),
    "dtype of torch": (raw(changed("bias", dtype="float32")), "bias: dtype 'float32'"),
    "dtype of a list": (raw(changed("bias", dtype=[])), "bias: dtype '[]'"),
    "negative shape": (raw(changed("bias", shape=[-2])), "bias: shape [-2]"),
    "shape of a float": (raw(changed("bias", shape=[2.0])), "bias: shape [2.0]"),
    "shape of a bool": (raw(changed("bias", shape=[True])), "bias: shape [True]"),
    "shape of a text": (raw(changed("bias", shape="2")), "bias: shape 2"),
    "huge shape": (raw(changed("bias", shape=[2**40, 2**40])), "takes"),
    "huge shape with a zero": (raw(changed("bias", shape=[2**64, 0])), "bias: shape"),
    "many dims": (raw(changed("bias", shape=[1] * 65)), "bias: shape"),
    "other size": (raw(changed("bias", shape=[3])), "bias: 8 bytes for (3,) of F32, which takes 12"),
    "other dtype": (raw(changed("bias", dtype="F64")), "bias: 8 bytes for (2,) of F64, which takes 16"),
    "half a byte": (raw(changed("bias", dtype="F4", shape=[15])), "fills no whole bytes"),
    "one offset": (raw(changed("bias", data_offsets=[24])), "bias: data_offsets [24]"),
    "negative offsets": (raw(changed("bias", data_offsets=[-8, 0])), "bias: data_offsets [-8, 0]"),
    "offsets backwards": (raw(changed("bias", data_offsets=[32, 24])), "bias: -8 bytes"),
    "overlap": (raw(changed("bias", data_offsets=[20, 28])), "bias: bytes 20 to 28, overlaps"),
    "twice the same bytes": (raw(changed("bias", data_offsets=[0, 8])), "overlaps what is before it"),
    "gap": (raw(changed("bias", data_offsets=[28, 36]), bytes(36)), "leaves a gap before it"),
    "beyond the end": (raw(changed("bias", data_offsets=[2**50, 2**50 + 8])), "leaves a gap before it"),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_each_hostile_file_says_what_is_wrong_with_it(how, tmp_path):
    content, text = HOSTILE[how]
    path = file_of(tmp_path, content)
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError) as caught:
        load_hf(model, tmp_path)
    assert text in str(caught.value)
    assert str(path) in str(caught.value)
    assert torch.equal(model.weight, before)
    if how not in ("a name twice", "metadata of a list", "more than is needed", "many dims"):  # they are more lenient
        with pytest.raises((SafetensorError, Exception)):
            load_file(path)


def test_the_good_file_is_good(tmp_path):
    path = file_of(tmp_path, raw(GOOD, torch.arange(8.0).view(torch.uint8).numpy().tobytes()))
    model = nn.Linear(3, 2)
    load_hf(model, tmp_path)
    assert torch.equal(model.weight, torch.arange(6.0).view(2, 3))
    assert torch.equal(model.bias, torch.tensor([6.0, 7.0]))
    assert load_file(path).keys() == {"weight", "bias"}
    for where in (path, str(path)):
        load_hf(nn.Linear(3, 2), where)


def test_empty_tensors_and_a_padded_header(tmp_path):
    told = {
        "a": {"dtype": "F32", "shape": [0, 3], "data_offsets": [0, 0]},
        "b": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        "c": {"dtype": "BF16", "shape": [2, 0], "data_offsets": [4, 4]},
    }
    file_of(tmp_path, raw(json.dumps(told).encode() + b"   ", bytes(4)))
    found = find_checkpoint(tmp_path).tensors
    assert {name: t.shape for name, t in found.items()} == {"a": (0, 3), "b": (), "c": (2, 0)}


def test_two_numbers_to_a_byte_are_counted_as_torch_counts(tmp_path):
    file_of(tmp_path, raw({"w": {"dtype": "F4", "shape": [2, 6], "data_offsets": [0, 6]}}, bytes(range(6))))
    assert find_checkpoint(tmp_path).tensors["w"].shape == (2, 3)
    model = nn.Module()
    model.register_buffer("w", torch.zeros(2, 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    load_hf(model, tmp_path)
    assert model.w.view(torch.uint8).flatten().tolist() == list(range(6))


# ---- folders and indices


def test_folders_without_a_checkpoint(tmp_path):
    model = nn.Linear(3, 2)
    for make, text in (
        (lambda path: None, "no such folder"),
        (lambda path: path.mkdir(), "nothing in it"),
        (lambda path: (path / "config.json").write_text("{}"), "1 other entries, e.g. ['config.json']"),
        (lambda path: [write(path / n, {"w": torch.ones(1)}) for n in "ab"], "3 other entries"),
    ):
        make(tmp_path / "run")
        with pytest.raises(CheckpointError) as caught:
            load_hf(model, tmp_path / "run")
        assert text in str(caught.value)
    for name in "ab":
        shutil.copy(tmp_path / "run" / name / "model.safetensors", tmp_path / "run" / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="2 files and no index"):
        load_hf(model, tmp_path / "run")
    (tmp_path / "run" / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match="w: "):  # one file of any name is the checkpoint
        load_hf(model, tmp_path / "run")


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (b"{", "JSONDecodeError"),
        (b"[]", "a list"),
        (b"{}", "no weight_map"),
        (b'{"weight_map": []}', "no weight_map"),
        (b'{"weight_map": {}}', "no weight_map"),
        (b'{"weight_map": {"weight": 3}}', "'weight': 3"),
        (b'{"weight_map": {"weight": "../model.safetensors"}}', "'weight': '../model.safetensors'"),
        (b'{"weight_map": {"weight": "/etc/passwd"}}', "'weight': '/etc/passwd'"),
        (b'{"weight_map": {"weight": ".."}}', "'weight': '..'"),
        (b'{"weight_map": {"weight": ""}}', "'weight': ''"),
        (b'{"weight_map": {"weight": "a\\u0000"}}', "'weight':"),
        (b'{"weight_map": {"weight": "none.safetensors"}}', "none.safetensors: missing"),
        (b'{"weight_map": {"weight": "a.safetensors", "more": "a.safetensors"}}', "more: not in a.safetensors"),
        (b'{"weight_map": {"weight": "a.safetensors"}}', "bias: in a.safetensors, not in the index"),
    ],
)
def test_each_hostile_index(told, text, tmp_path):
    write(tmp_path, nn.Linear(3, 2).state_dict())
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_bytes(told)
    with pytest.raises(CheckpointError) as caught:
        load_hf(nn.Linear(3, 2), tmp_path)
    assert text in str(caught.value)
    assert INDEX in str(caught.value)


def test_a_file_beside_an_index_of_other_files_is_a_mix(tmp_path):
    write(tmp_path, nn.Linear(3, 2).state_dict(), 2)
    load_hf(nn.Linear(3, 2), tmp_path)
    load_hf(nn.Linear(3, 2), tmp_path / INDEX)
    write(tmp_path, nn.Linear(3, 2).state_dict())
    with pytest.raises(CheckpointError, match="which checkpoint"):
        load_hf(nn.Linear(3, 2), tmp_path)
    load_hf(nn.Linear(3, 2), tmp_path / "model.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(["weight", "bias"], "model.safetensors")}))
    load_hf(nn.Linear(3, 2), tmp_path)  # an index of that file is no other checkpoint


# ---- on ranks


def on_ranks(folder: str, *, meta: bool) -> None:
    with torch.device("meta" if meta else "cpu"):
        net = nn.Linear(3, 2)
    model = meshpar.parallelize(net, mesh_for("data=1,domain=2"))
    try:
        load_hf(model, folder)
    finally:
        assert all(p.is_meta == meta for p in model.parameters())


def test_a_damaged_file_is_one_error_on_all_ranks(tmp_path):
    file_of(tmp_path, HOSTILE["overlap"][0])
    for meta in (False, True):
        with pytest.raises(RankError) as caught:
            run_ranks(on_ranks, 2, str(tmp_path), meta=meta)
        errors = caught.value.exceptions
        assert len({str(e) for e in errors.values()}) == 1
        assert {type(e) for e in errors.values()} == {CheckpointError}
        assert len(errors) == 2


def cut_short(folder: str, *, meta: bool) -> None:
    """The file is cut while it is read, on one rank: after the headers were."""
    real = os.preadv
    path = f"{folder}/model.safetensors"

    def preadv(handle, buffers, at):
        if torch.distributed.get_rank() == 1:
            os.truncate(path, os.path.getsize(path) - 4)
        return real(handle, buffers, at)

    os.preadv = preadv
    try:
        on_ranks(folder, meta=meta)
    finally:
        os.preadv = real


def test_a_file_that_is_cut_while_it_is_read(tmp_path):
    for meta in (False, True):
        write(tmp_path, nn.Linear(3, 2).state_dict())
        with pytest.raises(RankError) as caught:
            run_ranks(cut_short, 2, str(tmp_path), meta=meta)
        errors = caught.value.exceptions
        assert len(errors) == 2
        assert all("ends at byte" in str(e) for e in errors.values())
        assert {type(e) for e in errors.values()} == {CheckpointError}
