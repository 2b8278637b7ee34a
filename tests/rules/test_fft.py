"""Fourier transforms along whole and sharded dims against one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rule_cases import MESHES, TENSOR, Case, check, real, run
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshpar.batch import shard
from meshpar.record import record
from meshpar.scope import spmd
from meshpar.testing import mesh_for, run_ranks

ROWS, COLUMNS = "data _ domain _", "data _ _ domain"
NAMES = [name + suffix for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft") for suffix in ("", "2", "n")]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "": [{}, {"dim": -2}, {"dim": 2, "n": 6, "norm": "ortho"}, {"dim": 0, "n": 1}, {"n": 7, "norm": "forward"}],
    "2": [{}, {"s": (3, 7)}, {"dim": (-1, -2), "norm": "forward"}, {"dim": (1, 2), "s": (-1, 4)}],
    "n": [{}, {"s": (3, -1)}, {"dim": (2,), "norm": "ortho"}, {"dim": (2, 0, 1)}, {"s": (2, 9, 4)}],
}


def _complete(name: str, options: dict[str, Any], x: Tensor, *rest: Any) -> Any:
    """Transform something made from x, and use real and imaginary parts differently."""
    real_input = name.startswith(("rfft", "ihfft"))
    given = x * 1.5 if real_input else torch.complex(x, x.flip(1) - 0.3)
    out = getattr(torch.fft, name)(given, *rest, **options)
    return out * (1 + 2j) if out.is_complex() else out


def _case(name: str, options: dict[str, Any], shape: tuple[int, ...], layout: str) -> Case:
    return Case(
        f"{name} {shape} {layout} {options}",
        lambda x: _complete(name, options, x),
        (real(*shape),),
        (layout,),
        keeps=True,
    )


def _every(mesh: str) -> Iterator[Case]:
    for name in NAMES:
        for i, options in enumerate(OPTIONS[name.lstrip("ihrft")]):
            yield _case(name, options, (2, 3, 5, 4), ROWS if i % 3 else COLUMNS)


def test_every_transform() -> None:
    run(_every, "data=1,domain=2", at_least=60)


@pytest.mark.parametrize("mesh", [*MESHES, TENSOR])
def test_every_transform_equals_one_process(mesh: str) -> None:
    run(_every, mesh, at_least=60)


def _shifts(mesh: str) -> Iterator[Case]:
    for shift in (torch.fft.fftshift, torch.fft.ifftshift):
        for dim in (None, -2, (1, 2), (-1,)):
            yield Case(f"{shift.__name__} {dim}", lambda x, f=shift, d=dim: f(x, d), (real(2, 3, 5, 4),), keeps=True)
    yield Case("named", lambda x: torch.fft.fftshift(input=x, dim=2), (real(2, 3, 5, 4),), keeps=True)
    yield Case("positional", lambda x: torch.fft.rfft2(x, (6, 6), (2, 3), "ortho").abs(), (real(2, 3, 5, 4),))
    yield Case("whole numbers", lambda x: torch.fft.fft2(x.round().long()).real, (real(2, 3, 5, 4),))
    yield Case(
        "channels last", lambda x: torch.fft.rfft2(x, dim=(1, 2)).real, (real(2, 5, 4, 3),), ("data domain _ _",)
    )
    yield Case(
        "volume", lambda x: torch.fft.rfftn(x, dim=(2, 3, 4)).imag, (real(2, 1, 3, 5, 4),), ("data _ _ domain _",)
    )
    yield Case("tokens", lambda x: torch.fft.fft(x, dim=1).real, (real(2, 7, 4),), ("data domain _",))
    yield Case("round trip", lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[-2:]), (real(2, 3, 5, 7),))


def test_shifts_names_and_layouts() -> None:
    run(_shifts, "data=2,domain=2")


def _planes(mesh: str) -> Iterator[Case]:
    for name in ("fft2", "rfft2", "irfft2", "ihfft2", "hfftn"):
        for shape in ((2, 3, 5, 4), (1, 2, 3, 3)):
            yield _case(name, {}, shape, "_ _ domain tensor")
            yield _case(name, {"dim": (1, -1)}, shape, "_ tensor domain _")


def test_two_sharded_dims() -> None:
    run(_planes, TENSOR)


def _field_26() -> None:
    """Transform rows that are sharded: two all-to-alls of what moves, and the output lies as before."""
    mesh = mesh_for("data=1,domain=4")
    b, c, h, w = 2, 4, 8, 6
    x = shard(real(b, c, h, w), mesh, ROWS).requires_grad_()
    with record() as log, spmd(on_gather="error"):
        y = torch.fft.rfft2(x)
    assert y.placements == x.placements
    assert y.shape == (b, c, h, w // 2 + 1)
    moved = log.select(kind="redistribute")
    assert len(moved) == len(log.entries) == 2
    piece = b * c * (h // 4) * (w // 2 + 1) * 16
    assert [entry.num_bytes for entry in moved] == [piece * 3 // 4] * 2
    with record() as log:
        y.abs().sum().backward()
    assert log.num_bytes(kind="redistribute") == 2 * piece * 3 // 4
    with record() as log, spmd(on_gather="error"):
        torch.fft.rfft(x, dim=-1)
    assert not log.entries


def test_field_26_rfft2_of_sharded_rows_moves_shards_twice() -> None:
    run_ranks(_field_26, 4)


def _signals() -> None:
    check(Case("1-D", lambda x: torch.fft.fft(x).real, (real(9),), ("domain",), gathers=True), "data=1,domain=2")
    report = check(Case("1-D whole", lambda x: torch.fft.fft(x).real, (real(9),), ("_",)), "data=1,domain=2")
    assert not report.log.entries
    check(Case("out", _into, (real(2, 3, 5, 4),), gradients=False), "data=1,domain=2")


def _into(x: Tensor) -> Tensor:
    spectrum = torch.empty_like(x, dtype=torch.complex128)
    return torch.fft.fft2(x, out=spectrum).abs() + spectrum.real


def test_a_signal_alone_is_gathered_and_said() -> None:
    run_ranks(_signals, 2)


def _errors() -> None:
    x = real(2, 3, 5, 4)
    xs = shard(x, mesh_for("data=1,domain=2"))
    for call in (
        lambda x: torch.fft.fft(x, n=0),
        lambda x: torch.fft.fft(x, dim=4),
        lambda x: torch.fft.fft2(x, dim=(1, 1)),
        lambda x: torch.fft.fftn(x, s=(1, 2), dim=(1, 2, 3)),
        lambda x: torch.fft.rfft(x.cfloat()),
        lambda x: torch.fft.fft(x, norm="half"),
        lambda x: torch.fft.fftshift(x, dim=5),
        lambda x: torch.fft.fftshift(x, dim=()),
    ):
        with pytest.raises((RuntimeError, IndexError)) as plain:
            call(x)
        with record() as log, spmd(on_gather="error"), pytest.raises(plain.type):
            call(xs)
        assert not log.entries


def test_wrong_arguments_raise_before_any_communication() -> None:
    run_ranks(_errors, 2)


# FNO


class SpectralConv(nn.Module):
    """Be the spectral convolution of an FNO, as it is written everywhere."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        sizes = (channels, channels, modes, modes)
        self.w1, self.w2 = (nn.Parameter(torch.complex(real(*sizes, salt=s), real(*sizes, salt=s + 1))) for s in (1, 3))

    def forward(self, x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        m = min(self.modes, H // 2)
        x_ft = torch.fft.rfft2(x)
        out_ft = torch.zeros(B, C, H, W // 2 + 1, dtype=torch.cdouble, device=x.device)
        for rows, weight in ((slice(None, m), self.w1), (slice(-m, None), self.w2)):
            w = weight[:, :, :m, : self.modes]
            out_ft[:, :, rows, : self.modes] = torch.einsum("bixy,ioxy->boxy", x_ft[:, :, rows, : self.modes], w)
        return torch.fft.irfft2(out_ft, s=(H, W))


def _fno(mesh: str) -> Iterator[Case]:
    layer = SpectralConv(3, 3)
    weights = [p.detach() for p in layer.parameters()]

    def _spectral(x: Tensor, w1: Tensor, w2: Tensor) -> Any:
        return torch.func.functional_call(layer, {"w1": w1, "w2": w2}, (x,))

    for h, layout in ((5, ROWS), (8, ROWS), (2, ROWS), (6, COLUMNS), (4, "data domain _ _")):
        yield Case(f"{h} {layout}", _spectral, (real(2, 3, h, 7),), (layout,), weights, keeps=True)


def test_a_spectral_convolution() -> None:
    run(_fno, "data=2,domain=2", at_least=5)


def _canvas_is_shared_out() -> None:
    mesh = mesh_for("data=1,domain=2")
    x = shard(real(2, 3, 8, 6), mesh)
    with spmd(on_gather="error", mesh=mesh):
        out = torch.zeros(2, 3, 8, 6, dtype=torch.float64)
        assert isinstance(out, DTensor)
        assert out.to_local().untyped_storage().nbytes() == 8
        with record() as log:
            out[:, :, 2:, :4] = x[:, :, 2:, :4] * 2
    assert out.placements == x.placements
    assert out.to_local().untyped_storage().nbytes() == 2 * 3 * 4 * 6 * 8
    assert not log.gathers()


def test_the_spectrum_that_is_written_into_is_shared_out() -> None:
    run_ranks(_canvas_is_shared_out, 2)


# drawn


def _drawn(seed: int, count: int) -> Iterator[Case]:
    draw = random.Random(seed)
    while count:
        num_dims = draw.choice((2, 3, 4, 4))
        shape = tuple(draw.choice((1, 2, 3, 4, 5, 7, 8)) for _ in range(num_dims))
        name = draw.choice(NAMES)
        suffix = name.lstrip("ihrft")
        options: dict[str, Any] = {"norm": draw.choice((None, "ortho", "forward", "backward"))}
        if not suffix:
            options["dim"] = draw.randrange(-num_dims, num_dims)
            options["n"] = draw.choice((None, None, 1, 4, 7))
        else:
            num = 2 if suffix == "2" else draw.randint(1, num_dims)
            dims = draw.sample(range(num_dims), num)
            options["dim"] = [d - num_dims * draw.randint(0, 1) for d in dims]
            options["s"] = draw.choice((None, [draw.choice((1, 3, 6, -1)) for _ in dims]))
        layout = ["_"] * num_dims
        for axis, dim in zip(("data", "domain"), draw.sample(range(num_dims), 2), strict=True):
            layout[dim] = axis
        # One dim must be free and longer than 1 whenever shards step aside, else a gather is right.
        free = [
            d for d in range(num_dims) if layout[d] == "_" and shape[d] > 2 and d not in _trimmed(options, num_dims)
        ]
        if not free:
            continue
        case = _case(name, options, shape, " ".join(layout))
        try:
            case.fn(*case.inputs)
        except RuntimeError:
            continue  # one process refuses it
        count -= 1
        yield case


def _trimmed(options: dict[str, Any], num_dims: int) -> set[int]:
    dims = options["dim"] if isinstance(options["dim"], list) else [options["dim"]]
    return {d % num_dims for d in dims}


def _draw_40(mesh: str) -> Iterator[Case]:
    yield from _drawn(len(mesh) + 1000, 40)


def _draw_400(mesh: str) -> Iterator[Case]:
    yield from _drawn(len(mesh), 400)


@pytest.mark.parametrize("mesh", MESHES)
def test_any_transform_equals_one_process(mesh: str) -> None:
    run(_draw_40, mesh, at_least=40)


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
def test_many_transforms(mesh: str) -> None:
    run(_draw_400, mesh, at_least=400)
