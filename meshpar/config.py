"""Configurations of trainers: what `trainer.parallelism`, and the older `trainer.mode`, ask for.

Invariant: pure reading. A key or a value that is not known is an error that names the nearest known one; nothing that
the user wrote about parallelism is left unread.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from meshpar.errors import SpecError, explain

DATA_MODES = {"fsdp2": "fsdp", "fsdp": "fsdp", "ddp": "ddp", "hsdp": "hsdp", "none": "none"}
"""What `trainer.parallelism.data` may say, and the `data=` of `parallelize` that it stands for."""

DISTRIBUTED_MODES = ("fsdp", "fsdp2", "ddp", "domain_parallel", "fsdp+domain_parallel")
"""What the older `trainer.mode` may say; "none", or nothing, is one process."""

_NEW_KEYS = ("data", "tensor", "domain", "replica")
_OLD_KEYS = ("mode", "domain_parallel_size")


@dataclass(frozen=True)
class Choice:
    """Hold what a configuration asks for.

    Args:
        data: mode of `parallelize`.
        domain: ranks that share out the rows of a sample, -1 for all that there are.
        tensor: ranks that share out the channels of a layer.
        data_size: ranks that share out the batch, -1 for the rest.
        replica: copies of the parameters, for `data="hsdp"`.
    """

    data: str
    domain: int = 1
    tensor: int = 1
    data_size: int = -1
    replica: int = 1


def read_config(conf: Mapping[str, Any]) -> Choice:
    """Read a configuration in either form.

    Args:
        conf: the whole configuration, with a section `trainer`, or that section. Either
            `parallelism: {data: fsdp2|fsdp|ddp|hsdp|none, tensor: n, domain: n, replica: n}`, or the older
            `mode: fsdp|fsdp2|ddp|domain_parallel|fsdp+domain_parallel` with `domain_parallel_size: n`. Other keys of
            the trainer are not looked at, unless they look like a misspelt one of these.

    Raises:
        SpecError: an unknown or misspelt key or value, both forms at once, or neither.

    Example:
        >>> read_config({"trainer": {"parallelism": {"data": "ddp", "domain": 4}}})
        Choice(data='ddp', domain=4, tensor=1, data_size=-1, replica=1)
        >>> read_config({"mode": "fsdp+domain_parallel", "domain_parallel_size": 2})
        Choice(data='fsdp', domain=2, tensor=1, data_size=-1, replica=1)
    """
    trainer = _section(conf, "the configuration")
    if "trainer" in trainer:
        misplaced = [key for key in ("parallelism", *_OLD_KEYS) if key in trainer]
        if misplaced:
            _refuse([f"{key} beside trainer" for key in misplaced], "them in the section trainer", "move them there")
        trainer = _section(trainer["trainer"], "trainer")
    _refuse_misspelt(trainer)
    new, old = "parallelism" in trainer, [key for key in _OLD_KEYS if key in trainer]
    if new and old:
        _refuse([f"trainer.parallelism and trainer.{key}" for key in old], "one of the two forms", "keep parallelism")
    if new:
        return _read_new(_section(trainer["parallelism"], "trainer.parallelism"))
    if old:
        return _read_old(trainer)
    _refuse("neither trainer.parallelism nor trainer.mode", "one of them", "parallelism: {data: fsdp2, domain: 1}")


def _read_new(section: Mapping[str, Any]) -> Choice:
    unknown = [f"trainer.parallelism.{key}{_near(key, _NEW_KEYS)}" for key in section if key not in _NEW_KEYS]
    if unknown:
        _refuse(unknown, f"keys out of {', '.join(_NEW_KEYS)}", "rename or drop it")
    sizes = {key: _size(section[key], f"trainer.parallelism.{key}") for key in _NEW_KEYS[1:] if key in section}
    return Choice(_mode(section.get("data", "fsdp2"), "trainer.parallelism.data", DATA_MODES), **sizes)


def _read_old(trainer: Mapping[str, Any]) -> Choice:
    asked = trainer.get("mode", "none")
    mode = _mode(asked, "trainer.mode", {m: m for m in (*DISTRIBUTED_MODES, "none")})
    size = trainer.get("domain_parallel_size")
    with_domain = "domain_parallel" in mode
    if size is not None and not with_domain and size != 1:
        fix = f'mode: "fsdp+domain_parallel"; or domain_parallel_size: 1 for {mode}'
        _refuse(f"domain_parallel_size={size!r} with mode={mode!r}", "a mode with domain_parallel in it", fix)
    if mode == "fsdp+domain_parallel" and size is None:
        fix = "domain_parallel_size: 2"
        _refuse(f"mode={mode!r} without domain_parallel_size", "the number of ranks that share a sample", fix)
    if mode == "none":
        return Choice("none", data_size=1)
    if mode == "domain_parallel":  # every rank holds all parameters; by default one sample is shared by all ranks
        return Choice("ddp", domain=-1, data_size=1) if size is None else Choice("ddp", domain=_domain_size(size))
    if with_domain:
        return Choice("fsdp", domain=_domain_size(size))
    return Choice(DATA_MODES[mode])


def _domain_size(size: object) -> int:
    return _size(size, "trainer.domain_parallel_size")


def _section(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        _refuse(f"{name} is a {type(value).__name__}", "a mapping", "trainer: {parallelism: {data: fsdp2}}")
    return value


def _size(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _refuse(f"{name}={value!r}", "a positive integer", f"{name.rpartition('.')[2]}: 1")
    return value


def _mode(value: object, name: str, known: Mapping[str, str]) -> str:
    text = "none" if value is None or value is False else value
    if not isinstance(text, str) or text not in known:
        _refuse(f"{name}={value!r}{_near(value, known)}", f"one of {', '.join(known)}", "rename it")
    return known[text]


def _refuse_misspelt(trainer: Mapping[str, Any]) -> None:
    """Refuse keys of a trainer that look like one of ours; `mode` is too short for that."""
    ours = ("parallelism", "domain_parallel_size")
    odd = [f"trainer.{key}{_near(key, ours)}" for key in trainer if key not in ours and _near(key, ours)]
    if odd:
        _refuse(odd, f"trainer.{', trainer.'.join(('parallelism', *_OLD_KEYS))}", "rename it")


def _near(key: object, known: Any) -> str:
    near = difflib.get_close_matches(str(key).lower(), list(known), n=1, cutoff=0.75)
    return f": did you mean {near[0]}?" if near else ""


def _refuse(got: str | list[str], needs: str, fix: str) -> NoReturn:
    raise SpecError(explain("configuration: cannot be used.", got=got, needs=needs, fix=fix))
