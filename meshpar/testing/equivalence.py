"""The one checker of equality with a single process, for rules and for whole models.

Invariant: what it compares is computed twice, by plain torch on whole tensors and by meshpar on the mesh, from the
same numbers; it runs on every rank and raises on every rank that sees a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshpar import pieces
from meshpar.batch import shard
from meshpar.mesh import summed_axes
from meshpar.private import pytree
from meshpar.record import Record, record
from meshpar.scope import spmd


class Difference(AssertionError):
    """Report numbers, shapes or gathers that are not those of one process."""


@dataclass(frozen=True)
class Report:
    """Hold what a comparison found: the largest error of each part, and the record of the communication."""

    errors: dict[str, float]
    log: Record


def distance(found: Tensor, expected: Tensor, largest: float | None = None) -> float:
    """Give the largest difference, relative to the largest number expected (or 1 where that is smaller)."""
    if expected.numel() == 0:
        return 0.0
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(found, expected) else float("inf")
    same_nan = torch.equal(torch.isnan(found), torch.isnan(expected))
    a, b = torch.nan_to_num(found, 0.0), torch.nan_to_num(expected, 0.0)
    scale = max(float(b.abs().max()) if largest is None else largest, 1.0)
    error = float(torch.where(a == b, torch.zeros_like(b.abs()), (a - b).abs()).max()) / scale
    return error if same_nan else float("inf")


def check_close(name: str, found: Tensor, expected: Tensor, tolerance: float) -> float:
    """Compare dtype, shape and numbers; raise `Difference` where they differ."""
    if found.dtype != expected.dtype:
        msg = f"{name}: dtype {found.dtype}, one process has {expected.dtype}"
        raise Difference(msg)
    if found.shape != expected.shape:
        msg = f"{name}: shape {tuple(found.shape)}, one process has {tuple(expected.shape)}"
        raise Difference(msg)
    error = distance(found, expected)
    if not error <= tolerance:
        msg = f"{name}: differs by {error:.3e} of its largest number, allowed {tolerance:.1e}"
        raise Difference(msg)
    return error


def check_piece(name: str, x: Any, expected: Tensor, tolerance: float) -> float:
    """Compare what this rank holds with its part of the whole: every rank compares its own, nothing is gathered."""
    if not isinstance(x, DTensor) or not all(p.is_replicate() or pieces.is_plain_shard(p) for p in x.placements):
        return check_close(name, plain(x, name), expected, tolerance)
    if x.shape != expected.shape:
        msg = f"{name}: shape {tuple(x.shape)}, one process has {tuple(expected.shape)}"
        raise Difference(msg)
    check_promise(x, name)
    piece, part = pieces.local(x).detach(), pieces.cut(expected, x.device_mesh, x.placements)
    if piece.dtype != expected.dtype:
        msg = f"{name}: dtype {piece.dtype}, one process has {expected.dtype}"
        raise Difference(msg)
    real = expected.is_floating_point() or expected.is_complex()
    largest = float(torch.nan_to_num(expected, 0.0).abs().max()) if real and expected.numel() else 0.0
    error = distance(piece, part, largest)
    if not error <= tolerance:
        msg = f"{name}: differs by {error:.3e} of its largest number, allowed {tolerance:.1e}"
        raise Difference(msg)
    return error


def cotangent(x: Tensor, salt: int) -> Tensor:
    """Give fixed pseudo-random numbers like x, the same in every process: the gradient sent into an output."""
    generator = torch.Generator().manual_seed(1234 + salt)
    real = torch.empty(x.shape, dtype=torch.float64).uniform_(-1, 1, generator=generator)
    return real.to(x.dtype)


def assert_same(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    mesh: DeviceMesh,
    layouts: Sequence[str | None] | None = None,
    weights: Sequence[Tensor] = (),
    tolerance: float = 1e-9,
    gathers: bool = False,
    gradients: bool = True,
) -> Report:
    """Check a function of activations and weights under the rules against one process; call it on every rank.

    Args:
        fn: called as `fn(*inputs, *weights)`; returns a tensor, or a tree of tensors and numbers.
        inputs: global tensors, equal on all ranks (sharded by `layouts`), or other arguments, which are passed on.
        mesh: mesh of `make_mesh`.
        layouts: layout string for each input; the default layout where None.
        weights: plain tensors, as parameters would be.
        tolerance: largest difference, relative to the largest number.
        gathers: whether ops may gather.
        gradients: whether to compare gradients of the floating-point inputs and weights too.

    Raises:
        Difference: any output, gradient, dtype or shape is not that of one process, or an op gathered.
    """
    texts = list(layouts) if layouts is not None else [None] * len(inputs)
    leaves = [_leaf(x, gradients=gradients) for x in inputs]
    plain_weights = [_leaf(w, gradients=gradients) for w in weights]
    expected = fn(*leaves, *plain_weights)
    pieces_in = [
        shard(x, mesh, text).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for x, text in zip(leaves, texts, strict=True)
    ]
    own_weights = [_leaf(w, gradients=gradients) for w in weights]
    errors: dict[str, float] = {}
    with record() as log:
        with spmd(on_gather="allow" if gathers else "error", mesh=mesh):
            found = fn(*pieces_in, *own_weights)
        if gradients:
            send_back(expected)
            send_back(found)
    # All that communicates comes first: a rank that sees a difference stops, and the others must not wait for it.
    totals: dict[int, tuple[Tensor, Tensor]] = {}
    if gradients:
        for i, (w, ref) in enumerate(zip(own_weights, plain_weights, strict=True)):
            if isinstance(w, Tensor) and w.requires_grad and ref.grad is not None:
                total = torch.zeros_like(w) if w.grad is None else w.grad.clone()
                sum_parts(total, mesh)
                totals[i] = total, ref.grad
    errors.update(compare_trees("output", found, expected, tolerance))
    if gradients:
        for i, (x, ref) in enumerate(zip(pieces_in, leaves, strict=True)):
            errors.update(compare_gradients(f"gradient of input {i}", x, ref, tolerance))
    for i, (total, grad) in totals.items():
        name = f"gradient of weight {i}"
        errors[name] = check_close(name, total, grad, tolerance)
    return Report(errors, log)


def sum_parts(x: Tensor, mesh: DeviceMesh) -> None:
    """Add up, in place, the parts that the ranks hold of the gradient of a plain tensor."""
    for axis in summed_axes(mesh):
        dist.all_reduce(x, group=mesh.get_group(axis))


def _leaf(x: Any, *, gradients: bool) -> Any:
    if not isinstance(x, Tensor):
        return x
    wants = gradients and (x.is_floating_point() or x.is_complex())
    return x.detach().clone().requires_grad_(wants)


def compare_trees(name: str, found: Any, expected: Any, tolerance: float) -> dict[str, float]:
    """Compare two trees of outputs, DTensors on the one side."""
    a, spec = pytree.tree_flatten(found)
    b, other = pytree.tree_flatten(expected)
    if spec != other:
        msg = f"{name}: structure {spec}, one process has {other}"
        raise Difference(msg)
    errors: dict[str, float] = {}
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        label = f"{name} {i}"
        if isinstance(y, Tensor):
            errors[label] = check_piece(label, x, y.detach(), tolerance)
        elif x != y and not (isinstance(y, float | complex) and abs(x - y) <= tolerance * max(abs(y), 1.0)):
            msg = f"{label}: a {type(x).__name__} that is not that of one process"
            raise Difference(msg)
    return errors


def plain(x: Any, name: str) -> Tensor:
    """Give the whole of an output, after a check that every rank's piece has the size that its placements promise."""
    if not isinstance(x, DTensor):
        return x.detach()  # type: ignore[no-any-return]
    check_promise(x, name)
    whole: Tensor = x.full_tensor()
    return whole.detach()


def check_promise(x: DTensor, name: str) -> None:
    """Check that this rank's piece has the size that its placements promise."""
    promised = pieces.local_shape(x.shape, x.device_mesh, x.placements)
    piece = tuple(pieces.local(x).shape)
    if piece != promised:
        msg = f"{name}: the piece of rank {dist.get_rank()} is {piece}, its placements promise {promised}"
        raise Difference(msg)


def send_back(tree: Any) -> None:
    """Run the backward from every output, with the fixed gradients of `cotangent`."""
    outputs = [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor) and x.requires_grad]
    grads = []
    for i, x in enumerate(outputs):
        g = cotangent(x, i)
        if isinstance(x, DTensor):
            g = pieces.whole(pieces.cut(g, x.device_mesh, x.placements), x.device_mesh, x.placements, x.shape)
        grads.append(g)
    if outputs:
        torch.autograd.backward(outputs, grads)


def compare_gradients(name: str, x: Any, ref: Any, tolerance: float) -> dict[str, float]:
    """Compare the gradient of an input, and check that it lies as the input does."""
    if not isinstance(ref, Tensor) or ref.grad is None:
        return {}
    if x.grad is None:
        if float(ref.grad.abs().max() if ref.grad.numel() else 0.0) == 0.0:
            return {}
        msg = f"{name}: none came back"
        raise Difference(msg)
    if isinstance(x, DTensor):
        sharded = [(p, q) for p, q in zip(x.placements, x.grad.placements, strict=True) if p.is_shard() and p != q]
        if sharded:
            msg = f"{name}: lies in {x.grad.placements}, the input in {x.placements}"
            raise Difference(msg)
    return {name: check_piece(name, x.grad, ref.grad, tolerance)}
