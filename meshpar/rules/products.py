"""Products of vectors, matrices and batches of them: `matmul` and its kin, `addmm` and its kin, chains, `cdist`.

Invariant: each is one `contract`, with the torch function itself run on the pieces, so that dtypes under autocast and
numbers are torch's; arguments that torch refuses raise torch's error on all ranks before anything moves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshpar import private
from meshpar.gathering import gather_call
from meshpar.registry import functions, rule
from meshpar.rules.contract import Letters, contract
from meshpar.rules.pointwise import map_pieces, write_into
from meshpar.spmd import call

Triple = tuple[Letters, Letters, Letters]


@private.asked_once
def _shape(func: Callable[..., Any], shapes: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[int, ...]:
    tensors = [None if x is None else torch.empty(x[0], dtype=x[1], device="meta") for x in shapes]
    return tuple(func(*tensors, *args).shape)


def shape_after(func: Callable[..., Any], tensors: Sequence[Tensor | None], *args: Any) -> tuple[int, ...]:
    """Give the global shape of an output; raise torch's own error where it refuses."""
    real = [x for x in tensors if x is not None]
    # Autocast makes one dtype of several, which it does not do on tensors without data.
    mixed = torch.is_autocast_enabled(real[0].device.type)
    shapes = tuple(None if x is None else (tuple(x.shape), torch.float32 if mixed else x.dtype) for x in tensors)
    return _shape(func, shapes, args)


def is_activation(x: Any) -> bool:
    """Tell whether an argument is an activation."""
    return isinstance(x, DTensor)


def _product(
    func: Callable[..., Tensor], a: Any, b: Any, letters: Triple, op: str, shape: Sequence[int] | None = None
) -> Any:
    """Multiply; plain operands alone give a plain product."""
    if not (is_activation(a) or is_activation(b)):
        return func(a, b)
    return contract(a, b, letters, func, shape_after(func, (a, b)) if shape is None else shape, op)


def _written(out: Any, result: Any, op: str) -> Any:
    return result if out is None else write_into(out, result, op, cast=False)


@functools.lru_cache(maxsize=1024)
def matmul_letters(dims_a: int, dims_b: int) -> Triple:
    """Give the letters of `matmul`: batch dims are aligned at the right.

    Example:
        >>> matmul_letters(2, 3)
        (('m', 'k'), ('0', 'k', 'n'), ('0', 'm', 'n'))
    """
    num = max(dims_a, dims_b, 2) - 2
    batch = tuple(str(i) for i in range(num))
    a = (*batch[num - dims_a + 2 :], "m", "k") if dims_a > 1 else ("k",)
    b = (*batch[num - dims_b + 2 :], "k", "n") if dims_b > 1 else ("k",)
    return a, b, (*batch, *(["m"] if dims_a > 1 else []), *(["n"] if dims_b > 1 else []))


@rule(*functions("matmul", "__matmul__"))
def matmul(input: Any, other: Any, *, out: Any = None) -> Any:
    """Multiply matrices, batches of them, or vectors."""
    shape = shape_after(torch.matmul, (input, other))
    letters = matmul_letters(input.dim(), other.dim())
    return _written(out, _product(torch.matmul, input, other, letters, "matmul", shape), "matmul")


@rule(*functions("__rmatmul__"))
def rmatmul(input: Any, other: Any) -> Any:
    """Multiply with a matrix from the left."""
    return matmul(other, input)


def _split(text: str) -> Triple:
    a, b, out = (tuple(part.strip()) for part in text.replace("->", ",").split(","))
    return a, b, out


_FIXED: dict[Callable[..., Any], tuple[str, str]] = {
    torch.mm: ("mm", "mk,kn->mn"),
    torch.bmm: ("bmm", "bmk,bkn->bmn"),
    torch.mv: ("mv", "mk,k->m"),
    torch.dot: ("dot", "k,k->"),
    torch.vdot: ("vdot", "k,k->"),
    torch.outer: ("outer", "m,n->mn"),
    torch.ger: ("ger", "m,n->mn"),
}
"""Functions of two operands with a fixed number of dims."""

_SECOND = ("mat2", "vec", "vec2", "tensor", "other")
"""What torch calls their second operand."""


def _fixed(func: Callable[..., Any], name: str, letters: Triple) -> Callable[..., Any]:
    def handler(input: Any, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        second = args[0] if args else next((kwargs.pop(key) for key in _SECOND if key in kwargs), None)
        if kwargs or len(args) > 1 or not isinstance(second, Tensor):
            named = kwargs if out is None else {**kwargs, "out": out}
            return gather_call(func, (input, *(args or (second,))), named, why="arguments that no rule knows")
        shape = shape_after(func, (input, second))
        return _written(out, _product(func, input, second, letters, name, shape), name)

    return handler


for _function, (_name, _text) in _FIXED.items():
    rule(*functions(_name))(_fixed(_function, _name, _split(_text)))


@rule(*functions("inner"))
def inner(input: Any, other: Any, *, out: Any = None) -> Any:
    """Sum the products over the last dim of both."""
    shape = shape_after(torch.inner, (input, other))
    if input.dim() == 0 or other.dim() == 0:
        result = map_pieces(torch.mul, (input, other), {})
    else:
        a = tuple(f"a{i}" for i in range(input.dim() - 1))
        b = tuple(f"b{i}" for i in range(other.dim() - 1))
        letters = ((*a, "k"), (*b, "k"), (*a, *b))
        result = _product(torch.inner, input, other, letters, "inner", shape)
    return _written(out, result, "inner")


@rule(*functions("vecdot"))
def vecdot(x: Any, y: Any, *, dim: int = -1, out: Any = None) -> Any:
    """Sum the products over a dim of both, the first conjugated."""
    func = functools.partial(torch.linalg.vecdot, dim=dim)
    shape = shape_after(_vecdot, (x, y), dim)
    num = max(x.dim(), y.dim())
    names = tuple(str(i) for i in range(num))
    letters = (names[num - x.dim() :], names[num - y.dim() :], tuple(n for i, n in enumerate(names) if i != dim % num))
    return _written(out, _product(func, x, y, letters, "linalg.vecdot", shape), "linalg.vecdot")


def _vecdot(x: Tensor, y: Tensor, dim: int) -> Any:
    return torch.linalg.vecdot(x, y, dim=dim)


# a product added to something


def _bmm_sum(a: Tensor, b: Tensor) -> Any:
    return torch.einsum("bmk,bkn->mn", a, b)


_ADDED: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "addmm": (torch.addmm, torch.mm, "mk,kn->mn"),
    "addbmm": (torch.addbmm, _bmm_sum, "bmk,bkn->mn"),
    "baddbmm": (torch.baddbmm, torch.bmm, "bmk,bkn->bmn"),
    "addmv": (torch.addmv, torch.mv, "mk,k->m"),
    "addr": (torch.addr, torch.outer, "m,n->mn"),
}

_FACTORS = (("mat1", "batch1", "mat", "vec1"), ("mat2", "batch2", "vec", "vec2"))


def _factors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Take both factors out of the arguments."""
    found = list(args)
    for names in _FACTORS[len(found) :]:
        found += [kwargs.pop(name) for name in names if name in kwargs]
    return found


def plus(product: Any, summand: Any) -> Any:
    """Add something to a product, whose dtype decides, as under autocast it does."""
    if summand.dtype != product.dtype:
        convert = map_pieces if is_activation(summand) else _plainly
        summand = convert(Tensor.to, (summand, product.dtype), {})
    return map_pieces(torch.add, (product, summand), {})


def _plainly(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _adding(name: str, *, in_place: bool) -> Callable[..., Any]:
    func, inner_func, text = _ADDED[name]
    letters = _split(text)

    def handler(input: Any, *args: Any, beta: Any = 1, alpha: Any = 1, out: Any = None, **kwargs: Any) -> Any:
        factors = _factors(args, kwargs)
        if len(factors) != 2 or kwargs or not isinstance(input, Tensor):
            rest = {**kwargs, "beta": beta, "alpha": alpha, **({} if out is None else {"out": out})}
            return gather_call(func, (input, *factors), rest, why="arguments that no rule knows")
        a, b = factors
        shape = shape_after(_scaled, (input, a, b), func, beta, alpha)
        if in_place and shape != tuple(input.shape):
            text = f"output with shape {list(input.shape)} doesn't match the broadcast shape {list(shape)}"
            raise RuntimeError(text)
        result = _product(inner_func, a, b, letters, name)
        if alpha != 1:
            scale = map_pieces if is_activation(result) else _plainly
            result = scale(torch.mul, (result, alpha), {})
        if beta != 0:  # else torch leaves the summand alone, whatever is in it
            scale = map_pieces if is_activation(input) else _plainly
            result = plus(result, input if beta == 1 else scale(torch.mul, (input, beta), {}))
        return _written(input if in_place else out, result, name)

    return handler


def _scaled(input: Tensor, a: Tensor, b: Tensor, func: Callable[..., Tensor], beta: Any, alpha: Any) -> Tensor:
    return func(input, a, b, beta=beta, alpha=alpha)


for _name in _ADDED:
    rule(*functions(_name))(_adding(_name, in_place=False))
    rule(*functions(f"{_name}_"))(_adding(_name, in_place=True))


# chains


def _order(sizes: tuple[int, ...]) -> Callable[[int, int], Any]:
    """Find the cheapest way to bracket a chain of matrices: `best(i, j)` gives its cost and where to split."""

    @functools.cache
    def best(i: int, j: int) -> tuple[int, int]:
        if i == j:
            return 0, i
        return min((best(i, k)[0] + best(k + 1, j)[0] + sizes[i] * sizes[k + 1] * sizes[j + 1], k) for k in range(i, j))

    return best


@rule(*functions("multi_dot"))
def multi_dot(tensors: Sequence[Any], *, out: Any = None) -> Any:
    """Multiply a chain of matrices, in the order that needs the fewest multiplications."""
    chain = list(tensors)
    shape_after(_multi_dot, chain)  # torch's errors
    sizes = [1 if chain[0].dim() == 1 else chain[0].shape[0], *(x.shape[0] for x in chain[1:])]
    sizes.append(1 if chain[-1].dim() == 1 else chain[-1].shape[-1])
    best = _order(tuple(int(n) for n in sizes))

    def product(i: int, j: int) -> Any:
        if i == j:
            return chain[i]
        at = best(i, j)[1]
        a, b = product(i, at), product(at + 1, j)
        return _product(torch.matmul, a, b, matmul_letters(a.dim(), b.dim()), "multi_dot")

    return _written(out, product(0, len(chain) - 1), "multi_dot")


def _multi_dot(*tensors: Tensor) -> Any:
    return torch.linalg.multi_dot(tensors)


@rule(torch.chain_matmul)
def chain_matmul(*matrices: Any, out: Any = None) -> Any:
    """Multiply a chain of matrices."""
    if len(matrices) == 1 and isinstance(matrices[0], Tensor):
        return matrices[0] if out is None else write_into(out, matrices[0], "chain_matmul")
    return multi_dot(matrices[0] if len(matrices) == 1 else matrices, out=out)


@rule(*functions("kron"))
def kron(input: Any, other: Any, *, out: Any = None) -> Any:
    """Give the Kronecker product: an outer product, and then pairs of dims are merged."""
    if not (is_activation(input) or is_activation(other)):
        return write_into(out, torch.kron(input, other), "kron", cast=False)
    num = max(input.dim(), other.dim())
    shape = shape_after(torch.kron, (input, other))
    a = tuple(f"a{i}" for i in range(num - input.dim(), num))
    b = tuple(f"b{i}" for i in range(num - other.dim(), num))
    pairs = [letter for i in range(num) for letter in (f"a{i}", f"b{i}") if letter in a or letter in b]
    sizes = {**dict(zip(a, input.shape, strict=True)), **dict(zip(b, other.shape, strict=True))}

    def compute(x: Tensor, y: Tensor) -> Tensor:
        left = [letter in a for letter in pairs]
        x = x.reshape(_spread(x.shape, left))
        y = y.reshape(_spread(y.shape, [not own for own in left]))
        return x * y

    result = contract(input, other, (a, b, tuple(pairs)), compute, [sizes[letter] for letter in pairs], "kron")
    return _written(out, call(Tensor.reshape, (result, shape), {}), "kron")


def _spread(shape: Sequence[int], mine: Sequence[bool]) -> list[int]:
    sizes = iter(shape)
    return [next(sizes) if own else 1 for own in mine]


# functions that need whole features


@rule(*functions("cdist"))
def cdist(x1: Any, x2: Any, p: float = 2.0, compute_mode: str | None = "use_mm_for_euclid_dist_if_necessary") -> Any:
    """Give the distances of all pairs of points; sharded points stay sharded, sharded coordinates move."""
    how = "use_mm_for_euclid_dist_if_necessary" if compute_mode is None else compute_mode
    shape = shape_after(torch.cdist, (x1, x2), p, how)
    if how == "use_mm_for_euclid_dist_if_necessary":  # torch decides by the number of points, of all of them
        large = x1.shape[-2] > 25 or x2.shape[-2] > 25
        how = "use_mm_for_euclid_dist" if large else "donot_use_mm_for_euclid_dist"
    num = max(x1.dim(), x2.dim()) - 2
    batch = tuple(str(i) for i in range(num))
    a = (*batch[num - x1.dim() + 2 :], "m", "k")
    b = (*batch[num - x2.dim() + 2 :], "n", "k")
    func = functools.partial(torch.cdist, p=p, compute_mode=how)
    return contract(x1, x2, (a, b, (*batch, "m", "n")), func, shape, "cdist", linear=False)


@rule(*functions("bilinear"))
def bilinear(input1: Any, input2: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Multiply two sets of features by a weight (out, features1, features2)."""
    if not (is_activation(input1) or is_activation(input2)):
        return gather_call(F.bilinear, (input1, input2, weight, bias), {}, why="the weight alone is an activation")
    shape = shape_after(F.bilinear, (input1, input2, weight, bias))
    batch = tuple(str(i) for i in range(input1.dim() - 1))
    letters = ((*batch, "i"), (*batch, "j"), (*batch, "o"))
    return contract(input1, input2, letters, F.bilinear, shape, "F.bilinear", weights=(weight, bias), linear=False)
