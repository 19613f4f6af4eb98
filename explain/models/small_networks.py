"""Networks that come along: a residual one, a vision transformer on 8 x 8 tokens,
EfficientNet-Lite0, a segmenter.

The parts of classifiers are named as in torchvision's ResNet, VisionTransformer and EfficientNet,
but defined here: importing torchvision would take longer than all the rest, and these models should
work even if it does not fit the torch here. The segmenter is MediaPipe's selfie segmenter.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut, which a strided block averages instead of
    skipping pixels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        """Build a block of the bundled residual networks, from ``inputs`` to ``outputs`` channels;
        names of parts are keys of the weights file, as in torchvision's ResNet."""
        super().__init__()
        width = outputs // 4
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride > 1 or inputs != outputs:
            pool: nn.Module = nn.Identity()
            if stride > 1:
                pool = nn.AvgPool2d(stride, ceil_mode=True, count_include_pad=False)
            self.downsample = nn.Sequential(
                pool, nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output of a residual block: from ``(N, inputs, H, W)`` to ``(N, outputs, H / stride,
        W / stride)``: the three convolutions, plus the shortcut, in place."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        x += shortcut
        return self.relu(x)


class SmallResNet(nn.Module):
    """A residual network for small images: ``(N, 3, H, W)`` to logits ``(N, classes)``, by the mean
    of a map of 1/8 of the input's size and one linear layer."""

    def __init__(
        self,
        classes: int = 200,
        stem: int = 32,
        widths: tuple[int, ...] = (128, 256, 512),
        depths: tuple[int, ...] = (2, 3, 4),
    ) -> None:
        """``stem`` channels after the first convolution, then stages of these ``widths`` and
        ``depths``. Names of parts are keys of the weights file.
        """
        super().__init__()
        self.conv1 = nn.Conv2d(3, stem, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(stem)
        self.relu = nn.ReLU(inplace=True)
        inputs = stem
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True), start=1):
            layer = nn.Sequential(Bottleneck(inputs, width, stride=2 if stage > 1 else 1))
            for _ in range(depth - 1):
                layer.append(Bottleneck(width, width, stride=1))
            self.add_module(f"layer{stage}", layer)
            inputs = width
        self.stages = len(widths)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits ``(N, classes)`` of photos ``(N, 3, H, W)``."""
        x = self.relu(self.bn1(self.conv1(x)))
        for stage in range(1, self.stages + 1):
            x = self.get_submodule(f"layer{stage}")(x)
        return self.fc(self.avgpool(x).flatten(1))


class EncoderBlock(nn.Module):
    """Self-attention and a two-layer network, each after a normalisation and around a shortcut."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        """Build a transformer block of the bundled models for tokens of ``width`` channels; names
        are those of torchvision's, and keys of the weights file."""
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.self_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output of a transformer block: from tokens ``(N, tokens, width)`` to tokens of the
        same shape."""
        normalised = self.ln_1(x)
        x = x + self.self_attention(normalised, normalised, normalised, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class SmallTransformer(nn.Module):
    """A vision transformer for images of 64 x 64 pixels, or another multiple of 8 as ``side``: a
    class token and one token for each 8 x 8 pixels. Gives logits ``(N, classes)``."""

    def __init__(
        self,
        classes: int = 200,
        side: int = 64,
        stem: tuple[int, int, int] = (32, 128, 256),
        width: int = 128,
        heads: int = 4,
        depth: int = 5,
    ) -> None:
        """Build the bundled model "tiny-transformer" for photos of ``side`` pixels; names of parts,
        and the shape of the position embedding, are those of the weights file."""
        super().__init__()
        first, second, third = stem
        self.conv1 = nn.Conv2d(3, first, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(first)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Bottleneck(first, second, 1), Bottleneck(second, second, 1))
        self.layer2 = nn.Sequential(Bottleneck(second, third, 2))
        self.avgpool = nn.AvgPool2d(2)
        self.conv_proj = nn.Conv2d(third, width, 1)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embedding = nn.Parameter(
            torch.empty(1, 1 + (side // 8) ** 2, width).normal_(std=0.02)
        )
        self.layers = nn.Sequential()
        for _ in range(depth):
            self.layers.append(EncoderBlock(width, heads, 4 * width))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Return the feature maps of the convolutional stem, one vector for each 8 x 8 pixels:
        ``(N, C, H / 8, W / 8)``."""
        x = self.relu(self.bn1(self.conv1(x)))
        return self.avgpool(self.layer2(self.layer1(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits ``(N, classes)`` of photos ``(N, 3, side, side)``, read from the class token."""
        patches = self.conv_proj(self.features(x)).flatten(2).transpose(1, 2)
        class_tokens = self.class_token.expand(len(patches), -1, -1)
        tokens = torch.cat([class_tokens, patches], dim=1) + self.pos_embedding
        return self.head(self.ln(self.layers(tokens))[:, 0])


STAGES = (  # expansion, kernel, stride, channels, blocks
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
EPSILON = 1e-3  # in the normalisations, as in TensorFlow


class SameConv2d(nn.Conv2d):
    """A convolution that pads as TensorFlow's "same" does: by the input's size, the odd pixel on
    the right and below. The output has 1/stride of the input's size, rounded up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pad as TensorFlow does (the odd pixel on the right and below) and convolve: ``(N, C, H,
        W)`` to 1/stride of the size, rounded up."""
        sides = zip(x.shape[-2:], self.stride, self.kernel_size, strict=True)
        # pixels that the windows of all outputs reach beyond the input
        high, wide = (
            max((-(-side // stride) - 1) * stride + kernel - side, 0)
            for side, stride, kernel in sides
        )
        padded = F.pad(x, (wide // 2, wide - wide // 2, high // 2, high - high // 2))
        return F.conv2d(padded, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class ConvNormActivation(nn.Sequential):
    """A convolution without bias, a batch normalisation, and a ReLU6 if wanted."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 1,
        stride: int = 1,
        groups: int = 1,
        *,
        activation: bool = True,
    ) -> None:
        """For EfficientNet-Lite0, append the convolution, the normalisation and the ReLU6. The
        published weights are assigned in this order of parameters."""
        super().__init__()
        # Without a stride, the padding is the same on all sides and for all sizes.
        kind, padding = (SameConv2d, 0) if stride > 1 else (nn.Conv2d, kernel // 2)
        self.append(kind(inputs, outputs, kernel, stride, padding, groups=groups, bias=False))
        self.append(nn.BatchNorm2d(outputs, eps=EPSILON))
        if activation:
            self.append(nn.ReLU6())


class MBConv(nn.Module):
    """An inverted residual block: expand, filter each channel on its own, project; with a shortcut
    if shapes allow."""

    def __init__(self, inputs: int, outputs: int, expansion: int, kernel: int, stride: int) -> None:
        """Build an inverted residual block of EfficientNet-Lite0; ``expansion`` is how many times
        the input's channels are in the middle. The order of parts is that of the weights file."""
        super().__init__()
        width = inputs * expansion
        self.block = nn.Sequential()
        if expansion > 1:
            self.block.append(ConvNormActivation(inputs, width))
        self.block.append(ConvNormActivation(width, width, kernel, stride, groups=width))
        self.block.append(ConvNormActivation(width, outputs, activation=False))
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output of an inverted residual block: from ``(N, inputs, H, W)`` to ``(N, outputs, H
        / stride, W / stride)``."""
        out: torch.Tensor = self.block(x)
        return out + x if self.shortcut else out


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0, without squeeze-and-excitation and with ReLU6: ``(N, 3, H, W)`` of any
    size to logits ``(N, classes)``, by a map of 1/32 of the input's size."""

    def __init__(self, classes: int = 1000) -> None:
        """Build EfficientNet-Lite0 from the table `STAGES`. The order of parameters must stay: the
        published weights are assigned in this order."""
        super().__init__()
        inputs = 32
        self.features = nn.Sequential(ConvNormActivation(3, inputs, 3, 2))
        for expansion, kernel, stride, outputs, count in STAGES:
            stage = nn.Sequential(MBConv(inputs, outputs, expansion, kernel, stride))
            for _ in range(count - 1):
                stage.append(MBConv(outputs, outputs, expansion, kernel, 1))
            self.features.append(stage)
            inputs = outputs
        self.features.append(ConvNormActivation(inputs, 1280))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


SIXTH = 0.166626  # 1 / 6 in half precision, which the published network computes with


class Hardswish(nn.Hardswish):
    """``x * relu6(x + 3)`` times a sixth, as the published network rounds it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 6 * SIXTH * super().forward(x)


BLOCKS: tuple[tuple[int, int, int, int, int | None, type[nn.Module]], ...] = (
    # expanded channels, channels, kernel, stride, channels in the gate, activation
    (16, 16, 3, 2, 8, nn.ReLU),
    (72, 24, 3, 2, None, nn.ReLU),
    (88, 24, 3, 1, None, nn.ReLU),
    (96, 32, 5, 2, 24, Hardswish),
    (128, 32, 5, 1, 32, Hardswish),
    (128, 32, 5, 1, 32, Hardswish),
    (96, 32, 5, 1, 24, Hardswish),
    (96, 32, 5, 1, 24, Hardswish),
)
# channels before and after the blocks
STEM = 16
CONTEXT = 128
FINER = (2, 0)  # the blocks whose maps the decoder adds; then it adds the stem's


class Gate(nn.Sequential):
    """A factor from 0 to 1 for each channel, from the means of all channels: ``(N, C, H, W)`` to
    ``(N, C', 1, 1)``."""

    def __init__(self, inputs: int, outputs: int, hidden: int | None = None) -> None:
        """A channel gate: pooling, one or (with ``hidden`` channels) two 1 x 1 convolutions, and a
        sigmoid; positions are keys of the weights file.
        """
        super().__init__(nn.AdaptiveAvgPool2d(1))
        if hidden is not None:
            self.append(nn.Conv2d(inputs, hidden, 1))
            self.append(nn.ReLU())
        self.append(nn.Conv2d(hidden or inputs, outputs, 1))
        self.append(nn.Sigmoid())


class InvertedResidual(nn.Module):
    """Expand, filter each channel on its own, weight the channels, project; with a shortcut if
    shapes allow."""

    def __init__(
        self,
        inputs: int,
        width: int,
        outputs: int,
        kernel: int,
        stride: int,
        gate: int | None,
        activation: type[nn.Module],
    ) -> None:
        """Build a block of the person segmenter, with ``width`` channels in the middle and ``gate``
        hidden channels in its channel gate, or no gate. Names are keys of the weights file."""
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(inputs, width, 1), activation())
        depthwise = SameConv2d(width, width, kernel, stride, groups=width)
        self.filter = nn.Sequential(depthwise, activation())
        self.gate = None if gate is None else Gate(width, width, gate)
        self.project = nn.Conv2d(width, outputs, 1)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output of a block of the person segmenter: from ``(N, inputs, H, W)`` to ``(N,
        outputs, H / stride, W / stride)``."""
        filtered = self.filter(self.expand(x))
        out: torch.Tensor = self.project(
            filtered if self.gate is None else filtered * self.gate(filtered)
        )
        return out + x if self.shortcut else out


def resized(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Maps at the resolution of others."""
    return F.interpolate(x, size=other.shape[-2:], mode="bilinear", align_corners=False)


class DecoderStep(nn.Module):
    """Enlarge a map to the size of a finer one, weight the channels of that, and add them."""

    def __init__(self, inputs: int, width: int) -> None:
        """Build a step of the person segmenter's decoder, from ``inputs`` channels to ``width``,
        those of the finer map. Names are keys of the weights file."""
        super().__init__()
        self.reduce = nn.Conv2d(inputs, width, 1)
        self.gate = Gate(width, width, width)
        self.mix = nn.Sequential(nn.Conv2d(width, width, 1), nn.ReLU())
        self.filter = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, groups=width), nn.ReLU())

    def forward(self, x: torch.Tensor, finer: torch.Tensor) -> torch.Tensor:
        """Enlarge a coarse map ``x`` ``(N, inputs, h, w)`` to the size of a finer one of the
        encoder ``(N, width, H, W)``, and mix both: ``(N, width, H, W)``."""
        x = self.reduce(resized(x, finer))
        x = self.mix(finer * self.gate(finer + x) + x)
        return x + self.filter(x)


class PersonSegmenter(nn.Module):
    """Whether each pixel is part of a person: images ``(N, 3, H, W)`` in RGB from 0 to 1, H and W
    multiples of 32, to logits ``(N, 1, H, W)``. MediaPipe's network ends with their sigmoids."""

    def __init__(self) -> None:
        """Build the person segmenter: encoder, context and decoder from the tables `BLOCKS` and
        `FINER`. Names are keys of the weights file."""
        super().__init__()
        self.stem = nn.Sequential(SameConv2d(3, STEM, 3, 2), Hardswish())
        self.blocks = nn.ModuleList()
        inputs = STEM
        block_widths = []
        for width, outputs, kernel, stride, gate, activation in BLOCKS:
            block = InvertedResidual(inputs, width, outputs, kernel, stride, gate, activation)
            self.blocks.append(block)
            block_widths.append(outputs)
            inputs = outputs
        self.context = nn.Sequential(nn.Conv2d(inputs, CONTEXT, 1), nn.ReLU())
        self.context_gate = Gate(inputs, CONTEXT)
        finer_widths = [*(block_widths[number] for number in FINER), STEM]
        # each step takes the channels of the one before, the first those of the context
        self.decoder = nn.ModuleList(map(DecoderStep, [CONTEXT, *finer_widths], finer_widths))
        self.output = nn.ConvTranspose2d(STEM, 1, kernel_size=2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Encode, then decode from coarse to fine over the encoder's maps that `FINER` names, and
        the stem's; see the class for shapes."""
        stem_map = self.stem(x)
        x = stem_map
        block_maps = []
        for block in self.blocks:
            x = block(x)
            block_maps.append(x)
        x = self.context(x) * self.context_gate(x)
        finer_maps = [*(block_maps[number] for number in FINER), stem_map]
        for step, finer in zip(self.decoder, finer_maps, strict=True):
            x = step(x, finer)
        return self.output(x)
