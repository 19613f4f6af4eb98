"""Inputs with frames, tiles or patches before the channels: each has a map, against loops, autograd
and plain hooks."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import explain
from explain.attribution.trace import trace
from explain.methods import GradCAM, Occlusion, Smooth
from tests.conftest import ATTENDING, COVERING, Made, settled

TARGETS = [1, 2, 0]
REREADING = {"featurepermutation", "extremalperturbation"}
SEEN = "ignore:.* taken to have frames before channels"


class PerFrame(nn.Module):
    """Each frame goes through convolutions as an image; a convolution over time reads all of
    them."""

    def __init__(self, channels: int = 3, *, by_time: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 6, 3, 2, 1)
        self.conv2 = nn.Conv2d(6, 5, 3, 1, 1)
        self.relu = nn.ReLU()
        self.over_time = nn.Conv1d(5, 5, 3, padding=1)
        self.head = nn.Linear(5, 3)
        self.by_time = by_time

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = pixel_values.transpose(0, 1) if self.by_time else pixel_values
        features = self.relu(self.conv2(self.relu(self.conv1(x.reshape(-1, *x.shape[2:])))))
        frames = features.mean((2, 3)).view(*x.shape[:2], -1)
        frames = frames.transpose(0, 1) if self.by_time else frames
        return self.head(self.over_time(frames.mT).relu().flatten(2).mean(2))


def channels_first(network: nn.Module) -> nn.Module:
    """The same network for inputs with the channels first."""
    return Made(lambda net, x: net.network(x.transpose(1, 2)), network=network).eval()


def clips(frames: int = 4, count: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, frames, 3, 12, 8, generator=generator, dtype=torch.float64)


def ready(network: nn.Module) -> Any:
    return settled(network).double().eval()


@pytest.mark.filterwarnings(SEEN)
def test_occlusion_covers_a_window_of_one_frame() -> None:
    model = ready(PerFrame())
    x = clips(count=1)
    a = explain.attribute(model, {"pixel_values": x}, "occlusion(window=4,stride=4)", target=2)
    assert a.options["window"] == (1, 4, 4)
    for t, top, left in product(range(4), (0, 4, 8), (0, 4)):
        covered = x.clone()
        covered[0, t, :, top : top + 4, left : left + 4] = 0
        drop = (model(x) - model(covered))[0, 2].detach()
        assert_close(a.values[0, t, top : top + 4, left : left + 4], drop.expand(4, 4))
    usual = explain.attribute(model, x, Occlusion(), target=0)
    assert usual.options["window"] == (1, 2, 1)  # a seventh of height and width


@pytest.mark.parametrize("by_time", [False, True])
@pytest.mark.filterwarnings(SEEN)
def test_gradcam_of_frames_that_are_folded_into_the_batch_is_that_of_plain_hooks(
    by_time: bool,
) -> None:
    model = ready(PerFrame(by_time=by_time))
    x = clips()
    kept: list[torch.Tensor] = []
    with model.conv2.register_forward_hook(lambda module, args, output: kept.append(output)):
        scores = model(x).gather(1, torch.tensor(TARGETS)[:, None])
    (gradients,) = torch.autograd.grad(scores.sum(), kept[0])
    maps = (gradients.mean((2, 3), keepdim=True) * kept[0]).sum(1).detach()
    maps = maps.unflatten(0, (4, 3)).transpose(0, 1) if by_time else maps.unflatten(0, (3, 4))
    for method in (GradCAM(relu=False), Smooth(GradCAM(relu=False), samples=2, sigma=0)):
        a = explain.attribute(model, x, method, target=TARGETS, layer="conv2")
        assert_close(a.values, maps)


@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
@pytest.mark.parametrize(
    "method", sorted(set(explain.list_methods()) - COVERING - ATTENDING - REREADING - {"cam"})
)
def test_every_method_explains_frames_first_as_it_explains_channels_first(method: str) -> None:
    model = ready(PerFrame())
    x = clips(3)
    a = explain.attribute(model, x, method, target=TARGETS, layout="NTCHW")
    twin = channels_first(model)
    expected = explain.attribute(twin, x.transpose(1, 2), method, target=TARGETS, layout="NCTHW")
    assert a.heatmap.shape == (3, 3, 12, 8)
    assert_close(a.heatmap, expected.heatmap)
    values = a.values.transpose(1, 2) if a.values.ndim == 5 else a.values
    assert_close(values, expected.values, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("places_first", [False, True])
@pytest.mark.filterwarnings(SEEN)
def test_tokens_over_time_and_place_lie_where_they_come_from(places_first: bool) -> None:
    """The answer is that of one token: of frame 2, and of place 4 of 3 rows of 2."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        # (N, T, places, C)
        tokens = net.patch(x.flatten(0, 1)).flatten(2).mT.unflatten(0, x.shape[:2])
        tokens = tokens.transpose(1, 2) if places_first else tokens
        number = 4 * tokens.shape[2] + 2 if places_first else 2 * tokens.shape[2] + 4
        return net.head(net.norm(tokens.flatten(1, 2))[:, number])

    parts = {"patch": nn.Conv2d(3, 16, 4, 4), "norm": nn.LayerNorm(16), "head": nn.Linear(16, 3)}
    model = ready(Made(forward, **parts))
    values = explain.attribute(model, clips(), "hirescam", target=TARGETS, layer="norm").values
    assert values.shape == (3, 4, 3, 2)
    assert (values[:, 2, 2, 0] != 0).all()
    assert ((values != 0).flatten(1).sum(1) == 1).all()


def flat(conv: nn.Module | None = None, **attributes: Any) -> nn.Module:
    """A linear layer on all that there is, or on a convolution of frames and channels together."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        return net.head((x if net.conv is None else net.conv(x.flatten(1, 2))).flatten(1))

    return Made(forward, conv=conv, head=nn.LazyLinear(2), **attributes)


def configured(channels: int) -> nn.Module:
    """A network without convolutions and with a configuration of Hugging Face."""
    return flat(config=SimpleNamespace(model_type="tiny", num_channels=channels))


def in_time(channels: int) -> nn.Module:
    """A convolution in time, and one that is not called."""
    return Made(
        lambda net, x: net.conv(x).mean((2, 3, 4)),
        other=nn.Conv2d(3, 4, 3),
        conv=nn.Conv3d(channels, 2, 1),
    )


LAYOUTS: dict[str, tuple[nn.Module, tuple[int, int, int], str]] = {
    "a convolution of frames": (PerFrame(3), (3, 3, 8), "NTCHW"),
    "of frames with four channels": (PerFrame(4), (3, 4, 8), "NTCHW"),
    "of single frames": (PerFrame(3), (1, 3, 8), "NTCHW"),
    "permuted for a convolution in time": (channels_first(in_time(3)), (3, 3, 8), "NTCHW"),
    "a convolution in time": (in_time(3), (3, 3, 8), "NCTHW"),
    "of four channels and three slices": (in_time(4), (4, 3, 8), "NCTHW"),
    "of one channel": (in_time(1), (1, 3, 8), "NCTHW"),
    "frames folded into channels": (flat(nn.Conv2d(12, 4, 3)), (4, 3, 8), "NTCHW"),
    "grey frames folded into channels": (flat(nn.Conv2d(4, 4, 3)), (4, 1, 8), "NTCHW"),
    "no convolution, three colours behind": (flat(), (5, 3, 4), "NTCHW"),
    "no convolution, three colours before": (flat(), (3, 5, 4), "NCTHW"),
    "no convolution, four channels by the configuration": (configured(4), (3, 4, 4), "NTCHW"),
    "no convolution, either by the configuration": (configured(3), (3, 3, 4), "NTCHW"),
}


@pytest.mark.parametrize(("model", "sizes", "layout"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.filterwarnings(SEEN)
def test_the_layout_is_found_out(
    model: nn.Module, sizes: tuple[int, int, int], layout: str
) -> None:
    x = torch.rand(1, *sizes, sizes[-1])
    model(x)  # makes the weights of lazy layers
    with torch.no_grad():  # positive ones, so that no rectifier is closed
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape) / parameter.numel())
    a = explain.attribute(model.eval(), x, "saliency", target=0)
    assert a.frames_first == (layout == "NTCHW")


def test_it_is_said_once_for_each_model_and_not_where_the_caller_says_it() -> None:
    model = ready(PerFrame())
    x = clips()
    explain.attribute(model, x, "saliency", target=0, layout="NTCHW")
    explain.attribute(model, explain.Inputs((x,), layout="NTCHW"), "saliency", target=0)
    with pytest.warns(explain.ExplainWarning, match="NTCHW"):
        explain.attribute(model, x, "saliency", target=0)
    explain.attribute(model, x[:, :2], "saliency", target=0)  # a warning would be an error here
    either = nn.Sequential(nn.Flatten(), nn.Linear(144, 2))
    with pytest.warns(explain.ExplainWarning, match="either layout"):
        explain.attribute(either, torch.rand(1, 3, 3, 4, 4), "saliency", target=0)
    for wrong, layout in ((x, "NHWC"), (x[:, 0], "NTCHW")):
        with pytest.raises(explain.ExplainError, match="layout"):
            explain.attribute(model, wrong, "saliency", target=0, layout=layout)  # type: ignore[arg-type]


def test_a_layer_that_takes_each_frame_as_a_photo_cannot_be_traced() -> None:
    x = explain.Inputs((clips(count=1),), layout="NTCHW")
    with pytest.raises(explain.ExplainError, match="its frames"):
        trace(ready(PerFrame()), x, x, "channels", layers="conv2", target=1)


def test_one_number_is_a_cube_in_a_volume() -> None:
    volume = torch.rand(1, 1, 6, 6, 6, dtype=torch.float64)
    model = ready(nn.Sequential(nn.Flatten(), nn.Linear(216, 2)))
    values = explain.attribute(model, volume, Occlusion(2, 2), target=1).values
    parts = (model[1].weight[1].reshape(6, 6, 6) * volume[0, 0]).detach()
    cubes = parts.reshape(3, 2, 3, 2, 3, 2).sum((1, 3, 5))
    assert_close(values, nn.functional.interpolate(cubes[None, None], scale_factor=2.0)[0])


SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


@pytest.mark.parametrize(
    ("family", "tubelet", "frames"),
    [("VideoMAE", 2, 2), ("Vivit", [2, 8, 8], 2), ("Timesformer", None, 4)],
)
@pytest.mark.filterwarnings(SEEN)
def test_video_transformers_have_gradients_of_frames_and_tokens_where_they_lie(
    family: str, tubelet: Any, frames: int
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is an extra")
    config = getattr(transformers, f"{family}Config")(
        **SIZES, num_frames=4, num_labels=3, tubelet_size=tubelet
    )
    model = ready(getattr(transformers, f"{family}ForVideoClassification")(config))
    x = torch.rand(2, 4, 3, 16, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    methods = ["inputxgradient", "gradcam(relu=False)"]
    values = explain.attribute(model, {"pixel_values": x}, methods, target=1)
    (gradient,) = torch.autograd.grad(model(x.requires_grad_()).logits[:, 1].sum(), x)
    assert_close(values["inputxgradient"].values, x.detach() * gradient)
    assert values["gradcam"].values.shape == (2, frames, 2, 2)
    assert values["gradcam"].heatmap.shape == (2, 4, 16, 16)
