"""The state dict of a checkpoint of Hugging Face, from a model that lies over ranks: names, ties, scales of caches.

Invariant: what cannot be exported is found before anything else is done, and is one error on all ranks that names every
tensor. Values stay where they are: nothing is copied but scales, a few numbers each.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshpar.checkpoint.together import Team, everyone, team
from meshpar.errors import SpecError, explain
from meshpar.export import ties
from meshpar.export.names import companions, exported_name, is_cache_scale, module_name, odd, without_ones
from meshpar.export.scales import of_two_dims

CACHE_FORMATS = ("FP8", "NVFP4", "NVFP4_AFFINE")
"""The formats of key and value caches whose scales are exported."""

LARGE_SCALE = 0.5
"""Above this a cache in FP8 is known to lose accuracy."""

_SHOWN = 20


def exported_state(
    model: nn.Module,
    *,
    kv_cache_format: str | None = None,
    maxbound: float | None = None,
    is_modelopt_qlora: bool = False,
) -> dict[str, Tensor]:
    """Give the tensors that a checkpoint of Hugging Face has of a model, under their names there, as they lie.

    Amaxes of key and value caches become scales, `_pre_quant_scale` and `_bias_value` get the names that inference
    expects, other state of quantizers stays out, scales of shape (1, n, m) become (n, m). Of tied weights one name is
    kept: the one that `all_tied_weights_keys` says, or the first; the scales of the others go with them.

    It may be called under `torch.inference_mode()`. Rank 0 warns where scales of FP8 caches are above 0.5.

    Args:
        model: the model; parallelized by meshpar, `fully_shard`, `parallelize_module`, or not at all.
        kv_cache_format: "FP8", "NVFP4" or "NVFP4_AFFINE", where caches of keys and values are quantized.
        maxbound: the largest number of that format, 448 for all of them.
        is_modelopt_qlora: whether the model is a quantized base with LoRA, of which the base alone is wanted.

    Returns:
        Tensors in the order of the state dict, plain or DTensors; they share the memory of the model.

    Communication:
        A few bytes of every rank, and a broadcast of each scale of one block that is sharded along that dim.

    Raises:
        SpecError: on all ranks, before anything is done: names that collide or cannot be written, values that are no
            tensors, have no data or are partial sums, caches without a format, declared ties that differ.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3))
        >>> model[1].weight = model[0].weight
        >>> list(exported_state(model))
        ['0.weight', '0.bias', '1.bias']
    """
    with usual_mode():
        us = team()
        plan = _Plan(model, kv_cache_format, maxbound, is_modelopt_qlora)
        what, fix = "export: the state dict cannot be exported.", "see above"
        told = everyone(us, what, plan.prepare, fix=fix)
        if any(t.maxima or t.sums for t in told):
            everyone(us, what, lambda: plan.settle(us, told), fix=fix)
        if us.rank == 0 and (large := plan.large(told)):
            warnings.warn(large, stacklevel=2)
        return plan.values()


@contextlib.contextmanager
def usual_mode() -> Iterator[None]:
    """Leave `torch.inference_mode()`, in which tensors of the usual kind could not be made; record no gradients."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def state_of_module(model: nn.Module) -> dict[str, Any]:
    """Give the state dict of a model, its own tensors, by the names that they have without wrappers of torch."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    return dict(model.state_dict(keep_vars=True))


@dataclass(frozen=True)
class _Told:
    """Hold what a rank tells of its part: the largest amaxes, and the sums over tensors that lie differently."""

    maxima: dict[str, float] = field(default_factory=dict)
    sums: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class _Wrong:
    """Collect what is wrong, with the rules that it breaks and what to do."""

    got: list[str] = field(default_factory=list)
    needs: dict[str, None] = field(default_factory=dict)
    fix: dict[str, None] = field(default_factory=dict)

    def add(self, got: str, needs: str, fix: str) -> None:
        self.got.append(got)
        self.needs[needs] = None
        self.fix[fix] = None

    def check(self) -> None:
        if self.got:
            more = [f"... {len(self.got)} in all"] if len(self.got) > _SHOWN else []
            text = explain(
                "export: the state dict cannot be exported.",
                got=[*self.got[:_SHOWN], *more],
                needs="; ".join(self.needs),
                fix="; ".join(self.fix),
            )
            raise SpecError(text)


class _Plan:
    """Find out what is exported of a model on this rank, in steps that all ranks take together."""

    def __init__(self, model: nn.Module, cache_format: str | None, maxbound: float | None, qlora: bool) -> None:  # noqa: FBT001
        self.model, self.qlora = model, qlora
        self.cache_format, self.maxbound = cache_format, maxbound
        self.tensors: dict[str, Tensor] = {}
        self.new: dict[str, str] = {}
        self.scales: dict[str, Tensor] = {}
        self.pairs: list[tuple[str, str]] = []

    def prepare(self) -> _Told:
        """Decide on the names, and look at this rank's values."""
        wrong = _Wrong()
        self._choose(wrong)
        self._check_names(wrong)
        self._check_caches(wrong)
        wrong.check()
        self._drop_ties(wrong)
        self._check_names_once(wrong)
        wrong.check()
        told = _Told()
        for name in [name for name in self.new if is_cache_scale(name)]:
            piece = ties.held(self.tensors[name])
            told.maxima[name] = float(piece.detach().float().max()) if piece.numel() else -math.inf
        for alias, name in self.pairs:
            a, b = self.tensors[alias], self.tensors[name]
            if isinstance(a, DTensor) and isinstance(b, DTensor) and not ties.lie_alike(a, b):
                told.sums[alias] = ties.digest(a), ties.digest(b)
        return told

    def _choose(self, wrong: _Wrong) -> None:
        for name, value in state_of_module(self.model).items():
            if (trouble := odd(name)) is not None:
                wrong.add(f"{name!r}: {trouble}", "names that a header of safetensors can hold", "rename the tensor")
                continue
            new = exported_name(name, qlora=self.qlora)
            if new is None:
                continue
            name = module_name(name)
            if not isinstance(value, Tensor):
                if value is not None:
                    fix = "a state dict hook that leaves it out or makes a tensor of it"
                    wrong.add(f"{name}: a {type(value).__name__}", "tensors alone", fix)
                continue
            if name in self.tensors:
                wrong.add(f"{name}: there twice, without wrappers", "one tensor a name", "rename a module")
            if value.is_meta:
                wrong.add(f"{name}: on the meta device", "a model with values", "meshpar.materialize(model)")
            if isinstance(value, DTensor) and any(p.is_partial() for p in value.placements):
                needs, fix = "values, not parts of sums", "redistribute it to Replicate or Shard first"
                wrong.add(f"{name}: partial, {tuple(value.placements)}", needs, fix)
            self.tensors[name], self.new[name] = value, new

    def _check_names(self, wrong: _Wrong) -> None:
        for new in self.new.values():
            if (trouble := odd(new)) is not None:
                wrong.add(f"{new!r}: {trouble}", "names that a header of safetensors can hold", "rename the tensor")

    def _check_names_once(self, wrong: _Wrong) -> None:
        olds: dict[str, list[str]] = {}
        for name, new in self.new.items():
            olds.setdefault(new, []).append(name)
        for new, names in olds.items():
            if len(names) > 1:
                fix = "rename or remove one of them"
                wrong.add(f"{new}: of {' and of '.join(names)}", "one tensor a name, also after renaming", fix)

    def _check_caches(self, wrong: _Wrong) -> None:
        names = [name for name in self.new if is_cache_scale(name)]
        for name in names:
            if self.cache_format not in CACHE_FORMATS:
                needs = f"kv_cache_format of {', '.join(map(repr, CACHE_FORMATS))}"
                fix = "give the format of the caches, or take their quantizers off the model"
                wrong.add(f"{name} with kv_cache_format={self.cache_format!r}", needs, fix)
            if self.tensors[name].numel() == 0:
                wrong.add(f"{name}: empty", "an amax of a calibrated quantizer", "calibrate the quantizers")
        bound = self.maxbound
        if names and not (isinstance(bound, int | float) and math.isfinite(bound) and bound > 0):
            wrong.add(f"maxbound={bound!r}", "maxbound > 0 where caches are quantized", "maxbound=448")

    def _drop_ties(self, wrong: _Wrong) -> None:
        """Leave out the other names of tied weights, with their scales, and check that nothing is lost by that."""
        declared = {module_name(a): module_name(b) for a, b in ties.declared_ties(self.model).items()}
        dropped = ties.tied_names(self.tensors, declared)
        for alias, name in dict(dropped).items():
            of_name = _suffixes(name, self.new)
            for suffix, scale in _suffixes(alias, self.new).items():
                if scale not in dropped:
                    dropped[scale] = of_name.get(suffix, "")
        for alias, name in dropped.items():
            if name and not ties.is_same_tensor(self.tensors[alias], self.tensors[name]):
                self._compare(alias, name, wrong)
            del self.new[alias]

    def _compare(self, alias: str, name: str, wrong: _Wrong) -> None:
        a, b = self.tensors[alias], self.tensors[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            kinds = f"{tuple(a.shape)} of {a.dtype}, {tuple(b.shape)} of {b.dtype}"
            self._differ(alias, name, kinds, wrong)
        elif not ties.lie_alike(a, b):
            self.pairs.append((alias, name))
        elif not ties.same_here(a, b):
            self._differ(alias, name, f"other values, {tuple(a.shape)} of {a.dtype}", wrong)

    def _differ(self, alias: str, name: str, how: str, wrong: _Wrong) -> None:
        needs = "the same values under all names of a tie, of which one is written"
        wrong.add(f"{alias}, tied to {name}: {how}", needs, "tie them again, or take them out of all_tied_weights_keys")

    def settle(self, us: Team, told: list[_Told]) -> None:
        """Make the scales, and see whether tensors that lie differently are equal, from what all ranks tell."""
        wrong = _Wrong()
        for alias, name in self.pairs:
            sums = [0, 0]
            for i, x in enumerate((self.tensors[alias], self.tensors[name])):
                assert isinstance(x, DTensor)
                ranks = x.device_mesh.mesh.flatten().tolist()
                sums[i] = sum(told[r].sums[alias][i] for r in ranks if alias in told[r].sums) % 2**64
            if sums[0] != sums[1]:
                how = f"other values, {tuple(self.tensors[alias].shape)} of {self.tensors[alias].dtype}"
                self._differ(alias, name, how, wrong)
        for name in [name for name in self.new if is_cache_scale(name)]:
            largest = _largest(name, told)
            if not math.isfinite(largest):
                needs, fix = "a finite amax of a calibrated quantizer", "calibrate the quantizers"
                wrong.add(f"{name}: not finite", needs, fix)
            amax = torch.tensor(largest, dtype=torch.float32, device=ties.held(self.tensors[name]).device)
            self.scales[name] = amax / self.maxbound  # type: ignore[operator]
        wrong.check()

    def large(self, told: list[_Told]) -> str | None:
        """Say which scales are large; of all ranks."""
        if self.cache_format != "FP8" or not self.maxbound:
            return None
        names = {exported_name(name, qlora=self.qlora): name for t in told for name in t.maxima}
        found = [new for new, name in names.items() if _largest(name, told) / self.maxbound > LARGE_SCALE]
        if not found:
            return None
        return f"{len(found)} scales of caches are above {LARGE_SCALE}, e.g. {found[0]}: FP8 may lose accuracy there"

    def values(self) -> dict[str, Tensor]:
        """Give the tensors by their new names."""
        found: dict[str, Tensor] = {}
        for name, new in self.new.items():
            value = self.scales.get(name, self.tensors[name])
            if without_ones(new, value.shape) != tuple(value.shape):
                value = of_two_dims(value)
            found[new] = value
        return found


def _suffixes(name: str, new: dict[str, str]) -> dict[str, str]:
    """Give the scales beside a weight by what their new names have after that of its module: {suffix: old name}."""
    if name not in new:
        return {}
    owner = new[name].rpartition(".")[0]
    old = {n: o for o, n in new.items()}
    return {n.removeprefix(owner): old[n] for n in companions(new[name], list(old))}


def _largest(name: str, told: list[_Told]) -> float:
    """Give the largest of the amaxes of all ranks that have one; nan where one is."""
    found = [t.maxima[name] for t in told if name in t.maxima]
    return math.nan if any(math.isnan(x) for x in found) else max(found)
