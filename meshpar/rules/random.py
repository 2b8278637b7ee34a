"""Random numbers: the same on all ranks where all ranks hold the same tensor, different where they hold pieces.

Invariant: a factory in a forward (`torch.randn(...)`) draws what one process with rank 0's seed would draw, on every
rank, and leaves the generators of the other ranks as they were. A dropout mask differs along every axis that shards
its input and agrees along every other; it follows `torch.manual_seed`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshpar import pieces, record
from meshpar.gathering import gather_call, is_split
from meshpar.mesh import axis_group, coordinate
from meshpar.peers import naming
from meshpar.registry import RANDOM, functions, name_of, rule, same_numbers
from meshpar.rules.pointwise import write_into
from meshpar.rules.reduce import settled
from meshpar.spmd import call
from meshpar.traced import refuse_random

_FACTORIES = (
    "rand randn randint randperm normal bernoulli multinomial poisson binomial rand_like randn_like randint_like "
    "normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ "
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout "
    "dropout_ alpha_dropout_ feature_dropout_ feature_alpha_dropout_ rrelu rrelu_ gumbel_softmax "
    "fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices "
    "fractional_max_pool3d_with_indices scaled_dot_product_attention multi_head_attention_forward "
    "pca_lowrank svd_lowrank"
)

_INITIALISERS = [getattr(nn.init, name) for name in ("uniform_", "normal_", "trunc_normal_", "kaiming_uniform_")]
"""Those in which torch asks the mode before it draws; the others draw with methods of the tensor."""

RANDOM.update(functions(*_FACTORIES.split()))
RANDOM.update(_INITIALISERS)


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
        generator = torch.default_generator
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            generator = torch.cuda.default_generators[index]
    own = generator.get_state()
    # Generator states live on the CPU; a backend without CPU tensors needs them on its own device.
    shared = own.clone() if "gloo" in dist.get_backend() else own.to(torch.device("cuda", torch.cuda.current_device()))
    with naming(None, "world", record.here(op)):
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
        whole = torch.empty(x.shape, dtype=kwargs.get("dtype") or x.dtype, device=x.device)
        numbers = draw(func, (whole, *args), kwargs, x.device_mesh)
        return pieces.whole(pieces.cut(numbers, x.device_mesh, x.placements), x.device_mesh, x.placements, x.shape)

    return handler


for _function in functions("rand_like", "randn_like", "randint_like"):
    rule(_function)(_like(_function))


def _fill(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make the handler of `normal_` and its kin; those of `nn.init` are called with `tensor=`."""

    def handler(*args: Any, **kwargs: Any) -> DTensor:
        x, rest = (args[0], args[1:]) if args else (kwargs.pop("tensor"), ())
        mesh, placements = x.device_mesh, x.placements
        room = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        numbers = draw(func, (room, *rest), kwargs, mesh)
        return pieces.overwrite(x, pieces.whole(pieces.cut(numbers, mesh, placements), mesh, placements, x.shape))

    return handler


for _function in (
    functions("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_")
    + _INITIALISERS
):
    rule(_function)(_fill(_function))


@rule(nn.init.constant_)
def _constant(tensor: DTensor, val: float) -> Any:
    return call(Tensor.fill_, (tensor, val), {})


def _mix(seed: int, value: int) -> int:
    """Mix a number into a seed (the finaliser of SplitMix64, Steele et al. 2014)."""
    mask = (1 << 64) - 1
    z = (seed + 0x9E3779B97F4A7C15 * (value + 1)) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def piece_seed(
    mesh: DeviceMesh, placements: Sequence[Placement], op: str, generator: torch.Generator | None = None
) -> int:
    """Draw a seed for a piece: it differs along the axes that shard, and agrees along the others.

    Communication:
        None where every axis shards; a broadcast of 8 bytes along each axis of several ranks that replicates.
    """
    if torch.compiler.is_compiling():
        refuse_random(op)
    seed = torch.randint(0, 2**62, (1,), dtype=torch.int64, generator=generator)
    if mesh.device_type != "cpu":
        seed = seed.to(torch.device(mesh.device_type, torch.cuda.current_device()))
    for axis, placement in enumerate(placements):
        name = pieces.axes_of(mesh)[axis]
        if mesh.size(axis) > 1 and not placement.is_shard():
            with naming(axis_group(mesh, name), name, record.here(op)):
                dist.broadcast(seed, group=axis_group(mesh, name), group_src=0)
            record.note(record.here(op), "random", name, 8 if coordinate(mesh, name) == 0 else 0)
    number = int(seed.item())
    for axis, placement in enumerate(placements):
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


def _num_masked(name: str, num_dims: int) -> int:
    """Give the number of leading dims that a mask of whole channels has: samples and channels, or channels alone."""
    unbatched = {"dropout1d": 2, "dropout3d": 4}.get(name)
    return 1 if num_dims == unbatched else 2


def _masks_channels(name: str) -> bool:
    return name.rstrip("_") in ("dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_alpha_dropout")


def _dropout(func: Callable[..., Any]) -> Callable[..., Any]:
    op = name_of(func)
    short = getattr(func, "__name__", "")
    plain = getattr(torch.nn.functional, short.rstrip("_"), None) or getattr(torch, short.rstrip("_"))
    names = ("p", "training", "inplace")

    def handler(input: DTensor, *args: Any, **kwargs: Any) -> Any:
        if "train" in kwargs:  # the name in the functions of torch, which have no inplace
            kwargs["training"] = kwargs.pop("train")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        training, p = bool(given.get("training", True)), float(given.get("p", 0.5))
        inplace = bool(given.get("inplace", False)) or short.endswith("_")
        plain(torch.empty([1] * input.dim()), p, False)  # noqa: FBT003 (torch's errors)
        if not training or p == 0.0:
            return input
        x = settled(input, op)
        placements, piece = x.placements, pieces.local(x)
        if not is_split(x):  # every rank draws for all: the numbers of one process
            out = draw(plain, (piece, p, True), {}, x.device_mesh)
            result = pieces.whole(out, x.device_mesh, placements, x.shape)
            return write_into(input, result, op) if inplace else result
        if _masks_channels(short):
            # One number for each channel of each sample: all ranks that hold rows of it must draw the same.
            num = _num_masked(short, x.dim())
            shared = [q if isinstance(q, Shard) and q.dim < num else Replicate() for q in placements]
            seed = piece_seed(x.device_mesh, shared, op)
        else:
            seed = piece_seed(x.device_mesh, placements, op)
        with seeded(piece.device, seed):
            out = plain(piece, p, True)  # noqa: FBT003
        result = pieces.whole(out, x.device_mesh, placements, x.shape)
        return write_into(input, result, op) if inplace else result

    return handler


for _function in functions(
    *["dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"],
    *["dropout_", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_"],
):
    rule(_function)(_dropout(_function))


@rule(*functions("bernoulli"))
def bernoulli(input: DTensor, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Any:
    """Draw zeros and ones, other ones for every piece."""
    x = settled(input, "bernoulli")
    piece = pieces.local(x)
    given = {k: v for k, v in kwargs.items() if k != "out"}
    if is_split(x):
        with seeded(piece.device, piece_seed(x.device_mesh, x.placements, "bernoulli", generator)):
            out = torch.bernoulli(piece, *args, **given)
    else:  # every rank draws for all: the numbers of one process
        out = draw(torch.bernoulli, (piece, *args), {"generator": generator, **given}, x.device_mesh)
    result = pieces.whole(out, x.device_mesh, x.placements, x.shape)
    return result if kwargs.get("out") is None else write_into(kwargs["out"], result, "bernoulli")


def _rrelu(func: Callable[..., Any]) -> Callable[..., Any]:
    op = name_of(func)
    names = ("lower", "upper", "training", "inplace")

    def handler(input: DTensor, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        inplace = given.pop("inplace", False) or func is torch.rrelu_
        x = settled(input, op)
        piece = pieces.local(x)
        if given.get("training", False):
            with seeded(piece.device, piece_seed(x.device_mesh, x.placements, op)):
                out = torch.rrelu(piece, **given)
        else:
            out = torch.rrelu(piece.clone() if inplace else piece, **given)
        result = pieces.whole(out, x.device_mesh, x.placements, x.shape)
        return write_into(input, result, op) if inplace else result

    return handler


for _function in functions("rrelu", "rrelu_"):
    rule(_function)(_rrelu(_function))


@rule(torch.nn.functional.gumbel_softmax)
def gumbel_softmax(
    logits: DTensor,
    tau: float = 1,
    hard: bool = False,  # noqa: FBT001, FBT002
    eps: float = 1e-10,
    dim: int = -1,
) -> Any:
    """Sample along a dim: locally, or, where the dim is sharded, from what one process would draw."""
    if not logits.dim() or dim not in range(-logits.dim(), logits.dim()) or pieces.shard_axes(logits, dim):
        args = (logits, tau, hard, eps, dim)
        return gather_call(torch.nn.functional.gumbel_softmax, args, {}, why="it samples along a sharded dim")
    x = settled(logits, "gumbel_softmax")
    piece, sample = pieces.local(x), torch.nn.functional.gumbel_softmax
    if is_split(x):
        with seeded(piece.device, piece_seed(x.device_mesh, x.placements, "gumbel_softmax")):
            out = sample(piece, tau, hard, eps, dim)
    else:  # every rank draws for all: the numbers of one process
        out = draw(sample, (piece, tau, hard, eps, dim), {}, x.device_mesh)
    return pieces.whole(out, x.device_mesh, x.placements, x.shape)
