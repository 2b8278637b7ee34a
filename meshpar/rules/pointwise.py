"""Functions that work element by element: operands are aligned, then every rank computes its piece.

Invariant: the output is sharded wherever an operand is, and nothing moves but operands that lie elsewhere. A plain
operand that spans a sharded dim is cut, not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from meshpar import pieces
from meshpar.errors import ShardingError, explain
from meshpar.spmd import RULES, call, functions, gather_call, name_of, rule

NATIVE = """
    abs neg exp log sqrt rsqrt square reciprocal sin cos tanh sigmoid relu silu gelu erf sign floor ceil
    add sub mul div pow maximum minimum clamp
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __neg__ __pow__ __abs__
"""
"""Tested to be right in DTensor when all operands lie alike (tests/rules/test_pointwise.py)."""

LOCAL = """
    absolute negative positive exp2 expm1 log2 log10 log1p tan asin acos atan arcsin arccos arctan sinh cosh asinh
    acosh atanh arcsinh arccosh arctanh erfc erfinv expit logit sgn signbit round trunc fix frac isnan isinf isfinite
    isposinf isneginf isreal logical_not bitwise_not digamma psi lgamma gammaln polygamma i0 i0e i1 i1e sinc
    nan_to_num relu6 elu selu celu mish softplus hardtanh hardswish hardsigmoid leaky_relu logsigmoid softsign
    tanhshrink hardshrink softshrink threshold deg2rad rad2deg angle conj conj_physical resolve_conj resolve_neg
    clamp_min clamp_max clip ndtr log_ndtr entr erfcx
    subtract multiply divide true_divide floor_divide remainder fmod float_power atan2 arctan2 fmax fmin hypot
    copysign nextafter logaddexp logaddexp2 eq ne lt le gt ge not_equal less less_equal greater greater_equal
    logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift
    lerp where addcmul addcdiv masked_fill xlogy xlog1py heaviside gcd lcm isclose rsub ldexp polar complex
    float half double bfloat16 int long short bool char byte cfloat cdouble zeros_like ones_like full_like empty_like
    __rtruediv__ __rdiv__ __div__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __rpow__ __eq__ __ne__ __lt__ __le__
    __gt__ __ge__ __and__ __or__ __xor__ __rand__ __ror__ __rxor__ __invert__ __lshift__ __rshift__ __pos__
"""
"""Run on the local pieces; any of them may broadcast its operands."""

IN_PLACE = """
    __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__
    abs_ neg_ exp_ log_ sqrt_ rsqrt_ square_ reciprocal_ sin_ cos_ tanh_ sigmoid_ relu_ silu_ erf_ sign_ floor_ ceil_
    round_ trunc_ add_ sub_ mul_ div_ pow_ clamp_ clamp_min_ clamp_max_ subtract_ multiply_ divide_ lerp_ addcmul_
    addcdiv_ masked_fill_ copy_ fill_ zero_ logical_and_ logical_or_ logical_not_ leaky_relu_ elu_ celu_ selu_ hardtanh_
    relu6_ threshold_ nan_to_num_ remainder_ fmod_ eq_ ne_ lt_ le_ gt_ ge_
"""


def broadcast_placements(
    operands: Sequence[Tensor], shape: Sequence[int]
) -> tuple[DeviceMesh, list[Placement]]:
    """Choose where the output of broadcast operands lies: as its largest sharded operand, axis by axis."""
    activations = [x for x in operands if isinstance(x, DTensor)]
    mesh = activations[0].device_mesh
    placements: list[Placement] = []
    for axis in range(mesh.ndim):
        choices = []
        for x in activations:
            placement = x.placements[axis]
            if pieces.is_plain_shard(placement):
                dim = placement.dim + len(shape) - x.dim()
                if shape[dim] == x.shape[placement.dim]:
                    choices.append((x.numel(), dim))
        placements.append(Shard(max(choices)[1]) if choices else Replicate())
    return mesh, placements


def align(
    x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], op: str
) -> Tensor:
    """Give the local piece of an operand of a broadcast whose output has `shape` and lies in `placements`."""
    own: list[Placement] = []
    grad: list[Placement] = []
    for placement in placements:
        keep: Placement = Replicate()
        if isinstance(placement, Shard):
            dim = placement.dim - (len(shape) - x.dim())
            if dim >= 0 and x.shape[dim] == shape[placement.dim]:
                keep = Shard(dim)
        own.append(keep)
        grad.append(Partial() if keep.is_replicate() and not placement.is_replicate() else keep)
    if isinstance(x, DTensor):
        return pieces.local(pieces.moved(x, own, op), grad)
    return pieces.scale_grad(pieces.cut(x, mesh, own), pieces.part_factor(mesh, placements))


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]


def _alike(operands: list[Tensor]) -> bool:
    first = operands[0]
    return all(
        isinstance(x, DTensor)
        and x.placements == first.placements  # type: ignore[attr-defined]
        and x.shape == first.shape
        and not any(p.is_partial() for p in x.placements)
        for x in operands
    )


def map_pieces(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an elementwise function on aligned local pieces."""
    operands = _tensors(args, kwargs)
    op = name_of(func)
    shape = torch.broadcast_shapes(*(x.shape for x in operands))
    mesh, placements = broadcast_placements(operands, shape)

    def enter(x: Any) -> Any:
        return align(x, mesh, placements, shape, op) if isinstance(x, Tensor) else x

    local_args, local_kwargs = pytree.tree_map(enter, (args, kwargs))
    return pieces.whole(func(*local_args, **local_kwargs), mesh, placements, shape)


def _native(func: Callable[..., Any]) -> Callable[..., Any]:
    def handler(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is not None:
            return _into(func, args, kwargs)
        operands = [x for x in args if isinstance(x, Tensor)]
        if operands and _alike(operands) and not any(isinstance(v, Tensor) for v in kwargs.values()):
            return func(*args, **kwargs)
        return map_pieces(func, args, kwargs)

    return handler


def _mapped(func: Callable[..., Any]) -> Callable[..., Any]:
    def handler(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is not None:
            return _into(func, args, kwargs)
        if kwargs.pop("inplace", False):
            result = map_pieces(func, args, kwargs)
            return args[0].copy_(result)
        return map_pieces(func, args, kwargs)

    return handler


def _into(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = kwargs.pop("out")
    return _write(out, call(func, args, kwargs), name_of(func))


def _write(target: Any, value: Tensor, op: str) -> DTensor:
    if not isinstance(target, DTensor):
        raise ShardingError(
            explain(
                f"{op}: cannot write activations into a plain tensor.",
                got=f"a plain tensor {tuple(target.shape)} to write into",
                needs="an activation as the target: a plain tensor is the same on every rank, these values differ",
                fix="make it with zeros_like(x) or x.new_zeros(...), or write y = y + x",
            )
        )
    if not isinstance(value, DTensor):
        value = pieces.lift(value, target.device_mesh)
    if value.shape != target.shape:
        value = call(torch.Tensor.expand, (value, target.shape), {})
    return target.copy_(pieces.moved(value, target.placements, op).to(target.dtype))


def _in_place(func: Callable[..., Any], outer: Callable[..., Any] | None) -> Callable[..., Any]:
    op = name_of(func)

    def handler(target: Any, *args: Any, **kwargs: Any) -> Any:
        others = _tensors(args, kwargs)
        if isinstance(target, DTensor) and _alike([target, *others]):
            return func(target, *args, **kwargs)
        if func is torch.Tensor.copy_:
            return _write(target, args[0] if args else kwargs["src"], op)
        if outer is None:
            return gather_call(func, (target, *args), kwargs, why="written in place from operands that lie elsewhere")
        return _write(target, call(outer, (target, *args), kwargs), op)

    return handler


def _outer(name: str) -> Callable[..., Any] | None:
    """Find the function that returns what an in-place function writes."""
    plain = f"__{name[3:]}" if name.startswith("__i") else name.rstrip("_")
    found = getattr(torch.Tensor, plain, None) or getattr(torch.nn.functional, plain, None)
    return found if callable(found) else None


for _function in functions(*NATIVE.split()):
    rule(_function, status="native")(_native(_function))
for _function in functions(*LOCAL.split()):
    rule(_function)(_mapped(_function))
for _name in IN_PLACE.split():
    for _function in functions(_name):
        if _function not in RULES:  # __idiv__ is __itruediv__
            rule(_function)(_in_place(_function, _outer(_name)))


def keep_shape(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make the handler of a function that copies or converts its first argument, looking at others only for type."""

    def handler(x: Any, *args: Any, **kwargs: Any) -> Any:
        rest, named = pytree.tree_map(lambda v: pieces.local(v) if isinstance(v, DTensor) else v, (args, kwargs))
        if not isinstance(x, DTensor):
            return func(x, *rest, **named)
        return pieces.whole(func(pieces.local(x), *rest, **named), x.device_mesh, x.placements, x.shape)

    return handler


for _function in functions("to", "type", "type_as", "contiguous", "clone", "cpu", "cuda", "real", "imag"):
    rule(_function)(keep_shape(_function))
