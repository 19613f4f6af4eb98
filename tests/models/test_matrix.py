"""One member of every family of classifiers, and small networks with the traits that make a layer
hard to find."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import explain
from explain import ModelError
from explain.methods import GradCAM
from explain.methods.base import get_method
from explain.models import load
from tests.conftest import settled, snapshot
from tests.hooks.test_tour import example

matrix = example("model_matrix")

FAMILIES = [
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "googlenet",
    "inception_v3",
    "maxvit_t",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "regnet_x_400mf",
    "regnet_y_400mf",
    "resnet18",
    "resnext50_32x4d",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    "swin_t",
    "swin_v2_t",
    "vgg11",
    "vit_b_16",
]
SIGNED = GradCAM(relu=False)
THOROUGH = {"mobilenet_v3_small", "squeezenet1_1"}
TIMM = [
    "convnext_atto",
    "convmixer_768_32",
    "levit_128s",
    "mobilevit_xxs",
    "pit_ti_224",
    "poolformer_s12",
]
LARGE = {
    "torchvision": {
        "alexnet",
        "convnext_tiny",
        "densenet121",
        "efficientnet_b0",
        "googlenet",
        "inception_v3",
        "maxvit_t",
        "mnasnet0_5",
        "regnet_x_400mf",
        "regnet_y_400mf",
        "resnext50_32x4d",
        "swin_t",
        "swin_v2_t",
        "vgg11",
        "vit_b_16",
    },
    "timm": {
        "cait_xxs24_224",
        "convmixer_768_32",
        "efficientformer_l1",
        "levit_128s",
        "mixer_s32_224",
        "pit_ti_224",
        "swin_tiny_patch4_window7_224",
        "vit_tiny_patch16_224",
        "vit_small_patch14_reg4_dinov2",
        "xcit_nano_12_p16_224",
    },
}
HUGGING_FACE = ["ViT", "DeiT", "Beit", "Dinov2WithRegisters", "Swin", "ConvNext", "ResNet"]


@pytest.fixture(autouse=True)
def _same_inputs() -> None:
    torch.manual_seed(0)


def subject_of(source: str, name: str) -> Any:
    """The model of a name in the matrix."""
    return next(
        subject for subject in matrix.SOURCES[source]() if subject.name.split(":")[-1] == name
    )


def failures(source: str, name: str, methods: list[Any] = matrix.METHODS) -> list[str]:
    row = matrix.check(subject_of(source, name), methods)
    assert len(row.cells) == len(methods)
    return [*row.failures, *(["no layer"] if row.layer == "-" else [])]


def also_large(source: str, names: list[str]) -> list[Any]:
    """Names to be tested, of which the large ones take long."""
    large = LARGE[source]
    small = [name for name in names if name not in large]
    return [*small, *(pytest.param(name, marks=pytest.mark.long) for name in sorted(large))]


@pytest.mark.parametrize("name", also_large("torchvision", FAMILIES))
def test_every_torchvision_family_is_explained(name: str) -> None:
    methods = (
        matrix.METHODS if name in THOROUGH else [get_method("gradcam"), get_method("saliency")]
    )
    assert failures("torchvision", name, methods) == []


@pytest.mark.parametrize("name", also_large("timm", TIMM))
@pytest.mark.filterwarnings("ignore:::timm")
def test_timm(name: str) -> None:
    pytest.importorskip("timm", reason="timm is an extra")
    assert failures("timm", name, [get_method("gradcam"), get_method("saliency")]) == []


@pytest.mark.parametrize("name", HUGGING_FACE)
@pytest.mark.filterwarnings("ignore:::transformers")
def test_hugging_face(name: str) -> None:
    pytest.importorskip("transformers", reason="transformers is an extra")
    assert failures("transformers", name) == []


def test_a_timm_model_is_asked_for_by_name() -> None:
    if importlib.util.find_spec("timm") is None:
        with pytest.raises(ModelError, match="timm must be installed for the model 'timm:vit'"):
            load("timm:vit")
    else:
        with pytest.raises(ModelError, match="'timm:convnext_tinny' is unknown"):
            load("timm:convnext_tinny")


class Attention(nn.Module):
    """Tokens to tokens; on the way, heads and weights that are as wide and high as maps."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.q_norm = nn.Identity()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, queries: int | None = None) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q = self.q_norm(q[:, :, :queries])
        weights = self.drop((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1))
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.attn = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyTransformer(nn.Module):
    """A class token, registers, and a head for the class token or for the mean; patches of 8
    pixels."""

    def __init__(self, extra: int = 1, *, pooled: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 12, 8, 8)
        self.tokens = nn.Parameter(torch.zeros(1, extra, 12))
        self.blocks = nn.Sequential(Layer(12), Layer(12))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 5)
        self.extra = extra
        self.pooled = pooled

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).mT
        return torch.cat([self.tokens.expand(len(x), -1, -1), tokens], 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.blocks(self.embed(x)))
        return self.head(x[:, self.extra :].mean(1) if self.pooled else x[:, 0])


class ClassAttention(TinyTransformer):
    """The last layers change the class token alone, though they hand all tokens on (CaiT, XCiT)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(12)
        self.last = Attention(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.embed(x))
        x = torch.cat([x[:, :1] + self.last(self.norm1(x), 1), x[:, 1:]], 1)
        return self.head(self.norm(x)[:, 0])


@pytest.mark.parametrize(
    ("build", "layer"),
    [
        (lambda: TinyTransformer(extra=5), "blocks.1.norm1"),
        (lambda: TinyTransformer(extra=0, pooled=True), "blocks.1.norm1"),
        (lambda: TinyTransformer(extra=5, pooled=True), "blocks.1.norm1"),
        (ClassAttention, "norm1"),
    ],
)
@pytest.mark.parametrize("size", [(24, 40), (32, 32)])
def test_transformers_are_explained_where_the_score_comes_from(
    build: Callable[[], nn.Module], layer: str, size: tuple[int, int]
) -> None:
    model = settled(build()).eval()
    x = torch.randn(2, 3, *size)
    before = snapshot(model)
    maps = explain.attribute(model, x, [SIGNED, *matrix.METHODS[2:]], target=1)
    assert snapshot(model) == before
    assert maps["gradcam"].layer == layer
    assert maps["gradcam"].values.shape == (2, size[0] // 8, size[1] // 8)
    assert all(a.values.isfinite().all() and a.values.any() for a in maps.values())


@pytest.mark.parametrize("size", [(60, 100), (100, 60), (31, 70)])
def test_tokens_lie_as_the_patches_did_where_the_input_is_no_multiple_of_them(
    size: tuple[int, int],
) -> None:
    model = settled(TinyTransformer()).double().eval()
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    maps = explain.attribute(model, x, SIGNED, target=1, layer="blocks.0")
    rows = size[0] // 8, size[1] // 8
    assert maps.values.shape == (2, *rows)
    tokens = model.blocks[0](model.embed(x)).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(
        model.head(model.norm(model.blocks[1](tokens))[:, 0])[:, 1].sum(), tokens
    )
    weights = gradient[:, 1:].mean(1, keepdim=True)
    expected = (weights * tokens.detach()[:, 1:]).sum(2).reshape(2, *rows)
    assert_close(maps.values, expected)
