"""Checkpoints to read in tests: written by `safetensors` itself, on one process."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


def write(folder: str | Path, tensors: dict[str, Tensor], num_files: int = 1) -> Path:
    """Write tensors into one file, or into several with an index, in turns."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: value.detach().clone().contiguous() for name, value in tensors.items()}
    if num_files == 1:
        save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    files = [f"model-{i + 1:05d}-of-{num_files:05d}.safetensors" for i in range(num_files)]
    weight_map = {name: files[i % num_files] for i, name in enumerate(own)}
    for file in files:
        save_file({n: v for n, v in own.items() if weight_map[n] == file}, folder / file, metadata={"format": "pt"})
    total = sum(v.numel() * v.element_size() for v in own.values())
    told = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(told))
    return folder


def write_model(folder: str | Path, net: nn.Module, num_files: int = 1) -> Path:
    """Write a model, each tensor once."""
    seen: set[int] = set()
    tensors = {}
    for name, value in net.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            tensors[name] = value
        seen.add(id(value))
    return write(folder, tensors, num_files)


def numbered(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Make a tensor whose bytes differ from each other as far as they can, of any dtype."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    data = (torch.arange(num_bytes) * 37 + 11) % 251
    if dtype == torch.bool:
        data = data % 2
    return data.to(torch.uint8).view(dtype).view(shape)
