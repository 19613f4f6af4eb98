"""Layers that show nothing are not chosen by default: position maps, gates, attention, answers,
heads of others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import explain
from explain import LayerError
from explain.layers.default_layer import default_layer, stage_layers
from explain.layers.summary import forget_summary
from explain.methods import GradCAM
from explain.targets import Segmentation
from tests.conftest import Made, settled

SIGNED = GradCAM(relu=False)


def small(weigh: Callable[..., torch.Tensor], **parts: nn.Module) -> nn.Module:
    """A body of 12 channels, a head that reads their means, and what ``weigh`` does between them
    with ``parts``."""

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        maps = weigh(model.body(x), **model.parts)
        return model.head(maps.mean((2, 3)))

    body = nn.Sequential(nn.Conv2d(3, 12, 8, 8), nn.ReLU())
    return Made(forward, body=body, parts=nn.ModuleDict(parts), head=nn.Linear(12, 5))


def positions(model: nn.Module, maps: torch.Tensor) -> torch.Tensor:
    """A map made from the size of another one."""
    ramp = torch.linspace(-1, 1, maps[0, 0].numel()).view(maps.shape[2:])
    return ramp.repeat(len(maps), 12, 1, 1)


def attended(maps: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The mean of maps with attention over their places, of several heads."""
    weights = logits.flatten(2).softmax(2)
    return torch.einsum("ncp,nkp->nck", maps.flatten(2), weights).mean(2)[..., None, None]


def conv(into: int) -> nn.Conv2d:
    return nn.Conv2d(12, into, 3, padding=1)


BESIDE: dict[str, Callable[[], nn.Module]] = {
    "position map": lambda: small(lambda f, pos: f * (1 + pos(f)), pos=Made(positions)),
    "gate of one channel": lambda: small(lambda f, gate: f * gate(f).sigmoid(), gate=conv(1)),
    "gate of all channels": lambda: small(lambda f, gate: f * gate(f).sigmoid(), gate=conv(12)),
    "squeeze and excitation": lambda: small(
        lambda f, gate: f * gate(f.mean((2, 3), keepdim=True)).sigmoid(), gate=nn.Conv2d(12, 12, 1)
    ),
    "attention logits": lambda: small(lambda f, logits: attended(f, logits(f)), logits=conv(3)),
    "gated attention": lambda: small(
        lambda f, v, u, w: attended(f, w(v(f).tanh() * u(f).sigmoid())),
        v=conv(8),
        u=conv(8),
        w=nn.Conv2d(8, 1, 1),
    ),
    "offsets": lambda: small(
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
    squeezed = small(lambda f, last: last(f).sigmoid(), **parts)
    residual = small(lambda f, last: f + last(f), **parts)
    both = small(lambda f, last, beside: last(f) * beside(f), **parts, beside=conv(12))
    layers = [
        explain.attribute(settled(m).eval(), x, SIGNED).layer for m in (squeezed, residual, both)
    ]
    assert layers == ["parts.last", "parts.last", "parts.beside"]


@pytest.mark.parametrize(
    ("channels", "finish"),
    [
        # depth in bins
        (9, lambda maps: (maps.softmax(1) * torch.arange(9.0).view(9, 1, 1)).sum(1)),
        (48, lambda maps: F.pixel_shuffle(maps, 4)),
        (7, lambda maps: maps.sigmoid()),  # heat maps of key points
    ],
)
def test_an_answer_that_is_a_map_is_not_the_layer(
    channels: int, finish: Callable[[torch.Tensor], Any]
) -> None:
    encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU())
    model = Made(
        lambda model, x: finish(model.last(model.encoder(x))),
        encoder=encoder,
        last=nn.Conv2d(8, channels, 1),
    )
    model = settled(model).eval()
    found = explain.attribute(
        model, torch.rand(2, 3, 32, 32), SIGNED, target=lambda o: o.flatten(1).mean(1)
    )
    assert found.layer == "encoder"


def maps_and_classes(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A map of classes behind a decoder, and classes of the whole photo."""
    model.passes.append(len(x))
    encoded = model.encoder(x)
    return model.maps(model.decoder(encoded)), model.classes(encoded.mean((2, 3)))


@pytest.mark.parametrize("blocks", [3, 30])
def test_the_layer_is_one_that_the_target_comes_from(blocks: int) -> None:
    block = nn.Sequential(nn.Conv2d(12, 12, 3, 1, 1), nn.ReLU())
    decoder = [nn.ConvTranspose2d(8, 12, 2, 2), *(copy.deepcopy(block) for _ in range(blocks))]
    parts = {
        "encoder": nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU()),
        "decoder": nn.Sequential(*decoder),
        "maps": nn.Conv2d(12, 4, 1),
        "classes": nn.Linear(8, 7),
    }
    model = settled(Made(maps_and_classes, **parts, passes=[])).eval()
    x = torch.rand(2, 1, 32, 32)
    region = Segmentation(2, torch.ones(32, 32))
    for target, layer in [
        (3, "encoder"),
        (region, "decoder"),
        (lambda o: o[1][:, 3], "encoder"),
        (5, "encoder"),
    ]:
        assert explain.attribute(model, x, SIGNED, target=target).layer == layer
    model.passes.clear()
    assert explain.attribute(model, x, "eigencam", target=5).layer == "encoder"
    assert len(model.passes) == 1  # the layer of classes is kept
    with pytest.raises(LayerError, match="layer 'decoder' must"):
        explain.attribute(model, x, "gradcam", target=3, layer="decoder")


def one_live_head(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Boxes of a head that learns from detached features, and what both heads gave, as YOLOv10."""
    features = model.stem(x)
    order = sorted(model.heads, reverse=model.live_head_first)
    given = {name: model.heads[name](features.detach()) for name in order}
    return given["live"].flatten(2), [*given.values()]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("live_head_first", [False, True])
def test_the_layer_of_a_score_behind_detach_is_found_on_every_photo(
    frozen: bool, live_head_first: bool
) -> None:
    def head() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(8, 12, 3, padding=1), nn.SiLU(), nn.Conv2d(12, 6, 3, padding=1)
        )

    parts = {
        "stem": nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.SiLU()),
        "heads": nn.ModuleDict({"idle": head(), "live": head()}),
    }
    model = settled(Made(one_live_head, **parts, live_head_first=live_head_first)).double().eval()
    model.requires_grad_(not frozen)
    for _ in range(3):
        x = torch.rand(1, 3, 32, 32, dtype=torch.float64)
        found = explain.attribute(model, x, SIGNED, target=lambda o: o[0][:, 5].amax(1))
        assert found.layer == "heads.live.1"
        features = model.heads["live"][:2](model.stem(x)).detach().requires_grad_()
        model.heads["live"][2](features)[:, 5].amax().backward()
        expected = (features * features.grad.mean((2, 3), keepdim=True)).sum(1)
        torch.testing.assert_close(found.values, expected.detach())


# --- what layers compute, whatever their classes are called


def of_class(name: str, forward: Callable[..., Any], **parts: nn.Module) -> nn.Module:
    """A module whose class has a name that says something else, or nothing."""
    return type(name, (Made,), {})(forward, **parts)


def attend(module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    queries, keys, values = module.inner(tokens).chunk(3, -1)
    return module.outer((queries @ keys.mT).softmax(-1) @ values)


def by_class_token(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    tokens = model.patches(x).flatten(2).mT
    tokens = torch.cat([tokens.mean(1, keepdim=True), tokens], 1)
    for block in model.blocks:
        tokens = tokens + block.mix(block.norm(tokens))
        tokens = tokens + block.mlp(tokens)
    return model.head(model.last(tokens)[:, 0])


@pytest.mark.parametrize("name", ["Attention", "Mix", "PoolBlock"])
def test_the_tokens_before_the_last_attention_are_the_layer_whatever_it_is_called(
    name: str,
) -> None:
    def block() -> nn.Module:
        mix = of_class(name, attend, inner=nn.Linear(12, 36), outer=nn.Linear(12, 12))
        return nn.ModuleDict({"norm": nn.LayerNorm(12), "mix": mix, "mlp": nn.Linear(12, 12)})

    model = Made(
        by_class_token,
        patches=nn.Conv2d(3, 12, 8, 8),
        blocks=nn.ModuleList([block(), block()]),
        last=nn.LayerNorm(12),
        head=nn.Linear(12, 5),
    )
    assert default_layer(settled(model).eval(), torch.rand(2, 3, 32, 48)) == "blocks.1.norm"


@pytest.mark.parametrize("name", ["MaxPool2d", "Shrink"])
def test_what_is_pooled_is_not_the_layer_whatever_it_is_called(name: str) -> None:
    shrink = of_class(name, lambda module, x: F.max_pool2d(x, 2))
    mixer = of_class("PoolMixer", lambda module, x: module.conv(x).relu(), conv=conv(12))
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5)]
    model = nn.Sequential(nn.Conv2d(3, 12, 3, 2), mixer, shrink, *head)
    assert default_layer(settled(model).eval(), torch.rand(1, 3, 32, 32)) == "1"


@pytest.mark.parametrize("switch", [torch.no_grad, torch.enable_grad])
def test_the_layer_is_the_same_where_the_network_switches_gradients_off(switch: Any) -> None:
    gate = conv(12)
    model = small(lambda f, gate: f * gate(f).sigmoid(), gate=gate)
    forward = switch()(model.forward)
    outer = settled(Made(lambda outer, x: forward(x), inner=model)).eval()
    assert explain.attribute(outer, torch.rand(2, 3, 64, 64), "eigencam", target=1).layer == (
        "inner.body"
    )


def test_a_model_that_runs_its_images_one_by_one_is_told_so() -> None:
    net = small(lambda f: f)
    model = Made(lambda outer, x: torch.cat([outer.net(image[None]) for image in x]), net=net)
    x = torch.rand(2, 3, 64, 64)
    with pytest.raises(explain.LayerError, match="each of 2 images"):
        explain.attribute(model.eval(), x, "gradcam", target=1, layer="net.body")


# --- precision


@pytest.mark.long
@pytest.mark.parametrize(
    ("builder", "dtype"),
    [
        ("shufflenet_v2_x1_0", torch.bfloat16),
        ("resnet18", torch.float16),
        pytest.param("mobilenet_v3_small", torch.bfloat16, marks=pytest.mark.long),
        pytest.param("mobilenet_v3_small", torch.float16, marks=pytest.mark.long),
    ],
)
def test_the_layers_of_a_network_do_not_depend_on_its_precision(
    builder: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = torchvision.models.get_model(builder).eval()
    x = torch.rand(1, 3, 96, 96)
    expected = default_layer(model, x), stage_layers(model, x)
    assert len(expected[1]) > 2
    before = model.to(dtype).state_dict()
    for photo in (x, x.flip(3), 0.1 * x):
        forget_summary(model)
        assert (default_layer(model, photo.to(dtype)), stage_layers(model, photo.to(dtype))) == (
            expected
        )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_network_that_fixes_half_precision_has_a_default_layer() -> None:
    def forward(made: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return made.head(made.body(x.to(torch.bfloat16)).relu().mean((2, 3)))

    parts = {"body": nn.Conv2d(3, 8, 3), "head": nn.Linear(8, 5)}
    model = settled(Made(forward, **parts)).to(torch.bfloat16)
    assert default_layer(model, torch.rand(1, 3, 8, 8)) == "body"
