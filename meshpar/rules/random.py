"""Random numbers: the same on all ranks where all ranks hold the same tensor, different where they hold pieces.

Invariant: a factory in a forward (`torch.randn(...)`) draws what one process with rank 0's seed would draw, on every
rank, and leaves the generators of the other ranks as they were. A dropout mask differs along every axis that shards
its input and agrees along every other; it follows `torch.manual_seed`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshpar import pieces, record
from meshpar.mesh import axis_group, coordinate
from meshpar.spmd import RANDOM, functions, name_of, rule, same_numbers

_FACTORIES = (
    "rand randn randint randperm normal bernoulli multinomial poisson rand_like randn_like randint_like "
    "normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ "
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout rrelu gumbel_softmax"
)

RANDOM.update(functions(*_FACTORIES.split()))


@rule(same_numbers, status="plain")
def draw(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh | None) -> Any:
    """Draw random numbers from plain arguments, the same on every rank.

    Communication:
        A broadcast of the generator's state (5 kB on the CPU) from rank 0.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or (mesh is not None and mesh.size() == 1):
        return func(*args, **kwargs)
    with first_ranks_generator(kwargs.get("generator"), _device(args, kwargs), name_of(func)):
        return func(*args, **kwargs)


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    return tensors[0].device if tensors else torch.get_default_device()


@contextlib.contextmanager
def first_ranks_generator(generator: torch.Generator | None, device: torch.device, op: str) -> Iterator[None]:
    """Let every rank draw from the generator of rank 0; the generators of the others are put back afterwards."""
    if generator is None:
        cuda = device.type == "cuda"
        generator = torch.cuda.default_generators[device.index or 0] if cuda else torch.default_generator
    own = generator.get_state()
    shared = own.clone() if dist.get_backend() == "gloo" else own.to(device)
    dist.broadcast(shared, src=0)
    num_bytes = shared.numel() if dist.get_rank() == 0 else 0
    record.note(record.here(op), "random", "world", num_bytes)
    generator.set_state(shared.cpu())
    try:
        yield
    finally:
        if dist.get_rank() != 0:
            generator.set_state(own)


def _like(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make the handler of `randn_like` and its kin: the numbers that one process would draw, cut."""

    def handler(x: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        whole = torch.empty(x.shape, dtype=kwargs.get("dtype") or x.dtype, device=pieces.local(x.detach()).device)
        numbers = draw(func, (whole, *args), kwargs, x.device_mesh)
        return pieces.whole(pieces.cut(numbers, x.device_mesh, x.placements), x.device_mesh, x.placements, x.shape)

    return handler


for _function in functions("rand_like", "randn_like", "randint_like"):
    rule(_function)(_like(_function))


def _fill(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make the handler of `normal_` and its kin."""

    def handler(x: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        numbers = draw(func, (torch.empty(x.shape, dtype=x.dtype, device=x.device), *args), kwargs, x.device_mesh)
        piece = pieces.cut(numbers, x.device_mesh, x.placements)
        with torch.no_grad():
            return x.copy_(pieces.whole(piece, x.device_mesh, x.placements, x.shape))

    return handler


for _function in functions("normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_"):
    rule(_function)(_fill(_function))


def _mix(seed: int, value: int) -> int:
    """Mix a number into a seed (the finaliser of SplitMix64, Steele et al. 2014)."""
    mask = (1 << 64) - 1
    z = (seed + 0x9E3779B97F4A7C15 * (value + 1)) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def piece_seed(x: DTensor, op: str) -> int:
    """Draw a seed for this rank's piece: it differs along the axes that shard x, and agrees along the others.

    Communication:
        None while x is sharded on every axis; a broadcast of 8 bytes along each axis of several ranks that
        replicates it.
    """
    mesh = x.device_mesh
    device = torch.device("cpu") if mesh.device_type == "cpu" else pieces.local(x.detach()).device
    seed = torch.randint(0, 2**62, (1,), dtype=torch.int64).to(device)
    for axis, placement in enumerate(x.placements):
        name = pieces.axes_of(mesh)[axis]
        if mesh.size(axis) > 1 and not placement.is_shard():
            group = axis_group(mesh, name)
            dist.broadcast(seed, group=group, group_src=0)
            record.note(record.here(op), "random", name, 8 if coordinate(mesh, name) == 0 else 0)
    number = int(seed.item())
    for axis, placement in enumerate(x.placements):
        if placement.is_shard():
            number = _mix(number, coordinate(mesh, pieces.axes_of(mesh)[axis]) + 1000 * axis)
    return number & ((1 << 63) - 1)


@contextlib.contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the default generators inside the block, and put them back after it."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


_MASKED_DIMS = {"dropout1d": 2, "dropout2d": 2, "dropout3d": 2, "feature_dropout": 2, "feature_alpha_dropout": 2}


def _dropout(func: Callable[..., Any]) -> Callable[..., Any]:
    op = name_of(func)
    short = getattr(func, "__name__", "")

    def handler(input: DTensor, *args: Any, **kwargs: Any) -> Any:  # noqa: A002 (torch's name)
        names = ("p", "training", "inplace")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not given.get("training", True) or given.get("p", 0.5) == 0.0:
            return input
        x = pieces.moved(input, [p if p.is_shard() else pieces.Replicate() for p in input.placements], op)
        inplace = given.pop("inplace", False)
        placements = x.placements
        if short in _MASKED_DIMS:
            # One number for each channel of each sample: all ranks that hold rows of it must draw the same.
            shared = [p if p.is_shard() and p.dim < _MASKED_DIMS[short] else pieces.Replicate() for p in placements]
            head = pieces.whole(
                torch.empty(pieces.local_shape(x.shape, x.device_mesh, shared), dtype=x.dtype, device=x.device),
                x.device_mesh,
                shared,
                x.shape,
            )
            seed = piece_seed(head, op)
        else:
            seed = piece_seed(x, op)
        piece = pieces.local(x)
        with seeded(piece.device, seed):
            out = func(piece, **given)
        result = pieces.whole(out, x.device_mesh, placements, x.shape)
        return input.copy_(result) if inplace else result

    return handler


for _function in functions(
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"
):
    rule(_function)(_dropout(_function))


@rule(*functions("bernoulli"))
def _bernoulli(input: DTensor, *args: Any, **kwargs: Any) -> DTensor:  # noqa: A002 (torch's name)
    piece = pieces.local(input)
    with seeded(piece.device, piece_seed(input, "torch.bernoulli")):
        return pieces.whole(torch.bernoulli(piece, *args, **kwargs), input.device_mesh, input.placements, input.shape)


