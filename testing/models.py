"""Models with random weights: each factory returns a Case, in training mode with dropout on.

transformers models are built from configurations, so nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class Case:
    """A module, one call of it, and the loss of its result."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], torch.Tensor]

    def step(self, module: nn.Module | None = None) -> None:
        """Forward and backward of `module` (a variant of the model) on the sample."""
        result = (self.model if module is None else module)(*self.args, **self.kwargs)
        self.loss(result).backward()

    def to(self, device: torch.device | str) -> Case:
        """The same with the model, which is moved, and every tensor of the call on `device`."""
        args, kwargs = moved((self.args, self.kwargs), device)
        return replace(self, model=self.model.to(device), args=args, kwargs=kwargs)


def moved(tree: Any, device: torch.device | str) -> Any:
    """The tensors of `tree` on `device`: leaves as leaves, one that occurs twice as one."""
    known: dict[int, torch.Tensor] = {}

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:
            found = tensor.to(device)
            if found is not tensor and tensor.is_leaf:
                found = found.detach().requires_grad_(tensor.requires_grad)
            known[id(tensor)] = found
        return known[id(tensor)]

    return pytree.tree_map_only(torch.Tensor, one, tree)


def _transformers() -> Any:
    """The library, without its remarks on small configurations."""
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def _of_result(result: Any) -> torch.Tensor:
    return result.loss


def mean_square(result: torch.Tensor) -> torch.Tensor:
    return result.pow(2).mean()


def _tokens(vocabulary: int, batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length))


def gpt2(
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    vocabulary: int = 128,
    batch: int = 2,
    length: int = 64,
    attention: str = "sdpa",
    attention_dropout: float = 0.1,
) -> Case:
    """GPT-2 of transformers with its loss inside, keyword inputs, dictionary-like output.

    On CPU attention 'sdpa' is one operator only without attention_dropout.
    """
    transformers = _transformers()

    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        vocab_size=vocabulary,
        n_positions=length,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
        attn_implementation=attention,
        attn_pdrop=attention_dropout,
    )
    ids = _tokens(vocabulary, batch, length)
    model = transformers.GPT2LMHeadModel(config).train()
    return Case(f"gpt2-{layers}", model, (), {"input_ids": ids, "labels": ids}, _of_result)


def llama(
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    key_value_heads: int = 2,
    vocabulary: int = 128,
    batch: int = 2,
    length: int = 64,
) -> Case:
    """Llama of transformers with grouped attention."""
    transformers = _transformers()

    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    ids = _tokens(vocabulary, batch, length)
    model = transformers.LlamaForCausalLM(config).train()
    return Case(f"llama-{layers}", model, (), {"input_ids": ids, "labels": ids}, _of_result)


def bert(
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    vocabulary: int = 128,
    batch: int = 2,
    length: int = 64,
) -> Case:
    """BERT of transformers with an attention mask whose values its forward looks at."""
    transformers = _transformers()

    config = transformers.BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=heads,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        loss_type="ForMaskedLM",
    )
    ids = _tokens(vocabulary, batch, length)
    kwargs = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    return Case(
        f"bert-{layers}", transformers.BertForMaskedLM(config).train(), (), kwargs, _of_result
    )


def vit(
    layers: int = 2, width: int = 64, heads: int = 4, batch: int = 2, size: int = 32, patch: int = 8
) -> Case:
    """A vision transformer of transformers with its loss inside."""
    transformers = _transformers()

    config = transformers.ViTConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=heads,
        image_size=size,
        patch_size=patch,
        num_labels=10,
        hidden_dropout_prob=0.1,
    )
    kwargs = {"pixel_values": torch.randn(batch, 3, size, size)}
    kwargs["labels"] = torch.randint(0, 10, (batch,))
    model = transformers.ViTForImageClassification(config).train()
    return Case(f"vit-{layers}", model, (), kwargs, _of_result)


class Bottleneck(nn.Module):
    """Residual bottleneck of ResNet-50 with in-place ReLU (He et al., 2016)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    """ResNet-50 where depths is (3, 4, 6, 3) and width 64."""

    def __init__(self, depths: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        stages = []
        inputs = width
        for number, depth in enumerate(depths):
            inner = width * 2**number
            blocks = [Bottleneck(inputs, inner, 1 if number == 0 else 2)]
            blocks += [Bottleneck(4 * inner, inner, 1) for _ in range(depth - 1)]
            stages.append(nn.Sequential(*blocks))
            inputs = 4 * inner
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stages(self.stem(x))
        return self.head(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1))


def resnet(
    depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 8, batch: int = 4, size: int = 64
) -> Case:
    """A ResNet-50-shaped network with BatchNorm in training mode."""
    images = torch.randn(batch, 3, size, size)
    return Case("resnet-50", ResNet(depths, width, 10).train(), (images,), {}, mean_square)


class BasicBlock(nn.Module):
    """Residual block of ResNet-18 with in-place ReLU (He et al., 2016)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def resnet18(width: int = 16, batch: int = 4, size: int = 64) -> Case:
    """ResNet-18: four stages of two basic blocks."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = width
    for number in range(4):
        outputs = width * 2**number
        layers.append(BasicBlock(inputs, outputs, 1 if number == 0 else 2))
        layers.append(BasicBlock(outputs, outputs, 1))
        inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10)]
    model = nn.Sequential(*layers).train()
    return Case("resnet-18", model, (torch.randn(batch, 3, size, size),), {}, mean_square)


def _convolutions(inputs: int, outputs: int) -> nn.Sequential:
    """Twice convolution, normalization, ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Encoder and decoder with a concatenated skip at each level (Ronneberger et al., 2015)."""

    def __init__(self, levels: int, width: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(
            [_convolutions(a, b) for a, b in zip([3, *widths], widths, strict=False)]
        )
        self.grow = nn.ModuleList(
            [nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(widths, widths[1:], strict=False)]
        )
        self.up = nn.ModuleList([_convolutions(2 * a, a) for a in widths[:-1]])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for stage in self.down[:-1]:
            x = stage(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.down[-1](x)
        for grow, stage in zip(reversed(self.grow), reversed(self.up), strict=True):
            x = stage(torch.cat([grow(x), skips.pop()], 1))
        return self.head(x)


def unet(levels: int = 4, width: int = 8, batch: int = 2, size: int = 64) -> Case:
    """A UNet: 2 x `levels` stages, the outer ones with skips."""
    images = torch.randn(batch, 3, size, size)
    return Case(f"unet-{levels}", UNet(levels, width).train(), (images,), {}, mean_square)


class Dense(nn.Module):
    """A layer of DenseNet: its result beside everything before it (Huang et al., 2017)."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.conv = nn.Conv2d(inputs, growth, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.conv(torch.relu(self.norm(x)))], 1)


def densenet(
    layers: int = 4, groups: int = 3, growth: int = 12, batch: int = 4, size: int = 32
) -> Case:
    """`groups` of dense layers with halving transitions between them."""
    width = 2 * growth
    stack: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False)]
    for group in range(groups):
        for _ in range(layers):
            stack.append(Dense(width, growth))
            width += growth
        if group < groups - 1:
            stack += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1, bias=False)]
            stack.append(nn.AvgPool2d(2))
            width //= 2
    stack += [nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*stack, nn.Linear(width, 10)).train()
    images = torch.randn(batch, 3, size, size)
    return Case(f"densenet-{groups}x{layers}", model, (images,), {}, mean_square)


def t5(
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    vocabulary: int = 128,
    batch: int = 2,
    length: int = 64,
) -> Case:
    """T5 of transformers: `layers` of encoder and as many of decoder, with cross-attention."""
    transformers = _transformers()

    config = transformers.T5Config(
        num_layers=layers,
        num_decoder_layers=layers,
        d_model=width,
        d_ff=4 * width,
        d_kv=width // heads,
        num_heads=heads,
        vocab_size=vocabulary,
        use_cache=False,
        decoder_start_token_id=0,
    )
    ids = _tokens(vocabulary, batch, length)
    model = transformers.T5ForConditionalGeneration(config).train()
    return Case(f"t5-{layers}+{layers}", model, (), {"input_ids": ids, "labels": ids}, _of_result)


def mlp(depth: int = 8, width: int = 64, batch: int = 128) -> Case:
    """Linear, ReLU, Dropout, repeated."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1)]
    model = nn.Sequential(*layers, nn.Linear(width, 8)).train()
    return Case(f"mlp-{depth}", model, (torch.randn(batch, width),), {}, mean_square)


def encoder(layers: int = 2, width: int = 64, batch: int = 4, length: int = 32) -> Case:
    """nn.TransformerEncoder."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    model = nn.TransformerEncoder(layer, layers).train()
    sample = torch.randn(batch, length, width)
    return Case(f"encoder-{layers}", model, (sample,), {}, mean_square)


CASES: dict[str, Callable[[], Case]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "resnet": resnet,
    "mlp": mlp,
    "encoder": encoder,
}
