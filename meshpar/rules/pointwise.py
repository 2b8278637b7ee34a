"""Functions that work element by element: operands are aligned, then every rank computes its piece.

Invariant: the output is sharded wherever an operand is, and nothing moves but operands that lie elsewhere. A plain
operand that spans a sharded dim is cut, not sent.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F

from meshpar import canvas, pieces, private
from meshpar.gathering import check_targets, gather_call, layout_after
from meshpar.private import pytree
from meshpar.registry import RULES, functions, inplace_position, name_of, rule
from meshpar.spmd import call

ELEMENTWISE = """
    abs neg exp log sqrt rsqrt square reciprocal sin cos tanh sigmoid relu silu gelu erf sign floor ceil
    add sub mul div pow maximum minimum clamp
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __neg__ __pow__ __abs__
    absolute negative positive exp2 expm1 log2 log10 log1p tan asin acos atan arcsin arccos arctan sinh cosh asinh
    acosh atanh arcsinh arccosh arctanh erfc erfinv expit logit sgn signbit round trunc fix frac isnan isinf isfinite
    isposinf isneginf isreal logical_not bitwise_not digamma psi lgamma gammaln polygamma i0 i0e i1 i1e sinc
    nan_to_num relu6 elu selu celu mish softplus hardtanh hardswish hardsigmoid leaky_relu logsigmoid softsign
    tanhshrink hardshrink softshrink threshold deg2rad rad2deg angle conj conj_physical resolve_conj resolve_neg
    clamp_min clamp_max clip ndtr log_ndtr entr erfcx
    subtract multiply divide true_divide floor_divide remainder fmod float_power atan2 arctan2 fmax fmin hypot
    copysign nextafter logaddexp logaddexp2 eq ne lt le gt ge not_equal less less_equal greater greater_equal
    logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift
    lerp addcmul addcdiv masked_fill xlogy xlog1py heaviside gcd lcm isclose rsub ldexp polar complex
    float half double bfloat16 int long short bool char byte cfloat cdouble zeros_like ones_like full_like empty_like
    __rtruediv__ __rdiv__ __div__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __rpow__ __eq__ __ne__ __lt__ __le__
    __gt__ __ge__ __and__ __or__ __xor__ __rand__ __ror__ __rxor__ __invert__ __lshift__ __rshift__ __pos__
"""
"""Run on the local pieces; any of them may broadcast its operands.

DTensor does the first two lines right too where operands lie alike (tests/rules/test_pointwise.py was run on both
ways), but on a mesh of three axes it searches 0.1 to 0.8 s for every new shape, in each process (torch 2.13).
"""

IN_PLACE = (
    *["__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__imod__", "__ipow__"],
    *["__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "zero_", "fill_"],
    *(f"{name}_" for name in ELEMENTWISE.split() if not name.startswith("__") and functions(f"{name}_")),
)
"""Write what the function without the underscore gives."""


def broadcast_placements(operands: Sequence[Tensor], shape: Sequence[int]) -> tuple[DeviceMesh, list[Placement]]:
    """Choose where the output of broadcast operands lies, axis by axis: sharded wherever an operand is.

    The largest operand decides, the first of equal ones; one that broadcasts along the dim only where no other is
    sharded there.
    """
    activations = [x for x in operands if isinstance(x, DTensor)]
    mesh = activations[0].device_mesh
    placements: list[Placement] = []
    used: set[int] = set()
    for axis in range(mesh.ndim):
        choices = []
        for i, x in enumerate(activations):
            placement = x.placements[axis]
            if pieces.is_plain_shard(placement):
                dim = placement.dim + len(shape) - x.dim()  # type: ignore[attr-defined]
                nested = placement in x.placements[:axis]
                if dim not in used or nested:
                    choices.append((shape[dim] == x.shape[placement.dim], x.numel(), -i, dim))  # type: ignore[attr-defined]
        dim = max(choices)[3] if choices else -1
        placements.append(Shard(dim) if choices else Replicate())
        if choices and mesh.size(axis) > 1:
            used.add(dim)
    return mesh, placements


def align(x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], op: str) -> Tensor:
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
    return pieces.cut(pieces.as_part(x, mesh, placements), mesh, own)


def _tensors(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    return [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]


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
    if _alike(operands):
        first: Any = operands[0]
        mesh, placements, shape = first.device_mesh, first.placements, first.shape
        local_args = [pieces.local(x) if isinstance(x, DTensor) else x for x in args]
        local_kwargs = {key: pieces.local(x) if isinstance(x, DTensor) else x for key, x in kwargs.items()}
        return pieces.whole(func(*local_args, **local_kwargs), mesh, placements, shape)
    op = name_of(func)
    shape = torch.broadcast_shapes(*(x.shape for x in operands))
    mesh, placements = broadcast_placements(operands, shape)

    def enter(x: Any) -> Any:
        return align(x, mesh, placements, shape, op) if isinstance(x, Tensor) else x

    return pieces.whole(
        func(*[enter(x) for x in args], **{key: enter(x) for key, x in kwargs.items()}), mesh, placements, shape
    )


def _sgn(x: Tensor) -> Tensor:
    """Take signs; the gradient of torch.sgn is a tensor without memory, on which DTensor crashes (torch 2.13)."""
    return torch.sgn(x) if x.is_complex() else torch.sign(x)


def _handler(func: Callable[..., Any]) -> Callable[..., Any]:
    op = name_of(func)
    at = inplace_position(func) if isinstance(func, types.FunctionType) else None
    func = _sgn if getattr(func, "__name__", "") == "sgn" else func

    def handler(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is not None:
            out = kwargs.pop("out")
            return write_into(out, handler(*args, **kwargs), op, cast=False)
        if at is not None:
            inplace = kwargs.pop("inplace", False)
            if len(args) > at:
                args, inplace = (*args[:at], *args[at + 1 :]), args[at]
            if inplace:
                target, rest = (args[0], args[1:]) if args else (kwargs.pop("input"), ())
                return _write_mapped(func, target, rest, kwargs, op)
        return map_pieces(func, args, kwargs)

    return handler


def write_into(target: Any, value: Any, op: str, *, cast: bool = True) -> Any:
    """Write values into an activation, or into several, and give it back.

    Args:
        target: an activation, or a tuple of them.
        value: what to write, of a shape that expands to the target's, plain or not.
        op: name of the op, for the record and for errors.
        cast: whether any dtype may be written into any other, as `copy_` does and arithmetic does not.

    Raises:
        ShardingError: the target is a plain tensor.
        RuntimeError: a dtype that torch would refuse too.
    """
    if isinstance(target, tuple | list):
        parts = [write_into(t, v, op, cast=cast) for t, v in zip(target, value, strict=True)]
        return type(value)(parts) if isinstance(value, tuple) and type(value) is not tuple else tuple(parts)
    check_targets(target, op)
    if not cast:
        _check_cast(value.dtype, target.dtype)
    if not isinstance(value, DTensor):
        value = pieces.lift(value, target.device_mesh)
    if value.shape != target.shape:
        value = call(torch.Tensor.expand, (value, target.shape), {})
    value = pieces.moved(value, target.placements, op)
    if value.dtype != target.dtype:
        value = map_pieces(Tensor.to, (value, target.dtype), {})
    return pieces.overwrite(target, value)


def _check_cast(given: torch.dtype, wanted: torch.dtype) -> None:
    if not torch.can_cast(given, wanted):
        text = f"result type {given} can't be cast to the desired output type {wanted}"
        raise RuntimeError(text)


def _write_mapped(
    func: Callable[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], op: str
) -> DTensor:
    """Compute on the pieces, then write: the source is a copy, since the backward may need it as it was."""
    check_targets(target, op)
    shape = torch.broadcast_shapes(target.shape, *(x.shape for x in _tensors(args, kwargs)))
    if shape != target.shape:
        text = f"output with shape {list(target.shape)} doesn't match the broadcast shape {list(shape)}"
        raise RuntimeError(text)
    if private.is_sole_owner(target) and func in _SAVE_RESULTS and _alike(_tensors((target, *args), kwargs)):
        # In place, torch saves the result, which the next op saves anyway, rather than the input.
        value = map_pieces(functools.partial(_in_place_on_a_copy, func), (target, *args), kwargs)
        return pieces.overwrite(target, value, alone=True)
    source = map_pieces(torch.clone, (target,), {}) if torch.is_grad_enabled() else target
    return write_into(target, map_pieces(func, (source, *args), kwargs), op, cast=False)  # type: ignore[no-any-return]


_SAVE_RESULTS = (F.relu, F.leaky_relu, F.elu, F.selu, F.celu)
"""What torch differentiates from the result where it runs in place, of the dtype of the input."""


def _in_place_on_a_copy(func: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return func(x.clone(), *args, inplace=True, **kwargs)


def _in_place(func: Callable[..., Any], outer: Callable[..., Any]) -> Callable[..., Any]:
    op = name_of(func)

    def handler(target: Any, *args: Any, **kwargs: Any) -> Any:
        return _write_mapped(outer, target, args, kwargs, op)

    return handler


def _outer(name: str) -> Callable[..., Any]:
    """Find the function that returns what an in-place function writes."""
    special: dict[str, Callable[..., Any]] = {"zero_": torch.zeros_like, "fill_": torch.fill, "sgn_": _sgn}
    if name in special:
        return special[name]
    plain = f"__{name[3:]}" if name.startswith("__i") else name.rstrip("_")
    plain = "__truediv__" if plain == "__div__" else plain
    found = getattr(torch.Tensor, plain, None) or getattr(torch.nn.functional, plain, None)
    assert callable(found), name
    return found  # type: ignore[no-any-return]


for _function in functions(*ELEMENTWISE.split()):
    rule(_function)(_handler(_function))
for _name in IN_PLACE:
    for _function in functions(_name):
        if _function not in RULES:  # __idiv__ is __itruediv__
            rule(_function)(_in_place(_function, _outer(_name)))


@rule(torch.Tensor.copy_)
def copy_(target: Any, src: Tensor, non_blocking: bool = False) -> Any:  # noqa: FBT001, FBT002
    """Write a tensor into an activation, cast and expanded."""
    return write_into(target, src, "Tensor.copy_")


def _part_setter(name: str) -> Callable[..., None]:
    getters = {part: getattr(torch.Tensor, part).__get__ for part in ("real", "imag")}
    op = f"Tensor.{name}.__set__"

    def handler(target: Any, value: Any) -> None:
        """Write into the real or the imaginary part of an activation."""
        check_targets(target, op)
        if not target.is_complex() and name == "real":
            write_into(target, torch.as_tensor(value), op)
            return
        parts = {part: map_pieces(torch.clone, (call(get, (target,), {}),), {}) for part, get in getters.items()}
        dtype = parts[name].dtype
        write_into(parts[name], value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype), op)
        write_into(target, map_pieces(torch.complex, (parts["real"], parts["imag"]), {}), op)

    return handler


for _name in ("real", "imag"):
    rule(getattr(torch.Tensor, _name).__set__)(_part_setter(_name))


@rule(torch.where, torch.Tensor.where)
def where(*args: Any, **kwargs: Any) -> Any:
    """Choose element by element; with a condition alone, its size depends on the data and it is gathered."""
    if len(args) + len(kwargs) == 1:
        return gather_call(torch.where, args, kwargs, why="the size of the result depends on the data")
    return _WHERE(*args, **kwargs)


_WHERE = _handler(torch.where)


@rule(*functions("prelu"))
def prelu(input: Any, weight: Tensor) -> Any:
    """Scale what is negative by one weight, or by one a channel."""
    torch.prelu(*(torch.empty(x.shape, dtype=x.dtype, device="meta") for x in (input, weight)))  # torch's errors
    if input.dim() > 1 and weight.dim() == 1:
        sizes = [-1] + [1] * (input.dim() - 2)
        weight = (
            call(torch.Tensor.reshape, (weight, sizes), {}) if isinstance(weight, DTensor) else weight.reshape(sizes)
        )
    return map_pieces(_scaled_negatives, (input, weight), {})


def _scaled_negatives(x: Tensor, scale: Tensor) -> Tensor:
    return torch.prelu(x, scale.reshape(-1)) if x.numel() else x * scale


def keep_shape(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make the handler of a function that copies or converts its first argument, looking at others only for type."""

    def handler(x: Any, *args: Any, **kwargs: Any) -> Any:
        rest, named = pytree.tree_map(lambda v: pieces.local(v) if isinstance(v, DTensor) else v, (args, kwargs))
        if not isinstance(x, DTensor):
            return func(x, *rest, **named)
        if canvas.is_blank(x) and not named.get("memory_format"):
            return canvas.mapped(x, lambda number: func(number, *rest, **named))
        out = func(pieces.local(x), *rest, **named)
        if not isinstance(out, Tensor):
            return out  # x.type() names the type
        return pieces.whole(out, x.device_mesh, x.placements, x.shape)

    return handler


for _function in functions("to", "type", "type_as", "contiguous", "clone", "cpu", "cuda", "real", "imag"):
    rule(_function)(keep_shape(_function))
for _property in ("real", "imag"):
    _function = getattr(torch.Tensor, _property).__get__
    rule(_function)(keep_shape(_function))


def _constant(x: DTensor) -> Tensor:
    with torch.no_grad():
        return x.to_local()


def _new(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make the handler of `new_zeros` and its kin: a dim that has the size of a sharded dim of x is sharded too."""

    def handler(x: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        ghost = func(torch.empty(x.shape, dtype=x.dtype, device="meta"), *args, **{**kwargs, "device": "meta"})
        placements = layout_after(x, ghost)
        size = pieces.local_shape(ghost.shape, x.device_mesh, placements)
        named = {key: value for key, value in kwargs.items() if key != "size"}
        rest = (kwargs["fill_value"],) if "fill_value" in kwargs else args[1:] if func is torch.Tensor.new_full else ()
        named.pop("fill_value", None)
        return pieces.whole(func(_constant(x), size, *rest, **named), x.device_mesh, placements, ghost.shape)

    return handler


for _function in functions("new_zeros", "new_ones", "new_empty", "new_full"):
    rule(_function)(_new(_function))


@rule(torch.Tensor.new_tensor)
def new_tensor(x: DTensor, *args: Any, **kwargs: Any) -> Any:
    """Make a tensor of given numbers: the same on every rank."""
    made = _constant(x).new_tensor(*args, **kwargs)
    return pieces.whole(made, x.device_mesh, pieces.replicated(x.device_mesh), made.shape)
