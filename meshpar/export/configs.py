"""The configuration of a model as a checkpoint has it beside the weights: `config.json`, `generation_config.json`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from meshpar.export.folder import new_file, write_all

_FILES = (("config", "config.json"), ("generation_config", "generation_config.json"))


def write_configs(model: Any, folder: Path) -> dict[str, int]:
    """Write the configurations that a model has, as it writes them itself; give the files and their sizes.

    Args:
        model: has a `config` that can write itself (`to_json_file`) or tell what it holds (`to_dict`), or none.
        folder: where they come.
    """
    model = getattr(model, "module", model) if not hasattr(model, "config") else model  # DistributedDataParallel
    found = {}
    for attribute, name in _FILES:
        config = getattr(model, attribute, None)
        text = None if config is None else _text(config, folder / f"{name}.of-the-model")
        if text is None:
            continue
        told = json.loads(text)
        if attribute == "config" and isinstance(told, dict) and not told.get("architectures"):
            told["architectures"] = [_architecture(type(model))]
            text = json.dumps(told, indent=2, sort_keys=True) + "\n"
        data = text.encode()
        with new_file(folder / name) as handle:
            write_all(handle, data, 0)
        found[name] = len(data)
    return found


def _text(config: Any, scratch: Path) -> str | None:
    if callable(getattr(config, "to_json_file", None)):
        config.to_json_file(os.fspath(scratch))
        text = scratch.read_text(encoding="utf-8")
        scratch.unlink()
        return text
    if callable(getattr(config, "to_dict", None)):
        return json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n"
    return None


def _architecture(cls: type) -> str:
    """Name the class of a model as its author did, not what sharding or rewriting has made of it."""
    for one in cls.__mro__:
        if not one.__module__.startswith(("torch.", "meshpar.")):
            return one.__name__
    return cls.__name__
