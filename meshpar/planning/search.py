"""`search`: the meshes of a number of devices, ranked by what they are estimated to do, those that fit first."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshpar.errors import MeshparError, SpecError, explain
from meshpar.planning.plan import Settings, Shapes, plan_at
from meshpar.planning.rates import Rates
from meshpar.planning.report import Plan
from meshpar.planning.worlds import mesh_sizes
from meshpar.spec import MeshSpec
from meshpar.tables import aligned, html_table, parse_bytes, tell_bytes


@dataclass(frozen=True)
class Search:
    """Hold the meshes of a search, the best first.

    Args:
        plans: those that fit, by the samples that they are estimated to take a second, then the others by memory.
        memory_bytes: what a device has.
        refused: meshes on which the model cannot run, with the reason.
    """

    plans: tuple[Plan, ...]
    memory_bytes: int
    refused: dict[MeshSpec, str]

    @property
    def best(self) -> Plan:
        """Give the best plan that fits.

        Raises:
            SpecError: none does.
        """
        if not self.plans or not self.plans[0].fits(self.memory_bytes):
            least = min((p.peak_bytes for p in self.plans), default=0)
            raise SpecError(
                explain(
                    "search: no mesh fits.",
                    got=f"{tell_bytes(least)} a rank at the least, {tell_bytes(self.memory_bytes)} of memory",
                    needs="a mesh whose every rank fits",
                    fix='more devices, checkpoint="all", precision="bf16", or a smaller batch',
                )
            )
        return self.plans[0]

    def rows(self) -> list[tuple[str, ...]]:
        """Give the table, its head first."""
        head = ("mesh", "fits", "peak", "step (estimate)", "messages (estimate)", "steps x data a second", "gathers")
        found: list[tuple[str, ...]] = [head]
        for p in self.plans:
            slowest = max(p.ranks.values(), key=lambda r: r.compute_s + r.sending_s)
            found.append(
                (
                    short(p.spec),
                    "yes" if p.fits(self.memory_bytes) else "no",
                    tell_bytes(p.peak_bytes),
                    f"{p.step_s * 1e3:.3g} ms",
                    f"{slowest.sending_s * 1e3:.3g} ms",
                    f"{parts_per_s(p):,.0f}" if parts_per_s(p) >= 100 else f"{parts_per_s(p):.3g}",
                    str(len(p.gathers())),
                )
            )
        return found

    def __str__(self) -> str:
        """Give the table as text."""
        told = [f"{short(spec)}: cannot run: {why}" for spec, why in self.refused.items()]
        return "\n".join([*aligned(self.rows()), *told])

    def _repr_html_(self) -> str:
        """Give the table for a notebook, meshes that do not fit marked."""
        rows = self.rows()
        told = [f"<p>{html.escape(f'{short(spec)}: cannot run: {why}')}</p>" for spec, why in self.refused.items()]
        return "".join([html_table(rows, marked=[i for i, row in enumerate(rows[1:]) if row[1] == "no"]), *told])


def short(spec: MeshSpec) -> str:
    """Write a mesh without the axes of one rank."""
    return ",".join(f"{axis}={size}" for axis, size in spec.sizes().items() if size > 1) or "data=1"


def parts_per_s(found: Plan) -> float:
    """Estimate the parts of the batch (what one data rank gives to the model) that are trained on in a second."""
    return mesh_sizes(found.spec)["data"] / found.step_s


def search(
    model: nn.Module,
    input_shapes: Shapes,
    *,
    devices: int = 64,
    memory: str | int = "80GB",
    max_domain: int | None = None,
    optimizer: str | Callable[[list[Tensor]], torch.optim.Optimizer] | None = "adamw",
    loss: Callable[[Any], Tensor] | None = None,
    rates: Rates | None = None,
    **options: Any,
) -> Search:
    """Plan every mesh of a number of devices, and rank them.

    Args:
        model: any module; it is not touched.
        input_shapes: what one data rank gives to the model, as in `plan`: the same on every mesh, so a mesh with more
            data ranks trains on more samples in a step.
        devices: number of devices.
        memory: what a device has: "80GB", "80GiB", or bytes.
        max_domain: the most ranks to split the rows over; by default all devices.
        optimizer: as in `plan`.
        loss: as in `plan`.
        rates: as in `plan`.
        **options: as of `parallelize`; with a `tensor_plan` meshes with a tensor axis are tried, too.

    Returns:
        A `Search`: plans of the rank in the middle of each mesh, which sends the most.

    Communication:
        None.

    Example:
        >>> from torch import nn
        >>> found = search(nn.Conv2d(3, 8, 3, padding=1), (1, 3, 64, 64), devices=4)
        >>> [short(p.spec) for p in found.plans if p.fits("80GB")][0]
        'data=4'
    """
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        got = f"devices={devices!r}"
        raise SpecError(explain("search: no number of devices.", got=got, needs="1 or more", fix="devices=64"))
    room = parse_bytes(memory)
    settings = Settings(optimizer, loss, rates or Rates(), options)
    plans: list[Plan] = []
    refused: dict[MeshSpec, str] = {}
    for spec in meshes(devices, max_domain or devices, with_tensor=options.get("tensor_plan") is not None):
        middle = {axis: size // 2 for axis, size in mesh_sizes(spec).items() if axis != "data"}
        try:
            plans.append(plan_at(model, spec, devices, [middle], input_shapes, settings))
        except MeshparError as error:
            refused[spec] = " ".join(str(error).split())[:200]
    if not plans and refused:
        spec, why = next(iter(refused.items()))
        needs = "a mesh on which the model runs"
        raise SpecError(explain("search: nothing can run.", got=f"{short(spec)}: {why}", needs=needs, fix="see above"))
    fit = sorted((p for p in plans if p.fits(room)), key=parts_per_s, reverse=True)
    others = sorted((p for p in plans if not p.fits(room)), key=lambda p: p.peak_bytes)
    return Search((*fit, *others), room, refused)


def meshes(devices: int, max_domain: int, *, with_tensor: bool) -> list[MeshSpec]:
    """List the meshes of data x domain x tensor for a number of devices."""
    found = []
    for tensor in _divisors(devices) if with_tensor else [1]:
        for domain in _divisors(devices // tensor):
            if domain <= max_domain:
                found.append(MeshSpec(data=devices // tensor // domain, domain=domain, tensor=tensor))
    return found


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
