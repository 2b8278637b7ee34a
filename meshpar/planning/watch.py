"""What a step holds and does, op by op: memory by kind, floating point operations, bytes, collectives.

Invariant: a storage counts once, from the op that made it until nobody holds it. Only fake tensors of the step count;
what DTensor asks on the side about global shapes is out of sight (`private.shapes_unseen`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from meshpar import private
from meshpar.planning.rates import Rates

KINDS = ("parameters", "gradients", "optimizer", "inputs", "gathered", "activations")
"""What memory is for. "gathered": whole parameters, and the messages in which they and their gradients travel.
"activations": what the forward keeps for the backward, gradients of activations, and temporary buffers."""

_COLLECTIVES = {
    "_allgather_base_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "allreduce_": ("all-reduce", 0),
    "broadcast_": ("broadcast", 0),
}
"""Collectives of torch's own: how they are called here, and the argument that is as large as the whole."""


class Watch(private.DispatchMode):
    """Follow the ops of one rank's step.

    Args:
        rates: for the estimate of time.
    """

    def __init__(self, rates: Rates) -> None:
        super().__init__()
        self.rates = rates
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.peak_bytes = 0
        self.flops = 0
        self.moved_bytes = 0
        self.compute_s = 0.0
        self.collectives: Counter[tuple[str, str, int]] = Counter()
        self._kind = "activations"
        self._held: dict[int, tuple[int, str]] = {}
        self._inside = 0
        self._formulas: dict[Any, Any] = FlopCounterMode(display=False).flop_registry

    @contextlib.contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """Count what is made inside the block as of a kind."""
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    def held_bytes(self) -> int:
        """Give the bytes that are held now."""
        return sum(self.now.values())

    def restart(self) -> None:
        """Forget the peaks and what was done; keep what is held."""
        self.peak, self.peak_bytes = Counter(self.now), self.held_bytes()
        self.flops = self.moved_bytes = 0
        self.compute_s = 0.0
        self.collectives.clear()

    def count_as(self, kind: str, *tensors: Tensor) -> None:
        """Count what tensors hold as of a kind, whatever it was."""
        for x in tensors:
            key = x.untyped_storage()._cdata
            if key in self._held and self._held[key][1] != kind:
                num_bytes, old = self._held[key]
                self._held[key] = num_bytes, kind
                self.now[old] -= num_bytes
                self._add(kind, num_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and count it; an op of meshpar runs its kernel, whose ops are counted one by one."""
        kwargs = kwargs or {}
        if func.namespace == "meshpar":
            self._inside += 1
            try:
                with self:
                    return private.run_kernel(func, args, kwargs)
            finally:
                self._inside -= 1
        out = func(*args, **kwargs)
        given = [x for x in _tensors((args, kwargs)) if _counts(x)]
        made = [x for x in _tensors(out) if _counts(x)]
        for x in made:
            self._see(x)
        if func.namespace == "c10d":
            self._send(func, args)
        elif func.namespace == "fsdp":
            self.count_as("gathered", *given, *made)
        if made and not func.is_view:
            self._work(func, args, kwargs, out, given + made)
        return out

    def _see(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._held:
            num_bytes = storage.nbytes()
            self._held[key] = num_bytes, self._kind
            self._add(self._kind, num_bytes)
            weakref.finalize(storage, self._free, key)

    def _add(self, kind: str, num_bytes: int) -> None:
        self.now[kind] += num_bytes
        self.peak[kind] = max(self.peak[kind], self.now[kind])
        self.peak_bytes = max(self.peak_bytes, self.held_bytes())

    def _free(self, key: int) -> None:
        num_bytes, kind = self._held.pop(key)
        self.now[kind] -= num_bytes

    def _send(self, func: Any, args: Any) -> None:
        """Note a collective that is not one of meshpar's, and count its messages as gathered."""
        name = func._schema.name.partition("::")[2]
        if self._inside or name not in _COLLECTIVES:
            return
        told, index = _COLLECTIVES[name]
        whole = next(iter(_tensors(args[index])))
        group = next(dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject))
        self.collectives[told, group.group_name, whole.numel() * whole.element_size()] += 1
        self.count_as("gathered", *filter(_counts, _tensors(args)))

    def _work(self, func: Any, args: Any, kwargs: Any, out: Any, tensors: list[Tensor]) -> None:
        formula = self._formulas.get(func._overloadpacket)
        flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
        moved = sum(x.numel() * x.element_size() for x in tensors)
        self.flops += flops
        self.moved_bytes += moved
        self.compute_s += self.rates.op_s(flops, moved)


def _counts(x: Tensor) -> bool:
    """Tell whether a tensor stands for memory: those on the meta device are asked for shapes alone."""
    return private.is_fake(x) and x.device.type != "meta"


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))
