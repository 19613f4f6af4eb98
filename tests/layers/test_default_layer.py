"""Layers that show nothing are not chosen by default: position maps, gates, attention, answers,
heads of others."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import explain
from explain.hooks import HookGroup
from explain.hooks.graph import Reach, keeping_values
from explain.methods import GradCAM
from explain.targets import Detections, Segmentation
from tests.conftest import settled

SIGNED = GradCAM(relu=False)


class Small(nn.Module):
    """A body of 12 channels, a head that reads their means, and what ``weigh`` does between them
    with ``parts``."""

    def __init__(self, weigh: Callable[..., torch.Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.weigh = weigh
        self.body = nn.Sequential(nn.Conv2d(3, 12, 8, 8), nn.ReLU())
        self.parts = nn.ModuleDict(parts)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = self.weigh(self.body(x), **self.parts)
        return self.head(maps.mean((2, 3)))


class Positions(nn.Module):
    """A map made from the size of another one."""

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        height, width = maps.shape[2:]
        return (
            torch.linspace(-1, 1, height * width)
            .view(1, 1, height, width)
            .repeat(len(maps), 12, 1, 1)
        )


class Constant(nn.Module):
    """A gate of 12 channels that is learned, and the same for all photos."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.randn(12, 8, 8))

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return self.logits.sigmoid().expand(len(maps), -1, -1, -1).clone()


def attended(maps: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The mean of maps with attention over their places, of several heads."""
    weights = logits.flatten(2).softmax(2)
    return torch.einsum("ncp,nkp->nck", maps.flatten(2), weights).mean(2)[..., None, None]


def conv(into: int) -> nn.Conv2d:
    return nn.Conv2d(12, into, 3, padding=1)


BESIDE: dict[str, Callable[[], nn.Module]] = {
    "position map": lambda: Small(lambda f, pos: f * (1 + pos(f)), pos=Positions()),
    "projected position map": lambda: Small(
        lambda f, pos, proj: f * (1 + proj(pos(f))), pos=Positions(), proj=conv(12)
    ),
    "constant gate": lambda: Small(lambda f, gate: f * gate(f), gate=Constant()),
    "mask of the size": lambda: Small(lambda f, gate: f * gate(torch.ones_like(f)), gate=conv(12)),
    "gate of one channel": lambda: Small(lambda f, gate: f * gate(f).sigmoid(), gate=conv(1)),
    "gate of all channels": lambda: Small(lambda f, gate: f * gate(f).sigmoid(), gate=conv(12)),
    "squeeze and excitation": lambda: Small(
        lambda f, gate: f * gate(f.mean((2, 3), keepdim=True)).sigmoid(), gate=nn.Conv2d(12, 12, 1)
    ),
    "coordinate attention": lambda: Small(
        lambda f, a, b: (
            f * a(f.mean(3, keepdim=True)).sigmoid() * b(f.mean(2, keepdim=True)).sigmoid()
        ),
        a=nn.Conv2d(12, 12, 1),
        b=nn.Conv2d(12, 12, 1),
    ),
    "attention logits": lambda: Small(lambda f, logits: attended(f, logits(f)), logits=conv(3)),
    "gated attention": lambda: Small(
        lambda f, v, u, w: attended(f, w(v(f).tanh() * u(f).sigmoid())),
        v=conv(8),
        u=conv(8),
        w=nn.Conv2d(8, 1, 1),
    ),
    "offsets": lambda: Small(
        lambda f, offset: torchvision.ops.deform_conv2d(
            f, offset(f), torch.ones(12, 12, 3, 3), padding=1
        ),
        offset=conv(18),
    ),
}


@pytest.mark.parametrize("kind", BESIDE)
def test_what_weighs_the_feature_map_is_not_the_layer(kind: str) -> None:
    model = settled(BESIDE[kind]()).eval()
    x = torch.rand(2, 3, 64, 64)
    assert explain.attribute(model, x, "eigencam", target=1).layer == "body"


def test_what_looks_like_a_gate_is_the_layer_where_all_comes_through_it() -> None:
    x = torch.rand(2, 3, 64, 64)
    parts = {"last": conv(12)}
    squeezed = Small(lambda f, last: last(f).sigmoid(), **parts)
    residual = Small(lambda f, last: f + last(f), **parts)
    both = Small(lambda f, last, beside: last(f) * beside(f), **parts, beside=conv(12))
    layers = [
        explain.attribute(settled(m).eval(), x, SIGNED).layer for m in (squeezed, residual, both)
    ]
    assert layers == ["parts.last", "parts.last", "parts.beside"]


class Maps(nn.Module):
    """A network whose answer is a map: ``finish`` is what it does with the last layer's output."""

    def __init__(self, channels: int, finish: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 12, 3, 2, 1), nn.ReLU()
        )
        self.last = nn.Conv2d(12, channels, 1)
        self.finish = finish

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.finish(self.last(self.encoder(x)))


@pytest.mark.parametrize(
    ("channels", "finish"),
    [
        (1, lambda maps: maps[:, 0].exp()),  # depth (N, h, w)
        (1, lambda maps: F.interpolate(maps, scale_factor=4)),  # depth (N, 1, H, W)
        # depth in bins
        (9, lambda maps: (maps.softmax(1) * torch.arange(9.0).view(9, 1, 1)).sum(1)),
        (48, lambda maps: F.pixel_shuffle(maps, 4)),
        (7, lambda maps: maps.sigmoid()),  # heat maps of key points
    ],
)
def test_an_answer_that_is_a_map_is_not_the_layer(
    channels: int, finish: Callable[[torch.Tensor], Any]
) -> None:
    model = settled(Maps(channels, finish)).eval()
    found = explain.attribute(
        model, torch.rand(2, 3, 32, 32), SIGNED, target=lambda o: o.flatten(1).mean(1)
    )
    assert found.layer == "encoder"


class MapsAndClasses(nn.Module):
    """A map of classes behind a decoder, and classes of the whole photo."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU())
        decoder = [nn.Sequential(nn.Conv2d(12, 12, 3, 1, 1), nn.ReLU()) for _ in range(blocks)]
        self.decoder = nn.Sequential(nn.ConvTranspose2d(8, 12, 2, 2), *decoder)
        self.maps, self.classes = nn.Conv2d(12, 4, 1), nn.Linear(8, 7)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.passes += 1
        encoded = self.encoder(x)
        return self.maps(self.decoder(encoded)), self.classes(encoded.mean((2, 3)))


@pytest.mark.parametrize("blocks", [3, 30])
def test_the_layer_is_one_that_the_target_comes_from(blocks: int) -> None:
    model = settled(MapsAndClasses(blocks)).eval()
    x = torch.rand(2, 1, 32, 32)
    region = Segmentation(2, torch.ones(32, 32))
    for target, layer in [
        (3, "encoder"),
        (region, "decoder"),
        (lambda o: o[1][:, 3], "encoder"),
        (5, "encoder"),
    ]:
        assert explain.attribute(model, x, SIGNED, target=target).layer == layer
    model.passes = 0
    assert explain.attribute(model, x, "eigencam", target=5).layer == "encoder"
    assert model.passes == 1  # the layer of classes is kept


def test_a_graph_without_values_shows_what_depends_on_what_and_keeps_nothing() -> None:
    x = torch.rand(3, requires_grad=True)
    with keeping_values():
        between = x.exp()  # backward would need it
        y = between.square()
    alive = weakref.ref(between)
    del between
    assert alive() is None
    assert Reach([x]).of(y.grad_fn)
    with pytest.raises(RuntimeError, match="values"):
        y.sum().backward()


def outputs_of(model: nn.Module, layer: str, inputs: explain.Inputs) -> torch.Tensor:
    """What a layer gives."""
    seen: list[torch.Tensor] = []
    with torch.no_grad(), HookGroup(model) as group:
        group.forward(
            layer,
            lambda module, args, output: seen.append(getattr(output, "last_hidden_state", output)),
        )
        model(*inputs.args, **inputs.kwargs)
    return seen[-1]


def detectors() -> dict[str, tuple[nn.Module, dict[str, Any], str]]:
    """Tiny detectors that attend, what they take beside a photo, and where their patches or maps
    become tokens."""
    transformers = pytest.importorskip("transformers", reason="transformers is an extra")
    common = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    yolos = transformers.YolosConfig(
        **common,
        num_hidden_layers=2,
        image_size=[32, 48],
        patch_size=8,
        num_detection_tokens=5,
        num_labels=3,
        use_mid_position_embeddings=False,
    )
    text = {**common, "num_hidden_layers": 1, "vocab_size": 50, "max_position_embeddings": 16}
    special = {"bos_token_id": 1, "eos_token_id": 49, "pad_token_id": 0}
    owl = transformers.OwlViTConfig(
        text_config={**text, **special},
        projection_dim=16,
        vision_config={**common, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8},
    )
    backbone = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )
    detr = transformers.DetrConfig(
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=5,
        num_labels=3,
        use_timm_backbone=False,
        backbone_config=backbone,
        use_pretrained_backbone=False,
        backbone=None,
    )
    words = {"input_ids": torch.tensor([[3, 4, 49], [5, 6, 49]])}
    return {
        "YOLOS": (
            transformers.YolosForObjectDetection(yolos),
            {},
            "vit.encoder.layer.1.layernorm_before",
        ),
        "OWL-ViT": (
            transformers.OwlViTForObjectDetection(owl),
            words,
            "owlvit.vision_model.encoder.layers.1.layer_norm1",
        ),
        "DETR": (transformers.DetrForObjectDetection(detr), {}, "model.encoder"),
    }


@pytest.mark.filterwarnings("ignore:::transformers")
@pytest.mark.parametrize("name", ["YOLOS", "OWL-ViT", "DETR"])
def test_detectors_with_attention_are_explained_at_the_tokens_that_it_reads(name: str) -> None:
    torch.manual_seed(0)
    model, others, layer = detectors()[name]
    side = 48 if name == "YOLOS" else 32
    one, two = (
        explain.Inputs(
            kwargs={**others, "pixel_values": x}, explained="pixel_values", shared=list(others)
        )
        for x in torch.rand(2, 1, 3, 32, side)
    )
    for target in (Detections(threshold=0.0), lambda output: output.logits[:, 2, 1]):
        found = explain.attribute(model.eval(), one, SIGNED, target=target)
        assert found.layer == layer
        assert found.values.any()
    assert not torch.equal(outputs_of(model, layer, one), outputs_of(model, layer, two))
