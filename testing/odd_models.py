"""Models of 1,000 to 2,500 operations whose graphs are no chain of equal blocks: several residual
streams, skips across the whole network, many small operations on edges of a graph.

Widths are small; what is hard about them is how many operations there are, and what reads what.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from testing.models import Case, mean_square


class HyperConnection(nn.Module):
    """Mixes residual streams before and after a branch, by matrices that depend on them (Zhu et
    al., 2024)."""

    def __init__(self, width: int, streams: int, index: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        first = torch.zeros(streams, 1)
        first[index % streams] = 1.0
        self.static_alpha = nn.Parameter(torch.cat([first, torch.eye(streams)], dim=1))
        self.static_beta = nn.Parameter(torch.ones(streams))
        self.alpha_of = nn.Parameter(torch.randn(width, streams + 1) * 0.02)
        self.beta_of = nn.Parameter(torch.randn(width) * 0.02)
        self.alpha_scale = nn.Parameter(torch.tensor(0.01))
        self.beta_scale = nn.Parameter(torch.tensor(0.01))

    def forward(
        self, streams: torch.Tensor, branch: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """streams: batch, length, stream, width; the same comes out."""
        normed = self.norm(streams)
        alpha = torch.tanh(normed @ self.alpha_of) * self.alpha_scale + self.static_alpha
        beta = torch.tanh(normed @ self.beta_of) * self.beta_scale + self.static_beta
        mixed = torch.einsum("blst,blsd->bltd", alpha, streams)
        out = branch(mixed[..., 0, :])
        return torch.einsum("bld,bls->blsd", out, beta) + mixed[..., 1:, :]


class RotaryAttention(nn.Module):
    """Attention written out: rotary positions, norms of queries and keys, a gate of values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, bias=False)
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_kv = nn.Linear(width, 2 * width, bias=False)
        self.to_gate = nn.Linear(width, width)
        self.q_scale = nn.Parameter(torch.ones(width // heads))
        self.k_scale = nn.Parameter(torch.ones(width // heads))
        self.to_out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        batch, length, width = x.shape
        kv = self.to_kv(x).chunk(2, dim=-1)
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (self.to_q(x), *kv)
        )
        q = self._rotated(functional.normalize(q, dim=-1) * self.q_scale, angles)
        k = self._rotated(functional.normalize(k, dim=-1) * self.k_scale, angles)
        scores = q @ k.transpose(-1, -2) * math.sqrt(width // self.heads)
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        attended = functional.dropout(scores.masked_fill(mask, -1e9).softmax(dim=-1), 0.1)
        out = (attended @ v).transpose(1, 2).reshape(batch, length, width)
        return self.to_out(out * self.to_gate(x).sigmoid())

    @staticmethod
    def _rotated(t: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        left, right = t.chunk(2, dim=-1)
        return t * angles.cos() + torch.cat([-right, left], dim=-1) * angles.sin()


class FeedForward(nn.Module):
    """A gated layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.up(self.norm(x)).chunk(2, dim=-1)
        return functional.dropout(self.down(value * functional.gelu(gate)), 0.1)


class HyperTransformer(nn.Module):
    """A decoder whose residual is several streams."""

    def __init__(self, layers: int, width: int, heads: int, streams: int, vocabulary: int) -> None:
        super().__init__()
        self.streams, self.part = streams, width // heads
        self.embed = nn.Embedding(vocabulary, width)
        self.attentions = nn.ModuleList([RotaryAttention(width, heads) for _ in range(layers)])
        self.feed_forwards = nn.ModuleList([FeedForward(width) for _ in range(layers)])
        self.connections = nn.ModuleList(
            [HyperConnection(width, streams, index) for index in range(2 * layers)]
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1]).unsqueeze(1)
        rates = 1e4 ** -(torch.arange(self.part // 2) / (self.part // 2))
        angles = torch.cat([places * rates] * 2, dim=-1)
        x = self.embed(ids).unsqueeze(2).expand(-1, -1, self.streams, -1)
        for index, (attend, feed) in enumerate(
            zip(self.attentions, self.feed_forwards, strict=True)
        ):
            x = self.connections[2 * index](x, lambda h, attend=attend: attend(h, angles))
            x = self.connections[2 * index + 1](x, feed)
        logits = self.head(self.norm(x.sum(dim=2)))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def hyper(layers: int = 6, width: int = 128, streams: int = 4) -> Case:
    """A decoder with hyper-connections, its loss inside."""
    ids = torch.randint(0, 64, (2, 32))
    model = HyperTransformer(layers, width, 4, streams, 64).train()
    return Case(f"hyper-{layers}", model, (ids,), {}, _itself)


class TimedBlock(nn.Module):
    """Two convolutions with group norms, scaled and shifted by the step of the diffusion."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, inputs), nn.GroupNorm(4, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.of_time = nn.Linear(time, 2 * outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        scale, shift = self.of_time(functional.silu(time))[..., None, None].chunk(2, dim=1)
        h = self.conv1(functional.silu(self.norm1(x)))
        h = self.norm2(h) * (1 + scale) + shift
        return self.conv2(functional.dropout(functional.silu(h), 0.1)) + self.skip(x)


class PixelAttention(nn.Module):
    """Attention between the pixels of an image."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(4, width)
        self.to_qkv = nn.Conv2d(width, 3 * width, 1, bias=False)
        self.to_out = nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, width, rows, columns = x.shape
        qkv = self.to_qkv(self.norm(x)).view(batch, 3, self.heads, -1, rows * columns)
        q, k, v = qkv.unbind(1)
        weights = torch.einsum("bhci,bhcj->bhij", q * q.shape[2] ** -0.5, k).softmax(dim=-1)
        out = torch.einsum("bhij,bhcj->bhci", weights, v)
        return x + self.to_out(out.reshape(batch, width, rows, columns))


class DiffusionUNet(nn.Module):
    """The denoiser of DDPM (Ho et al., 2020): blocks that know the step, attention, a skip from
    every block on the way down to one on the way up."""

    def __init__(self, levels: int, width: int, blocks: int) -> None:
        super().__init__()
        time = 4 * width
        self.width = width
        self.of_step = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.shrink, self.up, self.grow = (nn.ModuleList() for _ in range(4))
        skips, at = [width], width
        for level in range(levels):
            outputs = width * min(2**level, 4)
            for _ in range(blocks):
                self.down.append(
                    nn.ModuleList([TimedBlock(at, outputs, time), PixelAttention(outputs, 2)])
                )
                at = outputs
                skips.append(at)
            if level < levels - 1:
                self.shrink.append(nn.Conv2d(at, at, 3, stride=2, padding=1))
                skips.append(at)
        self.middle = nn.ModuleList(
            [TimedBlock(at, at, time), PixelAttention(at, 2), TimedBlock(at, at, time)]
        )
        for level in reversed(range(levels)):
            outputs = width * min(2**level, 4)
            for _ in range(blocks + 1):
                self.up.append(
                    nn.ModuleList(
                        [TimedBlock(at + skips.pop(), outputs, time), PixelAttention(outputs, 2)]
                    )
                )
                at = outputs
            if level:
                self.grow.append(nn.Conv2d(at, at, 3, padding=1))
        self.head = nn.Sequential(nn.GroupNorm(4, at), nn.SiLU(), nn.Conv2d(at, 3, 3, padding=1))
        self.blocks = blocks

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(torch.arange(self.width // 2) * (-math.log(1e4) / (self.width // 2)))
        angles = step[:, None] * rates
        time = self.of_step(torch.cat([angles.sin(), angles.cos()], dim=1))
        x = self.stem(x)
        skips = [x]
        for index, (block, attention) in enumerate(self.down):
            x = attention(block(x, time))
            skips.append(x)
            level, last = divmod(index + 1, self.blocks)
            if last == 0 and level <= len(self.shrink):
                x = self.shrink[level - 1](x)
                skips.append(x)
        first, attention, second = self.middle
        x = second(attention(first(x, time)), time)
        for index, (block, attention) in enumerate(self.up):
            x = attention(block(torch.cat([x, skips.pop()], dim=1), time))
            level, last = divmod(index + 1, self.blocks + 1)
            if last == 0 and level <= len(self.grow):
                x = self.grow[level - 1](functional.interpolate(x, scale_factor=2.0))
        return self.head(x)


def ddpm(levels: int = 3, width: int = 32, blocks: int = 3, size: int = 16) -> Case:
    """The denoiser of a diffusion."""
    images, steps = torch.randn(2, 3, size, size), torch.randint(0, 1000, (2,)).float()
    model = DiffusionUNet(levels, width, blocks).train()
    return Case(f"ddpm-{levels}x{blocks}", model, (images, steps), {}, mean_square)


PATHS = ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1), (0, 2, 2), (2, 0, 2), (1, 1, 2))
PATHS += ((1, 2, 1), (2, 1, 1), (2, 2, 0), (2, 2, 2), (1, 2, 2), (2, 1, 2), (2, 2, 1))
"""Degrees of two tensors and of their product."""


class TensorProduct(nn.Module):
    """Messages along edges: products of features by what directions and lengths say (Batatia et
    al., 2022), a few small operations for each path of degrees."""

    def __init__(self, channels: int, radial: int) -> None:
        super().__init__()
        self.weigh = nn.Sequential(
            nn.Linear(radial, 16), nn.SiLU(), nn.Linear(16, len(PATHS) * channels)
        )
        for index, (a, b, c) in enumerate(PATHS):
            table = torch.randn(2 * a + 1, 2 * b + 1, 2 * c + 1) / (2 * c + 1)
            self.register_buffer(f"table_{index}", table)

    def forward(
        self,
        features: list[torch.Tensor],
        harmonics: list[torch.Tensor],
        lengths: torch.Tensor,
        edges: torch.Tensor,
    ) -> list[torch.Tensor]:
        """features: by degree, node, channel, component; the same comes out."""
        source, target = edges
        weights = self.weigh(lengths).chunk(len(PATHS), dim=-1)
        sums = [torch.zeros_like(f) for f in features]
        for index, (a, b, c) in enumerate(PATHS):
            table = getattr(self, f"table_{index}")
            message = torch.einsum("eki,ej,ijm->ekm", features[a][source], harmonics[b], table)
            message = message * weights[index].unsqueeze(-1)
            sums[c] = sums[c].index_add(0, target, message)
        return sums


class Contraction(nn.Module):
    """Powers of what arrives at a node, mixed by channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mix = nn.ModuleList([nn.Linear(channels, channels, bias=False) for _ in range(6)])
        self.gate = nn.Linear(channels, 2 * channels)

    def forward(
        self, arrived: list[torch.Tensor], before: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        made = []
        scalar = arrived[0].squeeze(-1)
        gates = self.gate(scalar).sigmoid().chunk(2, dim=-1)
        for degree, (a, b) in enumerate(zip(arrived, before, strict=True)):
            norm = a.pow(2).sum(dim=-1, keepdim=True)
            mixed = self.mix[2 * degree]((a * (1 + norm / (1 + norm))).transpose(1, 2))
            kept = self.mix[2 * degree + 1](b.transpose(1, 2))
            out = (mixed + kept).transpose(1, 2)
            made.append(functional.silu(out) if degree == 0 else out * gates[degree - 1][..., None])
        return made


class Potential(nn.Module):
    """The energy of atoms by layers of messages."""

    def __init__(self, layers: int, channels: int, radial: int) -> None:
        super().__init__()
        self.channels, self.radial = channels, radial
        self.embed = nn.Embedding(4, channels)
        self.products = nn.ModuleList([TensorProduct(channels, radial) for _ in range(layers)])
        self.contractions = nn.ModuleList([Contraction(channels) for _ in range(layers)])
        self.readouts = nn.ModuleList([nn.Linear(channels, 1) for _ in range(layers)])

    def forward(
        self, kinds: torch.Tensor, places: torch.Tensor, edges: torch.Tensor
    ) -> torch.Tensor:
        source, target = edges
        between = places[target] - places[source]
        length = between.norm(dim=-1, keepdim=True) + 1e-3
        x, y, z = (between / length).unbind(-1)
        harmonics = [
            torch.ones_like(x).unsqueeze(-1),
            torch.stack([x, y, z], dim=-1),
            torch.stack([x * y, y * z, 3 * z * z - 1, x * z, x * x - y * y], dim=-1),
        ]
        waves = torch.sin(length * torch.arange(1, self.radial + 1)) / length
        scalar = self.embed(kinds).unsqueeze(-1)
        features = [scalar, *(scalar.new_zeros(*scalar.shape[:2], n) for n in (3, 5))]
        energy = scalar.new_zeros(())
        for product, contract, read in zip(
            self.products, self.contractions, self.readouts, strict=True
        ):
            features = contract(product(features, harmonics, waves, edges), features)
            energy = energy + read(features[0].squeeze(-1)).sum()
        return energy


def mace(layers: int = 4, channels: int = 32, atoms: int = 20) -> Case:
    """An equivariant potential of many small operations."""
    kinds, places = torch.randint(0, 4, (atoms,)), torch.randn(atoms, 3)
    edges = torch.stack(torch.meshgrid(torch.arange(atoms), torch.arange(atoms), indexing="ij"))
    edges = edges.flatten(1)[:, edges.flatten(1)[0] != edges.flatten(1)[1]]
    model = Potential(layers, channels, 6).train()
    return Case(f"mace-{layers}", model, (kinds, places, edges), {}, _itself)


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, norm and two layers with channels last, a scale, a residual that is
    left out at random (Liu et al., 2022)."""

    def __init__(self, width: int, dropped: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-2))
        self.dropped = dropped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.scale * self.down(functional.gelu(self.up(h)))
        h = h.permute(0, 3, 1, 2)
        if self.dropped:
            kept = torch.empty(len(x), 1, 1, 1).bernoulli_(1 - self.dropped)
            h = h * kept / (1 - self.dropped)
        return x + h


class ChannelNorm(nn.Module):
    """A layer norm over channels, by means of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(1, keepdim=True)
        spread = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(spread + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


def convnext(
    depths: tuple[int, ...] = (3, 3, 9, 3), width: int = 32, batch: int = 4, size: int = 96
) -> Case:
    """ConvNeXt: stages of blocks, halved in between."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, stride=4), ChannelNorm(width)]
    for stage, depth in enumerate(depths):
        if stage:
            layers += [ChannelNorm(width), nn.Conv2d(width, 2 * width, 2, stride=2)]
            width *= 2
        layers += [ConvNeXtBlock(width, 0.1 * (stage + 1) / len(depths)) for _ in range(depth)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(width), nn.Linear(width, 10)]
    model = nn.Sequential(*layers).train()
    images = torch.randn(batch, 3, size, size)
    return Case(f"convnext-{sum(depths)}", model, (images,), {}, mean_square)


def _itself(result: torch.Tensor) -> torch.Tensor:
    return result


CASES: dict[str, Callable[[], Case]] = {
    "hyper": hyper,
    "hyper-10": lambda: hyper(layers=10),
    "ddpm": ddpm,
    "ddpm-4x4": lambda: ddpm(levels=4, blocks=4, size=32),
    "mace": mace,
    "mace-8": lambda: mace(layers=8),
    "convnext": convnext,
    "convnext-narrow": lambda: convnext(width=8, batch=2, size=64),
}
