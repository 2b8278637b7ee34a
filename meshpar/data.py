"""Parameters over the ranks: equal initial values, and `fully_shard` over data x domain.

Invariant: the gradient of a parameter is the *sum* of the parts of all ranks of data x domain: divide factor 1, and
plain sums, since gloo has no pre-multiplied ones. These are the only steps of `parallelize` with effects on other
ranks.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshpar import private, weights
from meshpar.collectives import all_gather, all_reduce, sum_scatter
from meshpar.errors import SpecError, explain
from meshpar.intervals import chunks
from meshpar.mesh import SUMMED, summed_mesh
from meshpar.private import pytree
from meshpar.spmd import is_on
from meshpar.traced import PLAIN, as_node, direct, is_tracing

BUCKET_BYTES = 64 * 2**20
"""Size of the messages by which initial values travel."""


_SHARDS = "_meshpar_shards"
"""Name of the attribute in which a module whose parameters are sharded keeps what it shares with the others."""


def own_tensors(module: nn.Module) -> None:
    """Give a rewritten module parameters and buffers of its own; ties stay ties."""
    memo: dict[int, Tensor] = {}
    odd = [f"{name}: a {type(p).__name__}" for name, p in module.named_parameters() if type(p) is not nn.Parameter]
    if odd:
        raise SpecError(
            explain(
                "parallelize: parameters of a kind that cannot be made parallel.",
                got=odd[:5],
                needs="plain parameters, initialised, as on one process",
                fix="initialise lazy modules by a forward first; give the model before any other wrapper",
            )
        )
    for owner in module.modules():
        for name, p in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if id(p) not in memo:
                memo[id(p)] = _twin(p)
            setattr(owner, name, memo[id(p)])
        for name, b in list(owner.named_buffers(recurse=False, remove_duplicate=False)):
            if id(b) not in memo:
                memo[id(b)] = b.detach().clone()
            setattr(owner, name, memo[id(b)])


def _twin(p: nn.Parameter) -> nn.Parameter:
    twin = nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
    twin.__dict__.update(p.__dict__)
    return twin


def make_equal(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give all ranks the parameters and buffers of rank 0.

    Communication:
        A digest of the structure (an all-gather of 8 bytes), then broadcasts in buckets over all ranks of the mesh.

    Raises:
        SpecError: the ranks hold different models, or parameters without data; on all ranks, before the broadcasts.
    """
    tensors = _distinct([*module.parameters(), *module.buffers()])
    hollow = [name for name, t in [*module.named_parameters(), *module.named_buffers()] if t.is_meta]
    _same_structure(module, mesh, hollow)
    bucket: list[Tensor] = []
    waiting = 0
    for t in sorted(tensors, key=lambda t: str(t.dtype)):
        if bucket and (bucket[0].dtype != t.dtype or waiting > BUCKET_BYTES):
            _broadcast(bucket, mesh)
            bucket, waiting = [], 0
        bucket.append(t)
        waiting += t.numel() * t.element_size()
    if bucket:
        _broadcast(bucket, mesh)


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(t): t for t in tensors}.values())


def _broadcast(tensors: list[Tensor], mesh: DeviceMesh) -> None:
    with torch.no_grad():
        flat = torch.cat([t.detach().reshape(-1) for t in tensors]).to(mesh.device_type)
        dist.broadcast(torch.view_as_real(flat) if flat.is_complex() else flat, src=int(mesh.mesh.min()))
        for t, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.copy_(part.view_as(t))


def _same_structure(module: nn.Module, mesh: DeviceMesh, hollow: list[str]) -> None:
    names = [*module.named_parameters(), *module.named_buffers()]
    told = repr([(name, tuple(t.shape), str(t.dtype)) for name, t in names])
    digest = int.from_bytes(hashlib.sha256(told.encode()).digest()[:7], "big")
    mine = torch.tensor([digest, len(names), len(hollow)], dtype=torch.int64, device=mesh.device_type)
    everyone = torch.empty(3 * mesh.size(), dtype=torch.int64, device=mesh.device_type)
    private.all_gather(everyone, mine, None)
    rows = everyone.view(-1, 3).tolist()
    odd = [rank for rank, row in enumerate(rows) if row[:2] != rows[0][:2]]
    if odd:
        raise SpecError(
            explain(
                "parallelize: the ranks hold different models.",
                got=f"ranks {odd} differ from rank 0 in names, shapes or dtypes; rank 0 has {rows[0][1]} tensors, "
                f"rank {odd[0]} has {rows[odd[0]][1]}",
                needs="the same model on every rank (its values may differ: rank 0's are taken)",
                fix="build the model from the same configuration on all ranks",
            )
        )
    if any(row[2] for row in rows):
        raise SpecError(
            explain(
                "parallelize: parameters without data.",
                got=f"{max(row[2] for row in rows)} on the meta device, e.g. {hollow[:3]}",
                needs="initialised parameters",
                fix="model.to_empty(device=...) and an initialisation, before parallelize",
            )
        )


def units(module: nn.Module, shard_modules: Any) -> list[nn.Module]:
    """Choose the modules whose parameters are gathered and freed together; the root takes what is left.

    "auto" takes the repeated blocks: members of a `ModuleList` or of a nested `Sequential` with parameters. A class or
    a list of classes takes the modules of those, and a predicate those for which it is true. A module that shares a
    parameter with another part of the model is left to the root, which alone can gather it for both.
    """
    if shard_modules == "auto":
        lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
        picked = [child for m in lists for child in m if not isinstance(child, nn.ModuleList | nn.ModuleDict)]
    elif shard_modules is None:
        picked = []
    elif isinstance(shard_modules, type):
        picked = [m for m in module.modules() if isinstance(m, shard_modules)]
    elif isinstance(shard_modules, list | tuple) and all(isinstance(c, type) for c in shard_modules):
        picked = [m for m in module.modules() if isinstance(m, tuple(shard_modules))]
    elif callable(shard_modules):
        picked = [m for m in module.modules() if shard_modules(m)]
    else:
        raise SpecError(
            explain(
                "shard_modules: cannot be used.",
                got=repr(shard_modules),
                needs='"auto", None, a module class, a list of classes, or a predicate',
                fix='shard_modules="auto"',
            )
        )
    owners: dict[int, set[int]] = {}
    for m in module.modules():
        for _, p in m.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(p), set()).add(id(m))
    found: dict[int, nn.Module] = {}
    for unit in picked:
        inside = {id(m) for m in unit.modules()}
        own = list(unit.parameters())
        if unit is not module and own and all(owners[id(p)] <= inside for p in own):
            found[id(unit)] = unit
    order = {id(m): i for i, m in enumerate(module.modules())}
    return sorted(found.values(), key=lambda m: -order[id(m)])


def fully_shard_over(module: nn.Module, mesh: DeviceMesh, shard_modules: Any = "auto") -> None:
    """Shard the parameters of a module over data x domain, in place.

    Communication:
        None here. Each unit all-gathers its parameters before its forward and backward, and reduce-scatters their
        gradients after its backward. 0-d parameters, and those whose dtype is not the one most of their unit has, stay
        whole on every rank; an all-reduce sums their gradients.
    """
    summed = summed_mesh(mesh)
    chosen = units(module, shard_modules)
    for m in module.modules():  # on each module, so that a part of the model can be loaded alone
        m.register_load_state_dict_pre_hook(_shard_plain_values)
    if summed.size() == 1 or next(module.parameters(), None) is None:
        return
    left = _replicate_odd(module, chosen, summed)
    private.keep_missing_gradients()
    shards = _Shards(summed)
    for unit in [*chosen, module]:
        # The root, too, frees its parameters after the forward: were they still there, `torch.autograd.grad` of them
        # would give this rank's parts without a word. So it is an error ("not used in the graph").
        shard = functools.partial(fully_shard, unit, mesh=summed, ignored_params=left, reshard_after_forward=True)
        inside = [u for u in [*chosen, module] if u in set(unit.modules())]
        kept = _Unit(unit, inside, shards)
        private.new_hooks(unit, shard, kept.before, kept.after)
    for owner in module.modules():
        if any(isinstance(p, DTensor) for p in owner.parameters(recurse=False)):
            owner.__class__ = _reading_plain(type(owner))  # type: ignore[arg-type]
            owner.__dict__[_SHARDS] = shards
    for m in module.modules():
        if isinstance(m, FSDPModule):
            m.set_gradient_divide_factor(1.0)
            m.set_force_sum_reduction_for_comms(True)


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


@dataclass
class _Shards:
    """Hold what the units of one model share.

    Args:
        mesh: the ranks over which parameters are sharded.
        away: the unit in whose forward the hooks of `fully_shard` stay away, if any.
        replaced: what stands in the place of parameters in that forward.
    """

    mesh: DeviceMesh
    away: nn.Module | None = None
    replaced: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class _Unit:
    """Decide for one unit, at each of its forwards, whether the hooks of `fully_shard` run.

    They stay out of graphs, which gather parameters themselves, and of a forward with other values in the place of
    parameters (`torch.func.functional_call`), which they would throw away.
    """

    module: nn.Module
    units: Sequence[nn.Module]
    shards: _Shards

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
                        private.put_parameter(owner, name, _SummedGrad.apply(value, self.shards.mesh))
            return hook(*args) if self.shards.away is None else None

        return outside

    def after(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the hook that frees parameters."""

        def outside(*args: Any) -> Any:
            if torch.compiler.is_compiling():
                return None
            if self.shards.away is None:
                return hook(*args[:-1], _kept(args[-1], self.module))
            if self.shards.away is self.module:
                for owner, name, value in self.shards.replaced:
                    private.put_parameter(owner, name, value)  # functional_call hands them back to its caller
                self.shards.away, self.shards.replaced = None, []
            return None

        return outside


def _kept(output: Any, unit: nn.Module) -> Any:
    """Copy what a unit returns of its parameters themselves, or views of them: their memory is freed now."""
    freed = {_memory(p) for p in unit.parameters() if not isinstance(p, DTensor) or weights.is_split(p)} - {0}
    return pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) and _memory(x) in freed else x, output)


def _memory(x: Tensor) -> int:
    """Give the address of the memory that a tensor, or this rank's piece of it, is a view of."""
    with torch.no_grad():
        piece = x.to_local() if isinstance(x, DTensor) else x
    return piece.untyped_storage().data_ptr() if piece.layout is torch.strided and not piece.is_meta else 0


class _SummedGrad(torch.autograd.Function):
    """Let a plain value stand for a parameter: it is the whole, and the parts of its gradient are added up."""

    @staticmethod
    def forward(ctx, w, mesh):  # type: ignore[no-untyped-def]
        ctx.mesh = mesh
        return w.view_as(w)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        total = all_reduce(g, ctx.mesh.get_group(), SUMMED, "|functional_call", kind="parameters", backward=True)
        return total, None


@functools.lru_cache(maxsize=4096)
def _reading_plain(cls: type[nn.Module]) -> type[nn.Module]:
    """Make the class of a module whose parameters are plain tensors for a forward: all of them in a graph.

    Outside of graphs `fully_shard` puts plain parameters in place, but for those that it was told to leave.
    """
    if cls.__dict__.get("_meshpar_plain"):
        return cls

    def __getattr__(self: nn.Module, name: str) -> Any:
        value = cls.__getattr__(self, name)
        if isinstance(value, DTensor) and private.holds_parameter(self, name):
            if torch.compiler.is_compiling():
                return as_node(whole_parameter, PLAIN, value) if is_tracing() else value
            shards: _Shards = self.__dict__[_SHARDS]
            if is_on() and (shards.away is not None or all(p.is_replicate() for p in value.placements)):
                return whole_parameter(value)
        return value

    names = {"_meshpar_plain": True, "__module__": cls.__module__, "__doc__": cls.__doc__, "__getattr__": __getattr__}
    return type(cls.__name__, (cls,), names)


@direct
def whole_parameter(w: DTensor) -> Tensor:
    """Give a parameter as a plain tensor; the parts of its gradient are added up.

    Communication:
        Forward an all-gather of a sharded parameter, backward a reduce-scatter; an all-reduce of a replicated one.
    """
    return _Whole.apply(w)  # type: ignore[no-any-return]


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):  # type: ignore[no-untyped-def]
        (placement,), mesh = w.placements, w.device_mesh
        ctx.request = placement, mesh, w.shape, w.stride()
        piece = w.to_local()
        if not isinstance(placement, Shard):
            return piece.detach().clone()
        dim, n, p = placement.dim, w.shape[placement.dim], mesh.size()
        rows = -(-n // p)
        piece = _padded(piece, dim, rows).movedim(dim, 0)
        whole = all_gather(piece, mesh.get_group(), SUMMED, "|fully_shard", kind="parameters")
        return whole.flatten(0, 1).narrow(0, 0, n).movedim(0, dim).clone()

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        placement, mesh, shape, stride = ctx.request
        group, p = mesh.get_group(), mesh.size()
        if isinstance(placement, Shard):
            dim, n = placement.dim, shape[placement.dim]
            rows = -(-n // p)
            parts = _padded(g, dim, rows * p).movedim(dim, 0).unflatten(0, (p, rows))
            a, b = chunks(n, p)[mesh.get_local_rank()]
            total = sum_scatter(parts, group, SUMMED, "|fully_shard", kind="parameters", backward=True)
            total = total.narrow(0, 0, b - a).movedim(0, dim)
        else:
            total = all_reduce(g, group, SUMMED, "|fully_shard", kind="parameters", backward=True)
        return DTensor.from_local(total, mesh, [placement], run_check=False, shape=shape, stride=stride)


def _padded(x: Tensor, dim: int, rows: int) -> Tensor:
    """Add rows of zeros up to a number."""
    return torch.nn.functional.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, rows - x.shape[dim]])


def _shard_plain_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Cut the plain values of a one-process state dict to the shards that the model holds."""
    for name, p in module.named_parameters(recurse=False):
        value = state_dict.get(prefix + name)
        if isinstance(p, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
            if value.shape != p.shape:
                continue  # torch names the key and both shapes
            state_dict[prefix + name] = distribute_tensor(
                value.to(p.device), p.device_mesh, p.placements, src_data_rank=None
            )
