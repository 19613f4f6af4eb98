"""Relevance on networks that others wrote: conserved, finite, the same again, and no weight touched."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torchvision
from torch import nn

import explain
from explain.methods import LRP
from tests.test_models_matrix import matrix

HUGE = ("vit_l", "vit_h", "regnet_y_128gf", "regnet_y_32gf", "regnet_x_32gf", "convnext_large", "efficientnet_v2_l",
        "efficientnet_b7", "efficientnet_b6", "wide_resnet101", "resnext101_64x4d", "vgg16", "vgg19", "vgg13",
        "swin_b", "swin_v2_b", "convnext_base", "densenet161", "densenet201", "resnet152",
        "efficientnet_b5")  # fmt: skip
TORCHVISION = [n for n in torchvision.models.list_models(module=torchvision.models) if not n.startswith(HUGE)]
TIMM = [
    "resnet26t", "resnetv2_50", "efficientnet_lite0", "mobilenetv4_conv_small", "ghostnet_100", "repvgg_a0", "dla34",
    "hrnet_w18_small", "res2net50_14w_8s", "skresnet18", "seresnet18", "ecaresnet26t", "nfnet_l0", "mixer_s32_224",
    "gmlp_ti16_224", "poolformer_s12", "deit_tiny_patch16_224", "convnextv2_atto", "edgenext_xx_small", "vgg11_bn",
    "pvt_v2_b0", "mobilevit_xxs", "tf_mobilenetv3_small_minimal_100", "beit_base_patch16_224", "coat_tiny",
]  # fmt: skip
HUGGING_FACE = [
    "ViT", "DeiT", "Beit", "Dinov2", "Dinov2WithRegisters", "Swin", "Swinv2", "ConvNext", "ConvNextV2", "ResNet",
    "RegNet", "PoolFormer", "MobileViT", "Pvt", "Segformer", "Levit", "FocalNet", "Cvt",
]  # fmt: skip


def check(model: nn.Module, size: int) -> None:
    """All of what must hold, with ε, and with the composite that suits the network."""
    g = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if bool((parameter == 0).all()):  # heads that begin with zeros say nothing, nor do biases
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.05)
    x = torch.randn(1, 3, size, size, generator=g)
    before = digest(model)
    for composite in ("Epsilon", "automatic"):
        a = explain.attribute(model, x, LRP(composite), target=1)
        assert a.values.isfinite().all()
        assert a.values.any()
        assert a.delta is not None
        assert a.coverage is not None
        scale = a.values.abs().sum() + sum(part.abs().sum() for part in a.coverage.taken.values())
        assert a.delta.abs().max() <= 1e-4 * scale, f"{composite} misses {float(a.delta.abs().max() / scale):.1e}"
        assert torch.equal(a.values, explain.attribute(model, x, LRP(composite), target=1).values)
    assert digest(model) == before


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


@pytest.mark.long
@pytest.mark.parametrize("name", TORCHVISION)
def test_relevance_on_torchvisions_classifiers(name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        more = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        model = torchvision.models.get_model(name, num_classes=5, **more).eval()
    check(model, 299 if name == "inception_v3" else 224 if name.startswith(("vit", "maxvit", "alexnet")) else 96)


@pytest.mark.long
@pytest.mark.parametrize("name", TIMM)
def test_relevance_on_timms_classifiers(name: str) -> None:
    timm = pytest.importorskip("timm", reason="timm comes with an extra of its own")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model(name, num_classes=5).eval()
    check(model, model.default_cfg["input_size"][-1])


@pytest.mark.long
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_relevance_on_hugging_faces_classifiers(name: str) -> None:
    pytest.importorskip("transformers", reason="transformers comes with an extra of its own")
    subject = next(s for s in matrix.transformers_subjects() if s.name == f"transformers:{name}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, side = matrix.smallest(subject)
        matrix.lively(model, subject.inputs(4, side))  # of some, as they are made, nothing depends on the input
    check(model, side)
