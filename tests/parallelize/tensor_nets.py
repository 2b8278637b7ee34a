"""Networks whose layers are split over `tensor`, written as users write them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm


class Mlp(nn.Module):
    def __init__(self, dim: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.norm(F.gelu(self.fc1(x))))


class Gated(nn.Module):
    """Gate and up in one layer, as Phi-3 has it."""

    def __init__(self, dim: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class FusedAttention(nn.Module):
    """Attention of timm: queries, keys and values out of one layer."""

    def __init__(self, dim: int = 8, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class Block(nn.Module):
    def __init__(self, dim: int = 8, num_heads: int = 4) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = FusedAttention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Tokens in, tokens out: an embedding, blocks, a head that is tied to the embedding or not."""

    def __init__(self, vocabulary: int = 12, dim: int = 8, depth: int = 2, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.position = nn.Parameter(torch.randn(1, 6, dim) * 0.1)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


TRANSFORMER_PLAN = {
    "embed": "rowwise",
    "blocks.*.attn.qkv": "packed",
    "blocks.*.attn.proj": "rowwise",
    "blocks.*.mlp.fc1": "colwise",
    "blocks.*.mlp.fc2": "rowwise",
    "head": "colwise",
}


class ConvNet(nn.Module):
    """Convolutions of all kinds: columns, norms and depthwise ones between, rows; strides, groups, bias or none."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.GroupNorm(4, width)
        self.depth = nn.Conv2d(width, width, 3, padding=1, groups=width, padding_mode="circular")
        self.batch = nn.BatchNorm2d(width)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False)
        self.squeeze = nn.Conv2d(2 * width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm(self.stem(x)))
        x = F.relu(self.batch(self.depth(x)))
        x = F.max_pool2d(x, 2, ceil_mode=True)
        return self.squeeze(F.silu(self.down(x)))


class Spectral(nn.Module):
    """Spectral norm, old and new, on layers that are split."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = parametrizations.spectral_norm(nn.Conv2d(2, 8, 3, padding=1))
        self.old = old_spectral_norm(nn.Conv2d(8, 4, 3, padding=1))
        self.lin = parametrizations.spectral_norm(nn.Linear(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.old(F.silu(self.conv(x))))
        return self.lin(x.movedim(1, -1))
