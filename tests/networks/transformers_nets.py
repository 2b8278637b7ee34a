"""Transformers as people write them, at toy size and in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Mlp(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(channels, 2 * channels), nn.Linear(2 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class WindowAttention(nn.Module):
    """Swin's attention in windows, with a relative position bias that is looked up in a table."""

    def __init__(self, channels: int, window: tuple[int, int], heads: int) -> None:
        super().__init__()
        self.window, self.heads, self.scale = window, heads, (channels // heads) ** -0.5
        self.table = nn.Parameter(torch.zeros((2 * window[0] - 1) * (2 * window[1] - 1), heads))
        nn.init.normal_(self.table, std=0.5)
        coords = torch.stack(torch.meshgrid(torch.arange(window[0]), torch.arange(window[1]), indexing="ij"))
        flat = torch.flatten(coords, 1)
        relative = (flat[:, :, None] - flat[:, None, :]).permute(1, 2, 0).contiguous()
        relative[:, :, 0] += window[0] - 1
        relative[:, :, 1] += window[1] - 1
        relative[:, :, 0] *= 2 * window[1] - 1
        self.register_buffer("index", relative.sum(-1))
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attention = (q * self.scale) @ k.transpose(-2, -1)
        bias = self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous()
        attention = attention + bias.unsqueeze(0)
        if mask is not None:
            num = mask.shape[0]
            attention = attention.view(b // num, num, self.heads, n, n) + mask.unsqueeze(1).unsqueeze(0)
            attention = attention.view(-1, self.heads, n, n)
        attention = F.softmax(attention, dim=-1)
        return self.proj((attention @ v).transpose(1, 2).reshape(b, n, c))


def partition(x: Tensor, w: int) -> Tensor:
    b, h, v, c = x.shape
    x = x.view(b, h // w, w, v // w, w, c)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, w, w, c)


def reverse(windows: Tensor, w: int, h: int, v: int) -> Tensor:
    b = int(windows.shape[0] / (h * v / w / w))
    x = windows.view(b, h // w, v // w, w, w, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(b, h, v, -1)


class SwinBlock(nn.Module):
    def __init__(self, channels: int, window: int, shift: int, heads: int = 2) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.attention, self.mlp = WindowAttention(channels, (window, window), heads), Mlp(channels)

    def mask(self, h: int, v: int, like: Tensor) -> Tensor:
        image = torch.zeros((1, h, v, 1), dtype=like.dtype, device=like.device)
        spans = (slice(0, -self.window), slice(-self.window, -self.shift), slice(-self.shift, None))
        count = 0
        for rows in spans:
            for columns in spans:
                image[:, rows, columns, :] = count
                count += 1
        windows = partition(image, self.window).view(-1, self.window * self.window)
        mask = windows.unsqueeze(1) - windows.unsqueeze(2)
        return mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        h, v, c = x.shape[1:]
        w = self.window
        y = self.norm1(x)
        right, below = (w - v % w) % w, (w - h % w) % w
        y = F.pad(y, (0, 0, 0, right, 0, below))
        full = y.shape[1:3]
        mask = None
        if self.shift:
            y = torch.roll(y, shifts=(-self.shift, -self.shift), dims=(1, 2))
            mask = self.mask(full[0], full[1], x)
        windows = self.attention(partition(y, w).view(-1, w * w, c), mask)
        y = reverse(windows.view(-1, w, w, c), w, full[0], full[1])
        if self.shift:
            y = torch.roll(y, shifts=(self.shift, self.shift), dims=(1, 2))
        if right or below:
            y = y[:, :h, :v, :].contiguous()
        x = x + y
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * channels), nn.Linear(4 * channels, 2 * channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h, v = x.shape[1:3]
        if h % 2 or v % 2:
            x = F.pad(x, (0, 0, 0, v % 2, 0, h % 2))
        parts = [x[:, 0::2, 0::2, :], x[:, 1::2, 0::2, :], x[:, 0::2, 1::2, :], x[:, 1::2, 1::2, :]]
        return self.reduction(self.norm(torch.cat(parts, -1)))


class Swin(nn.Module):
    """Two stages, shifted windows, odd sizes padded to the window."""

    def __init__(self, channels: int = 4, window: int = 3) -> None:
        super().__init__()
        self.embed = nn.Conv2d(2, channels, 2, stride=2)
        self.stage1 = nn.Sequential(SwinBlock(channels, window, 0), SwinBlock(channels, window, window // 2))
        self.merge = PatchMerging(channels)
        self.stage2 = nn.Sequential(SwinBlock(2 * channels, window, 0), SwinBlock(2 * channels, window, window // 2))
        self.norm, self.head = nn.LayerNorm(2 * channels), nn.Linear(2 * channels, 4 * 4 * 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x).permute(0, 2, 3, 1)
        y = self.head(self.norm(self.stage2(self.merge(self.stage1(y))))).permute(0, 3, 1, 2)
        return F.pixel_shuffle(y, 4)


class CrossEmbed(nn.Module):
    """CrossFormer's embedding: several kernel sizes side by side."""

    def __init__(self, num_in: int, num_out: int, kernels: tuple[int, ...], stride: int) -> None:
        super().__init__()
        widths = [num_out // 2**i for i in range(1, len(kernels))]
        widths.append(num_out - sum(widths))
        self.convs = nn.ModuleList(
            nn.Conv2d(num_in, n, k, stride=stride, padding=(k - stride) // 2)
            for n, k in zip(widths, sorted(kernels), strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([conv(x) for conv in self.convs], dim=1)


class CrossAttention(nn.Module):
    """Short attention within windows, or long attention over points that lie `window` apart."""

    def __init__(self, channels: int, window: int, *, short: bool, heads: int = 2) -> None:
        super().__init__()
        self.window, self.short, self.heads = window, short, heads
        self.norm, self.qkv = nn.GroupNorm(1, channels), nn.Conv2d(channels, 3 * channels, 1, bias=False)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, v = x.shape
        w = self.window
        y = self.norm(x)
        if self.short:
            y = y.reshape(b, c, h // w, w, v // w, w).permute(0, 2, 4, 1, 3, 5)
        else:
            y = y.reshape(b, c, w, h // w, w, v // w).permute(0, 3, 5, 1, 2, 4)
        rows, columns = y.shape[1:3]
        y = y.reshape(b * rows * columns, c, w, w)
        q, k, u = self.qkv(y).chunk(3, dim=1)
        q, k, u = (t.reshape(t.shape[0], self.heads, c // self.heads, w * w).transpose(-1, -2) for t in (q, k, u))
        weights = (torch.einsum("bhid,bhjd->bhij", q, k) * (c // self.heads) ** -0.5).softmax(-1)
        y = torch.einsum("bhij,bhjd->bhid", weights, u).transpose(-1, -2).reshape(-1, c, w, w)
        y = self.out(y).reshape(b, rows, columns, c, w, w)
        y = y.permute(0, 3, 1, 4, 2, 5) if self.short else y.permute(0, 3, 4, 1, 5, 2)
        return x + y.reshape(b, c, h, v)


class CrossFormer(nn.Module):
    """CREDIT's forecast network in small: padding, cross-scale embeddings, short and long attention, back up."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.pad = nn.ZeroPad2d((1, 2, 2, 1))
        self.embed = CrossEmbed(2, channels, (2, 4), 2)
        self.one = nn.Sequential(
            CrossAttention(channels, 2, short=True), CrossAttention(channels, 2, short=False), nn.Dropout(0.0)
        )
        self.down = CrossEmbed(channels, 2 * channels, (2, 4), 2)
        self.two = CrossAttention(2 * channels, 2, short=True)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 4, stride=2, padding=1)
        self.leave = nn.ConvTranspose2d(2 * channels, 2, 4, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[-2:]
        first = self.one(self.embed(self.pad(x)))
        y = self.up(self.two(self.down(first)))
        y = self.leave(torch.cat([y, first], 1))
        return F.interpolate(y[..., 2:-1, 1:-2], size=(h, w), mode="bilinear")


class Attention(nn.Module):
    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


class Block(nn.Module):
    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.attention, self.mlp = Attention(channels, heads), Mlp(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A learned position embedding and a class token that is put before the patches."""

    def __init__(self, size: tuple[int, int], channels: int = 8, heads: int = 2) -> None:
        super().__init__()
        num = (size[0] // 4) * (size[1] // 4)
        self.embed = nn.Conv2d(3, channels, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, channels))
        self.position = nn.Parameter(torch.randn(1, num + 1, channels))
        self.blocks = nn.Sequential(Block(channels, heads), Block(channels, heads))
        self.norm, self.head = nn.LayerNorm(channels), nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), tokens], dim=1) + self.position
        return self.head(self.norm(self.blocks(tokens))[:, 0])


class DiTBlock(nn.Module):
    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(channels, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(channels, elementwise_affine=False, eps=1e-6)
        self.attention, self.mlp = nn.MultiheadAttention(channels, heads, batch_first=True), Mlp(channels)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(channels, 6 * channels))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=1)
        y = self.norm1(x) * (1 + scale1.unsqueeze(1)) + shift1.unsqueeze(1)
        x = x + gate1.unsqueeze(1) * self.attention(y, y, y, need_weights=False)[0]
        y = self.norm2(x) * (1 + scale2.unsqueeze(1)) + shift2.unsqueeze(1)
        return x + gate2.unsqueeze(1) * self.mlp(y)


class DiT(nn.Module):
    """Adaptive norms: each block is modulated by an embedding of time."""

    def __init__(self, channels: int = 8, heads: int = 2, patch: int = 2) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Conv2d(2, channels, patch, stride=patch)
        self.time = nn.Sequential(nn.Linear(1, channels), nn.SiLU(), nn.Linear(channels, channels))
        self.blocks = nn.ModuleList(DiTBlock(channels, heads) for _ in range(2))
        self.head = nn.Linear(channels, patch * patch * 2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        y = self.embed(x)
        h, w = y.shape[-2:]
        c = self.time(t[:, None])
        y = y.flatten(2).transpose(1, 2)
        for block in self.blocks:
            y = block(y, c)
        p = self.patch
        y = self.head(y).reshape(x.shape[0], h, w, p, p, 2)
        return torch.einsum("nhwpqc->nchpwq", y).reshape(x.shape[0], 2, h * p, w * p)


class NeighbourhoodAttention(nn.Module):
    """Each point looks at the 3 x 3 points around it: unfold, then attention written out."""

    def __init__(self, channels: int = 4, kernel: int = 3) -> None:
        super().__init__()
        self.kernel = kernel
        self.qkv, self.out = nn.Conv2d(2, 3 * channels, 1), nn.Conv2d(channels, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        k2 = self.kernel**2
        q, k, v = self.qkv(x).chunk(3, dim=1)
        around = [F.unfold(t, self.kernel, padding=self.kernel // 2).view(b, -1, k2, h * w) for t in (k, v)]
        scores = (q.flatten(2).unsqueeze(2) * around[0]).sum(1) / q.shape[1] ** 0.5
        y = (scores.softmax(1).unsqueeze(1) * around[1]).sum(2)
        return self.out(y.view(b, -1, h, w))
