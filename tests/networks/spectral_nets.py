"""Spectral networks as people write them, at toy size and in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SpectralConv2d(nn.Module):
    """The Fourier layer of FNO: the lowest modes times a weight, written into zeros."""

    def __init__(self, channels: int, modes: tuple[int, int]) -> None:
        super().__init__()
        self.modes = modes
        scale = 1 / channels
        self.weights1 = nn.Parameter(scale * torch.rand(channels, channels, *modes, dtype=torch.cdouble))
        self.weights2 = nn.Parameter(scale * torch.rand(channels, channels, *modes, dtype=torch.cdouble))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        m, n = self.modes
        x_ft = torch.fft.rfft2(x)
        out_ft = torch.zeros(b, c, h, w // 2 + 1, dtype=torch.cdouble, device=x.device)
        out_ft[:, :, :m, :n] = torch.einsum("bixy,ioxy->boxy", x_ft[:, :, :m, :n], self.weights1)
        out_ft[:, :, -m:, :n] = torch.einsum("bixy,ioxy->boxy", x_ft[:, :, -m:, :n], self.weights2)
        return torch.fft.irfft2(out_ft, s=(h, w))


class FNO(nn.Module):
    def __init__(self, channels: int = 3, modes: tuple[int, int] = (3, 4)) -> None:
        super().__init__()
        self.enter = nn.Conv2d(4, channels, 1)
        self.spectral = nn.ModuleList(SpectralConv2d(channels, modes) for _ in range(2))
        self.local = nn.ModuleList(nn.Conv2d(channels, channels, 1) for _ in range(2))
        self.leave = nn.Sequential(nn.Conv2d(channels, 6, 1), nn.GELU(), nn.Conv2d(6, 1, 1))

    def grid(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        rows = torch.linspace(0, 1, h, dtype=x.dtype, device=x.device).reshape(1, 1, h, 1).repeat(b, 1, 1, w)
        columns = torch.linspace(0, 1, w, dtype=x.dtype, device=x.device).reshape(1, 1, 1, w).repeat(b, 1, h, 1)
        return torch.cat((rows, columns), dim=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(torch.cat((x, self.grid(x)), dim=1))
        for spectral, local in zip(self.spectral, self.local, strict=True):
            y = F.gelu(spectral(y) + local(y))
        return self.leave(y)


class AFNOBlock(nn.Module):
    """FourCastNet's mixer: a block-diagonal network on the modes, soft-thresholded."""

    def __init__(self, channels: int, num_blocks: int = 2) -> None:
        super().__init__()
        self.num_blocks, self.size = num_blocks, channels // num_blocks
        self.w1 = nn.Parameter(0.3 * torch.randn(2, num_blocks, self.size, self.size))
        self.b1 = nn.Parameter(0.3 * torch.randn(2, num_blocks, self.size))
        self.w2 = nn.Parameter(0.3 * torch.randn(2, num_blocks, self.size, self.size))
        self.b2 = nn.Parameter(0.3 * torch.randn(2, num_blocks, self.size))
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        y = torch.fft.rfft2(self.norm(x), dim=(1, 2), norm="ortho")
        y = y.reshape(b, h, w // 2 + 1, self.num_blocks, self.size)
        real, imag = y.real, y.imag
        real1 = F.relu(self.mix(real, self.w1[0]) - self.mix(imag, self.w1[1]) + self.b1[0])
        imag1 = F.relu(self.mix(imag, self.w1[0]) + self.mix(real, self.w1[1]) + self.b1[1])
        real2 = self.mix(real1, self.w2[0]) - self.mix(imag1, self.w2[1]) + self.b2[0]
        imag2 = self.mix(imag1, self.w2[0]) + self.mix(real1, self.w2[1]) + self.b2[1]
        z = F.softshrink(torch.stack([real2, imag2], dim=-1), lambd=0.01)
        z = torch.view_as_complex(z).reshape(b, h, w // 2 + 1, c)
        return torch.fft.irfft2(z, s=(h, w), dim=(1, 2), norm="ortho") + x

    def mix(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("...bi,bio->...bo", x, weight)


class AFNO(nn.Module):
    def __init__(self, channels: int = 4, patch: int = 2) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Conv2d(2, channels, patch, stride=patch)
        self.blocks = nn.Sequential(AFNOBlock(channels), AFNOBlock(channels))
        self.head = nn.Linear(channels, 2 * patch * patch, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.blocks(self.embed(x).permute(0, 2, 3, 1)))
        b, h, w, _ = y.shape
        y = y.view(b, h, w, self.patch, self.patch, 2).permute(0, 5, 1, 3, 2, 4).contiguous()
        return y.view(b, 2, h * self.patch, w * self.patch)


def legendre(num_rows: int, num_degrees: int, num_orders: int) -> tuple[Tensor, Tensor]:
    """Associated Legendre functions (orders, degrees, rows) at equiangular rows, and quadrature weights."""
    theta = (torch.arange(num_rows, dtype=torch.float64) + 0.5) / num_rows * torch.pi
    x, s = torch.cos(theta), torch.sin(theta)
    table = torch.zeros(num_orders, num_degrees, num_rows, dtype=torch.float64)
    for m in range(num_orders):
        for n in range(m, num_degrees):
            if n == m:
                top = torch.ones_like(x) if m == 0 else table[m - 1, m - 1] * s * ((2 * m + 1) / (2 * m)) ** 0.5
                table[m, n] = top
            else:
                a = ((4 * n * n - 1) / (n * n - m * m)) ** 0.5
                value = a * x * table[m, n - 1]
                if n > m + 1:
                    c = (((n - 1) ** 2 - m * m) / (4 * (n - 1) ** 2 - 1)) ** 0.5
                    value = value - a * c * table[m, n - 2]
                table[m, n] = value
    return table, s * (torch.pi / num_rows) / 2


class SFNOBlock(nn.Module):
    """A convolution on the sphere: Fourier along longitude, Legendre along latitude, a weight a degree, and back."""

    def __init__(self, channels: int, num_rows: int, num_columns: int) -> None:
        super().__init__()
        self.num_columns = num_columns
        self.orders = num_columns // 2
        self.degrees = num_rows - 1
        table, quadrature = legendre(num_rows, self.degrees, self.orders)
        self.register_buffer("forth", table * quadrature)
        self.register_buffer("back", table)
        self.weight = nn.Parameter(0.4 * torch.randn(channels, channels, self.degrees, dtype=torch.cdouble))
        self.skip, self.norm = nn.Conv2d(channels, channels, 1), nn.InstanceNorm2d(channels, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.fft.rfft(x, dim=-1, norm="forward")[..., : self.orders]
        y = torch.view_as_real(y)
        y = torch.einsum("bckmr,mlk->bclmr", y, self.forth.to(x.dtype)).contiguous()
        y = torch.view_as_complex(y)
        y = torch.einsum("bilm,iol->bolm", y, self.weight)
        y = torch.view_as_real(y)
        y = torch.view_as_complex(torch.einsum("bclmr,mlk->bckmr", y, self.back.to(x.dtype)).contiguous())
        y = torch.fft.irfft(y, n=self.num_columns, dim=-1, norm="forward")
        return F.gelu(self.norm(y) + self.skip(x))


class SFNO(nn.Module):
    def __init__(self, num_rows: int, num_columns: int, channels: int = 3) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(2, channels, 1), nn.Conv2d(channels + 2, 2, 1)
        self.position = nn.Parameter(0.1 * torch.randn(1, channels, num_rows, num_columns))
        self.blocks = nn.Sequential(*(SFNOBlock(channels, num_rows, num_columns) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.cat([self.blocks(self.enter(x) + self.position), x], dim=1))
