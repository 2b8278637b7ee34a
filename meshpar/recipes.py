"""How the modules of a hollow model get initial values: recipes, the memory for shares, and whole tensors on loan.

Invariant: every rank draws the same numbers, those of one process that starts from rank 0's generator and initialises
the modules in the order of their constructors, children first; a tied weight keeps what its first owner drew. What a
recipe leaves as it was, or writes elsewhere, is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshpar import private
from meshpar.checkpoint.together import everyone, team
from meshpar.errors import CheckpointError, SpecError, explain
from meshpar.rules.random import first_ranks_generator
from meshpar.shares import laid_as, narrowed, share_of

Init = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Slot:
    """Hold where a tensor without data is: its module, its name there, and its name in the model."""

    owner: nn.Module
    name: str
    path: str

    def get(self) -> Tensor:
        """Give the tensor."""
        tables = (self.owner.named_parameters, self.owner.named_buffers)
        return next(t for table in tables for n, t in table(recurse=False, remove_duplicate=False) if n == self.name)


class Recipes:
    """Know how each module of a model gets its initial values."""

    def __init__(self, model: nn.Module, init: Init | None) -> None:
        self.init = init
        names = {id(m): name for name, m in model.named_modules()}
        self.modules = list(_children_first(model, set()))
        self.names = names
        self.slots = {id(m): list(_slots(m, names[id(m)])) for m in self.modules}

    def own(self, module: nn.Module) -> list[str]:
        """Name the tensors of a module, not of those below it, that have no data."""
        return [slot.path for slot in self.slots[id(module)]]

    def reach(self, module: nn.Module) -> list[nn.Module]:
        """List the modules whose tensors a recipe may write: the module, or all below it too."""
        if self.init is None and private.recipe_for_all_below(module) is not None:
            return list(_children_first(module, set()))
        return [module]

    def of(self, module: nn.Module) -> Callable[[], Any] | None:
        """Give the recipe of a module, None where it has none."""
        if self.init is not None:
            init = self.init
            return lambda: init(module)
        if (below := private.recipe_for_all_below(module)) is not None:
            return below
        found = getattr(module, "reset_parameters", None)
        return found if callable(found) else None

    def check(self, names: set[str]) -> None:
        """Refuse what would stay without values."""
        wrong = [
            f"{slot.path}, of a {_class_name(m)}"
            for m in self.modules
            for slot in self.slots[id(m)]
            if slot.path in names and self.of(m) is None
        ]
        if wrong:
            raise SpecError(
                explain(
                    "materialize: parameters or buffers without a recipe.",
                    got=[*wrong[:10], *([f"... {len(wrong)} in all"] if len(wrong) > 10 else [])],
                    needs="values from somewhere: what an __init__ computes on the meta device is lost",
                    fix="a method reset_parameters() that fills them; or init=; or, of what a state dict holds, "
                    "checkpoint= or state_dict=",
                )
            )


def _class_name(module: nn.Module) -> str:
    """Name the class of a module as users know it."""
    return type(module).__name__.removeprefix("FSDP").removeprefix("Domain")


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """List modules in the order in which constructors end."""
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


def _slots(module: nn.Module, path: str) -> Iterator[Slot]:
    tables = (module.named_parameters, module.named_buffers)
    for table in tables:
        for name, t in table(recurse=False, remove_duplicate=False):
            if t.is_meta:
                yield Slot(module, name, f"{path}.{name}" if path else name)


class Room:
    """Put memory for this rank's share in the place of every tensor without data; ties stay ties."""

    def __init__(self, model: nn.Module, recipes: Recipes) -> None:
        self.model = model
        self.slots = [slot for module in recipes.modules for slot in recipes.slots[id(module)]]
        self.hollow = [slot.get() for slot in self.slots]
        self.made: dict[int, Tensor] = {}

    def make(self) -> None:
        """Make the memory: `made` has the new tensor of each slot, by its id."""
        offloaded = private.kept_on_cpu(self.model)
        memo: dict[int, Tensor] = {}
        for old in self.hollow:
            if id(old) not in memo:
                memo[id(old)] = _empty_as(old, on_cpu=id(old) in offloaded)
        self._put([memo[id(old)] for old in self.hollow])
        self.made = {id(slot): slot.get() for slot in self.slots}

    def give_back(self) -> None:
        """Make the model as it was, without values: half of them must not be taken for all."""
        if self.made:
            self._put(self.hollow)

    def _put(self, tensors: list[Tensor]) -> None:
        for slot, tensor in zip(self.slots, tensors, strict=True):
            setattr(slot.owner, slot.name, tensor)
        with torch.no_grad():
            private.refresh_shards(self.model)


class _Scratch:
    """Lend memory for the whole tensors of one module, the same again for the next one."""

    def __init__(self) -> None:
        self.flats: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def lend(self, targets: list[Tensor]) -> list[Tensor]:
        """Give an uninitialised whole tensor for each target; those that were lent before are no longer good."""
        needs: dict[tuple[torch.dtype, torch.device], int] = {}
        spans = []
        for t in targets:
            device = private.piece_of(t).device if isinstance(t, DTensor) else t.device
            start = needs.setdefault((t.dtype, device), 0)
            spans.append(((t.dtype, device), start))
            needs[t.dtype, device] = start + t.numel()
        for key, n in needs.items():
            if key not in self.flats or self.flats[key].numel() < n:
                self.flats.pop(key, None)  # before the next one is made
                self.flats[key] = torch.empty(n, dtype=key[0], device=key[1])
        wholes = []
        for t, (key, start) in zip(targets, spans, strict=True):
            # `data` counts writes by itself, so that it can be seen whether a recipe fills it.
            whole = self.flats[key][start : start + t.numel()].view(t.shape).data
            wholes.append(nn.Parameter(whole, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else whole)
        return wholes


def initialise(recipes: Recipes, room: Room, modules: list[nn.Module]) -> None:
    """Run the recipes of some modules."""

    def run() -> None:
        done: set[int] = set()
        scratch = _Scratch()
        with torch.no_grad(), _rank_0_draws(room.made):
            # A module whose recipe reaches below comes as one, with the children first inside of it.
            outer = {id(m): m for m in modules if len(recipes.reach(m)) > 1}
            inside = {id(n) for m in outer.values() for n in recipes.reach(m) if n is not m}
            for module in modules:
                if id(module) not in inside:
                    _run_recipe(module, recipes, room.made, done, scratch)

    if modules:
        everyone(team(), "materialize: an init function failed.", run, fix="see above")


def _empty_as(old: Tensor, *, on_cpu: bool) -> Tensor:
    value: Tensor
    if isinstance(old, DTensor):
        device = "cpu" if on_cpu else old.device_mesh.device_type
        held = private.piece_of(old)
        value = laid_as(old, torch.empty(held.shape, dtype=old.dtype, device=device))
    else:
        value = torch.empty_like(old, device=_default_device())
    if isinstance(old, nn.Parameter):
        value = nn.Parameter(value, requires_grad=old.requires_grad)
    value.__dict__.update(old.__dict__)
    return value


def _default_device() -> torch.device:
    device = torch.get_default_device()
    return torch.device("cpu") if device.type == "meta" else device


@contextlib.contextmanager
def _rank_0_draws(made: Mapping[int, Tensor]) -> Iterator[None]:
    """Let every rank draw from rank 0's generators, of all devices on which there are tensors."""
    with contextlib.ExitStack() as stack:
        if dist.is_initialized() and dist.get_world_size() > 1:
            for kind in sorted({t.device.type for t in made.values()} | {"cpu"}):
                stack.enter_context(first_ranks_generator(None, torch.device(kind), "materialize"))
        yield


def _run_recipe(
    module: nn.Module, recipes: Recipes, made: Mapping[int, Tensor], done: set[int], scratch: _Scratch
) -> None:
    """Run the recipe of a module on whole tensors, and keep this rank's rows of them."""
    reach = recipes.reach(module)
    slots = [slot for m in reach for slot in recipes.slots[id(m)]]
    if not slots:
        return
    wholes = {id(slot): whole for slot, whole in zip(slots, scratch.lend([made[id(s)] for s in slots]), strict=True)}
    others = [p for m in module.modules() if m not in reach for p in m.parameters(recurse=False)]
    versions = [private.version_of(p) for p in others]
    try:
        for slot in slots:
            setattr(slot.owner, slot.name, wholes[id(slot)])
        for m in reach:
            recipe = recipes.of(m)
            if recipe is not None and (recipes.slots[id(m)] or m is module):
                recipe()
        for slot in slots:
            target = made[id(slot)]
            found = _filled(slot, wholes[id(slot)], target, module)
            if id(target) not in done:  # a tie keeps what its first owner drew
                done.add(id(target))
                held_of(target).copy_(narrowed(found.detach(), share_of(target)))
    finally:
        for slot in slots:
            setattr(slot.owner, slot.name, made[id(slot)])
    written = [p for p, version in zip(others, versions, strict=True) if private.version_of(p) != version]
    if written:
        where = recipes.names[id(module)] or "the root"
        raise CheckpointError(
            explain(
                f"materialize: the recipe of {where} writes into modules below it.",
                got=f"{len(written)} of their parameters written, e.g. {tuple(written[0].shape)}, which lie in shards",
                needs="a recipe of the module's own parameters and buffers: each module has its own turn",
                fix="let reset_parameters() leave other modules alone; or init=, which is called with every module",
            )
        )


def _filled(slot: Slot, whole: Tensor, target: Tensor, module: nn.Module) -> Tensor:
    """Give what a recipe has put into a slot."""
    found = slot.get()
    if found is whole and private.version_of(whole) == 0 and whole.numel():
        got = f"{slot.path} {tuple(whole.shape)} as it was after the recipe of a {_class_name(module)}"
        needs = "all parameters and buffers filled"
        fix = "fill it in reset_parameters() of its module; or give init="
        raise CheckpointError(explain("materialize: a recipe leaves values out.", got=got, needs=needs, fix=fix))
    if found.shape != target.shape or found.is_meta:
        got = f"{slot.path}: {tuple(found.shape)} on {found.device} after its recipe, {tuple(target.shape)} before"
        needs, fix = "values of the shape that the model was parallelized with", "fill the tensor in place"
        raise CheckpointError(explain("materialize: a recipe changes a shape.", got=got, needs=needs, fix=fix))
    return found


def held_of(t: Tensor) -> Tensor:
    """Give the memory in which a rank has its rows of a tensor."""
    return private.piece_of(t).detach() if isinstance(t, DTensor) else t.detach()
