"""Parameters over the ranks: `fully_shard` over data x domain.

Invariant: the gradient of a parameter is the *sum* of the parts of all ranks of data x domain: divide factor 1, and
plain sums, since gloo has no pre-multiplied ones.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from meshpar import private
from meshpar.mesh import summed_mesh
from meshpar.parameters import SHARDS, Shards, reading_plain, shard_plain_values, summed_grad
from meshpar.units import units


def fully_shard_over(module: nn.Module, mesh: DeviceMesh, shard_modules: Any = "auto") -> None:
    """Shard the parameters of a module over data x domain, in place.

    Communication:
        None here. Each unit all-gathers its parameters before its forward and backward, and reduce-scatters their
        gradients after its backward. 0-d parameters, and those whose dtype is not the one most of their unit has, stay
        whole on every rank; an all-reduce sums their gradients.
    """
    summed = summed_mesh(mesh)
    chosen = units(module, shard_modules)
    if summed.size() == 1 or next(module.parameters(), None) is None:
        return
    left = _replicate_odd(module, chosen, summed)
    private.keep_missing_gradients()
    shards = Shards(summed)
    for unit in [*chosen, module]:
        # The root, too, frees its parameters after the forward: were they still there, `torch.autograd.grad` of them
        # would give this rank's parts without a word. So it is an error ("not used in the graph").
        shard = functools.partial(fully_shard, unit, mesh=summed, ignored_params=left, reshard_after_forward=True)
        inside = [u for u in [*chosen, module] if u in set(unit.modules())]
        kept = _Unit(unit, inside, shards)
        private.new_hooks(unit, shard, kept.before, kept.after)
    for owner in module.modules():
        if any(isinstance(p, DTensor) for p in owner.parameters(recurse=False)):
            owner.__class__ = reading_plain(type(owner))  # type: ignore[arg-type]
            owner.__dict__[SHARDS] = shards
    for m in module.modules():
        if isinstance(m, FSDPModule):
            m.set_gradient_divide_factor(1.0)
            m.set_force_sum_reduction_for_comms(True)
        # On each module, so that a part of the model can be loaded alone.
        m.register_load_state_dict_pre_hook(shard_plain_values)


def _replicate_odd(module: nn.Module, chosen: Sequence[nn.Module], mesh: DeviceMesh) -> set[nn.Parameter]:
    """Keep whole on every rank what `fully_shard` refuses: 0-d parameters, and the lesser dtypes of a unit.

    They become replicated DTensors, as the optimizer wants beside sharded ones, and are plain tensors under the mode.
    """
    odd: dict[int, nn.Parameter] = {}
    seen: set[int] = set()
    for unit in [*chosen, module]:
        own = [p for p in unit.parameters() if id(p) not in seen]
        seen.update(map(id, own))
        sizes: Counter[torch.dtype] = Counter()
        for p in own:
            if p.dim():
                sizes[p.dtype] += p.numel()
        main = max(sizes, key=lambda d: sizes[d], default=None)
        odd |= {id(p): p for p in own if not p.dim() or p.dtype != main}
    twins: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, p in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if id(p) in odd:
                if id(p) not in twins:
                    value = DTensor.from_local(p.detach(), mesh, [Replicate()], run_check=False)
                    twins[id(p)] = nn.Parameter(value, requires_grad=p.requires_grad)
                    twins[id(p)].__dict__.update(p.__dict__)
                setattr(owner, name, twins[id(p)])
    return set(twins.values())


@dataclass(frozen=True)
class _Unit:
    """Decide for one unit, at each of its forwards, whether the hooks of `fully_shard` run.

    They stay out of graphs, which gather parameters themselves, and of a forward with other values in the place of
    parameters (`torch.func.functional_call`), which they would throw away.
    """

    module: nn.Module
    units: Sequence[nn.Module]
    shards: Shards

    def before(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the hook that gathers parameters."""

        def outside(*args: Any) -> Any:
            if torch.compiler.is_compiling():
                return None
            if self.shards.away in (None, self.module):
                found = [item for unit in self.units for item in private.replaced_parameters(unit)]
                self.shards.away, self.shards.replaced = self.module if found else None, found
                for owner, name, value in found:
                    if not isinstance(value, DTensor):
                        private.put_parameter(owner, name, summed_grad(value, self.shards.mesh))
            return hook(*args) if self.shards.away is None else None

        return outside

    def after(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the hook that frees parameters."""

        def outside(*args: Any) -> Any:
            if torch.compiler.is_compiling():
                return None
            if self.shards.away is None:
                return hook(*args)
            if self.shards.away is self.module:
                for owner, name, value in self.shards.replaced:
                    private.put_parameter(owner, name, value)  # functional_call hands them back to its caller
                self.shards.away, self.shards.replaced = None, []
            return None

        return outside
