"""`torch.einsum` and `torch.tensordot`: letters as they are given, contracted pair by pair from left to right.

Invariant: as in torch without opt_einsum, a letter is summed as soon as no later operand has it; every pair is one
`contract`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar import pieces
from meshpar.registry import rule
from meshpar.rules.contract import Letters, contract
from meshpar.rules.pointwise import write_into
from meshpar.rules.products import shape_after
from meshpar.rules.spatial import remapped, whole_along
from meshpar.spmd import call

_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@functools.lru_cache(maxsize=4096)
def parse(equation: str, dims: tuple[int, ...]) -> tuple[tuple[Letters, ...], Letters]:
    """Read an equation that torch takes: the letters of the operands, and of the output.

    Dims under an ellipsis get names of their own, counted from the right.

    Example:
        >>> parse("...k,kn->...n", (3, 2))
        ((('.1', '.0', 'k'), ('k', 'n')), ('.1', '.0', 'n'))
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    wild = [
        max(n - len(term.replace("...", "")), 0) if "..." in term else 0 for term, n in zip(terms, dims, strict=True)
    ]
    operands = tuple(_named(term, n) for term, n in zip(terms, wild, strict=True))
    if arrow:
        return operands, _named(right, max(wild))
    seen = [letter for letters in operands for letter in letters]
    dots = tuple(f".{i}" for i in reversed(range(max(wild))))
    return operands, (*dots, *sorted(x for x in set(seen) if x[0] != "." and seen.count(x) == 1))


def _named(term: str, wild: int) -> Letters:
    head, dots, tail = term.partition("...")
    return (*head, *([f".{i}" for i in reversed(range(wild))] if dots else []), *tail)


@functools.lru_cache(maxsize=4096)
def _equation(terms: tuple[Letters, ...], out: Letters) -> str:
    """Write letters as an equation for torch."""
    names = dict(zip(dict.fromkeys(letter for term in terms for letter in term), _ALPHABET, strict=False))
    inputs = ",".join("".join(names[letter] for letter in term) for term in terms)
    return f"{inputs}->{''.join(names[letter] for letter in out)}"


def _read(args: Sequence[Any]) -> tuple[str, list[Any]]:
    """Give equation and operands, of an equation or of operands with lists of numbers in turn."""
    if isinstance(args[0], str):
        operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
        return args[0], list(operands)
    pairs = list(zip(args[0::2], args[1::2], strict=False))
    text = ",".join(_sublist(numbers) for _, numbers in pairs)
    if len(args) % 2:
        text += f"->{_sublist(args[-1])}"
    return text, [x for x, _ in pairs]


def _sublist(numbers: Sequence[Any]) -> str:
    parts = []
    for n in numbers:
        if n is not Ellipsis and not 0 <= int(n) < len(_ALPHABET):
            text = f"einsum(): subscripts must be in range [0, 52); got {n}"
            raise ValueError(text)
        parts.append("..." if n is Ellipsis else _ALPHABET[int(n)])
    return "".join(parts)


def _by_letters(*args: Any) -> Tensor:
    return torch.einsum(args[-1], *args[:-1])


@rule(torch.einsum)
def einsum(*args: Any) -> Any:
    """Multiply and sum by letters.

    Communication:
        That of each pair, see `contract`. A diagonal (`ii`) of a sharded dim is gathered, and said.
    """
    equation, operands = _read(args)
    shape_after(_by_letters, operands, equation)  # torch's errors
    letters, out = parse(equation, tuple(x.dim() for x in operands))
    terms = [_diagonal(x, ls) for x, ls in zip(operands, letters, strict=True)]
    x, of_x = terms[0]
    for at, (y, of_y) in enumerate(terms[1:], start=2):
        later = {*out, *(letter for _, ls in terms[at:] for letter in ls)}
        last = at == len(terms)
        keep = out if last else tuple(letter for letter in dict.fromkeys((*of_x, *of_y)) if letter in later)
        x, of_x = _pair(x, of_x, y, of_y, keep), keep
    return x if len(terms) > 1 else _alone(x, of_x, out)


def _pair(x: Any, of_x: Letters, y: Any, of_y: Letters, keep: Letters) -> Any:
    func = functools.partial(torch.einsum, _equation((of_x, of_y), keep))
    if not (isinstance(x, DTensor) or isinstance(y, DTensor)):
        return func(x, y)
    sizes: dict[str, int] = {}
    for letter, n in (*zip(of_x, x.shape, strict=True), *zip(of_y, y.shape, strict=True)):
        sizes[letter] = n if sizes.get(letter, 1) == 1 else sizes[letter]
    return contract(x, y, (of_x, of_y, keep), func, [sizes[letter] for letter in keep], "einsum")


def _alone(x: Any, of_x: Letters, out: Letters) -> Any:
    """Sum and permute a single operand."""
    gone = [dim for dim, letter in enumerate(of_x) if letter not in out]
    if gone:
        x = call(Tensor.sum, (x, gone), {})
    rest = [letter for letter in of_x if letter in out]
    return call(Tensor.permute, (x, [rest.index(letter) for letter in out]), {})


def _diagonal(x: Any, letters: Letters) -> tuple[Any, Letters]:
    """Take the diagonal where an operand has a letter twice."""
    unique = tuple(dict.fromkeys(letters))
    if len(unique) == len(letters):
        return x, letters
    equation = _equation((letters,), unique)
    if not isinstance(x, DTensor):
        return torch.einsum(equation, x), unique
    twice = {dim for dim, letter in enumerate(letters) if letters.count(letter) > 1}
    axes = [axis for dim in twice for axis in pieces.shard_axes(x, dim)]
    x = whole_along(x, axes, "einsum", "the diagonal of a sharded dim" if axes else "")
    to = {dim: unique.index(letter) for dim, letter in enumerate(letters) if dim not in twice}
    shape = [x.shape[letters.index(letter)] for letter in unique]
    piece = torch.einsum(equation, pieces.local(x))
    return pieces.whole(piece, x.device_mesh, remapped(x.placements, to), shape), unique


@rule(torch.tensordot)
def tensordot(a: Any, b: Any, dims: Any = 2, out: Any = None) -> Any:
    """Multiply and sum over pairs of dims."""
    pairs = _hashable(dims)
    shape = shape_after(torch.tensordot, (a, b), pairs)  # torch's errors
    func = functools.partial(torch.tensordot, dims=pairs)
    if not (isinstance(a, DTensor) or isinstance(b, DTensor)):
        return write_into(out, func(a, b), "tensordot", cast=False)
    over = (range(a.dim() - pairs, a.dim()), range(pairs)) if isinstance(pairs, int) else pairs
    of_a = [f"a{i}" for i in range(a.dim())]
    of_b = [f"b{i}" for i in range(b.dim())]
    for number, (i, j) in enumerate(zip(*over, strict=True)):
        of_a[i] = of_b[j] = f"k{number}"
    keep = tuple(letter for letter in (*of_a, *of_b) if letter[0] != "k")
    result = contract(a, b, (tuple(of_a), tuple(of_b), keep), func, shape, "tensordot")
    return result if out is None else write_into(out, result, "tensordot", cast=False)


def _hashable(dims: Any) -> Any:
    """Give the dims that are summed as a number, or as two tuples."""
    if isinstance(dims, Tensor):
        dims = int(dims) if dims.numel() == 1 else dims.tolist()
    if isinstance(dims, int):
        return dims
    return tuple(tuple(int(d) for d in ([side] if isinstance(side, int) else side)) for side in dims)
