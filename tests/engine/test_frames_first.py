"""Inputs with frames, tiles or patches before the channels: each has a map, against loops, autograd
and plain hooks."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import explain
from explain.attribution.trace import trace
from explain.layers.frames import with_layout
from explain.methods import GradCAM, Occlusion, Smooth
from explain.targets import Answer
from tests.conftest import ATTENDING, COVERING

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


class ChannelsFirst(nn.Module):
    """The same network for inputs with the channels first."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x.transpose(1, 2))


def made(network: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return network.double().eval()


def clips(frames: int = 4, channels: int = 3, count: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, frames, channels, 12, 8, generator=generator, dtype=torch.float64)


def gradient(model: Any, x: torch.Tensor, targets: list[int]) -> torch.Tensor:
    x = x.clone().requires_grad_()
    scores = model(x).gather(1, torch.tensor(targets)[:, None])
    return torch.autograd.grad(scores.sum(), x)[0]


@pytest.mark.filterwarnings(SEEN)
def test_occlusion_covers_a_window_of_one_frame() -> None:
    model = made(PerFrame())
    x = clips(count=2)
    found = explain.attribute(
        model, {"pixel_values": x}, "occlusion(window=4,stride=4)", target=[1, 2]
    )
    assert found.options["window"] == (1, 4, 4)
    with torch.no_grad():
        for image, target in enumerate((1, 2)):
            for t in range(4):
                for top in range(0, 12, 4):
                    for left in range(0, 8, 4):
                        covered = x[image : image + 1].clone()
                        covered[0, t, :, top : top + 4, left : left + 4] = 0
                        drop = (model(x[image : image + 1]) - model(covered))[0, target]
                        window = found.values[image, t, top : top + 4, left : left + 4]
                        assert_close(window, drop.expand(4, 4))
    usual = explain.attribute(model, x, Occlusion(), target=0)
    assert usual.options["window"] == (1, 2, 1)  # a seventh of height and width


@pytest.mark.parametrize("by_time", [False, True])
@pytest.mark.filterwarnings(SEEN)
def test_gradcam_of_frames_that_are_folded_into_the_batch_is_that_of_plain_hooks(
    by_time: bool,
) -> None:
    model = made(PerFrame(by_time=by_time))
    x = clips()
    kept: list[torch.Tensor] = []
    handle = model.conv2.register_forward_hook(lambda module, args, output: kept.append(output))
    scores = model(x).gather(1, torch.tensor(TARGETS)[:, None])
    handle.remove()
    (gradients,) = torch.autograd.grad(scores.sum(), kept[0])
    maps = (gradients.mean((2, 3), keepdim=True) * kept[0]).sum(1)
    maps = maps.unflatten(0, (4, 3)).transpose(0, 1) if by_time else maps.unflatten(0, (3, 4))
    found = explain.attribute(
        model, x, [GradCAM(relu=False), "hirescam"], target=TARGETS, layer="conv2"
    )
    assert_close(found["gradcam"].values, maps.detach())
    again = explain.attribute(
        model, x, Smooth(GradCAM(relu=False), samples=2, sigma=0), target=TARGETS, layer="conv2"
    )
    assert_close(again.values, maps.detach())


@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
@pytest.mark.parametrize(
    "method", sorted(set(explain.list_methods()) - COVERING - ATTENDING - REREADING - {"cam"})
)
def test_every_method_explains_frames_first_as_it_explains_channels_first(method: str) -> None:
    model = made(PerFrame())
    x = clips(3)
    found = explain.attribute(model, x, method, target=TARGETS, layout="NTCHW")
    twin = explain.attribute(
        ChannelsFirst(model).eval(), x.transpose(1, 2), method, target=TARGETS, layout="NCTHW"
    )
    assert found.heatmap.shape == (3, 3, 12, 8)
    assert_close(found.heatmap, twin.heatmap)
    values = found.values.transpose(1, 2) if found.values.ndim == 5 else found.values
    assert_close(values, twin.values, rtol=1e-8, atol=1e-10)


class Patches(nn.Module):
    """Tokens of all frames, one for each square; the answer is that of one token, of a frame and a
    place."""

    def __init__(self, order: str, read: tuple[int, int]) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)
        self.order = order
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # (N, T, places, C)
        tokens = self.patch(x.flatten(0, 1)).flatten(2).mT.unflatten(0, x.shape[:2])
        frame, place = self.read
        if self.order == "places first":
            tokens = tokens.transpose(1, 2)
            return self.head(self.norm(tokens.flatten(1, 2))[:, place * x.shape[1] + frame])
        return self.head(self.norm(tokens.flatten(1, 2))[:, frame * tokens.shape[2] + place])


@pytest.mark.parametrize("order", ["frames first", "places first"])
@pytest.mark.filterwarnings(SEEN)
def test_tokens_over_time_and_place_lie_where_they_come_from(order: str) -> None:
    model = made(Patches(order, (2, 4)))
    x = clips(4)
    found = explain.attribute(model, x, "hirescam", target=TARGETS, layer="norm").values
    assert found.shape == (3, 4, 3, 2)
    assert (found[:, 2, 2, 0] != 0).all()  # place 4 of 3 rows of 2
    assert ((found != 0).flatten(1).sum(1) == 1).all()


class Folded(nn.Module):
    """Frames and channels are channels together; or there is no convolution at all."""

    def __init__(self, channels: int | None) -> None:
        super().__init__()
        self.conv = None if channels is None else nn.Conv2d(channels, 4, 3)
        self.head = nn.LazyLinear(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((x if self.conv is None else self.conv(x.flatten(1, 2))).flatten(1))


class Volume(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.other = nn.Conv2d(3, 4, 3)
        self.conv = nn.Conv3d(channels, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).mean((2, 3, 4))


def configured(channels: int) -> nn.Module:
    """A network without convolutions and with a configuration of Hugging Face."""
    model = Folded(None)
    model.config = SimpleNamespace(model_type="tiny", num_channels=channels)  # type: ignore[assignment]
    return model


LAYOUTS = {
    "a convolution of frames": (PerFrame(3), (1, 3, 3, 8, 8), "NTCHW"),
    "of frames with four channels": (PerFrame(4), (1, 3, 4, 8, 8), "NTCHW"),
    "of single frames": (PerFrame(3), (1, 1, 3, 8, 8), "NTCHW"),
    "permuted for a convolution in time": (ChannelsFirst(Volume(3)), (1, 3, 3, 8, 8), "NTCHW"),
    "a convolution in time": (Volume(3), (1, 3, 3, 8, 8), "NCTHW"),
    "of four channels and three slices": (Volume(4), (1, 4, 3, 8, 8), "NCTHW"),
    "of one channel": (Volume(1), (1, 1, 3, 8, 8), "NCTHW"),
    "frames folded into channels": (Folded(12), (1, 4, 3, 8, 8), "NTCHW"),
    "grey frames folded into channels": (Folded(4), (1, 4, 1, 8, 8), "NTCHW"),
    "no convolution, three colours behind": (Folded(None), (1, 5, 3, 4, 4), "NTCHW"),
    "no convolution, three colours before": (Folded(None), (1, 3, 5, 4, 4), "NCTHW"),
    "no convolution, four channels by the configuration": (configured(4), (1, 3, 4, 4, 4), "NTCHW"),
    "no convolution, either by the configuration": (configured(3), (1, 3, 3, 4, 4), "NTCHW"),
}


@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.filterwarnings(SEEN)
def test_the_layout_is_found_out(case: tuple[nn.Module, tuple[int, ...], str]) -> None:
    model, shape, layout = case
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(shape, generator=generator)
    model(x)  # makes the weights of lazy layers
    with torch.no_grad():  # positive ones, so that no rectifier is closed
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) / parameter.numel())
    assert with_layout(model.eval(), x).layout == layout
    assert explain.attribute(model, x, "saliency", target=0).frames_first == (layout == "NTCHW")


def test_it_is_said_once_for_each_model_and_not_where_the_caller_says_it() -> None:
    model = made(PerFrame())
    x = clips()
    explain.attribute(model, x, "saliency", target=0, layout="NTCHW")
    explain.attribute(model, explain.Inputs((x,), layout="NTCHW"), "saliency", target=0)
    with pytest.warns(explain.ExplainWarning, match="NTCHW"):
        explain.attribute(model, x, "saliency", target=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explain.attribute(model, x[:, :2], "saliency", target=0)
    either = nn.Sequential(nn.Flatten(), nn.Linear(144, 2))
    with pytest.warns(explain.ExplainWarning, match="either layout"):
        explain.attribute(either, torch.rand(1, 3, 3, 4, 4), "saliency", target=0)
    with pytest.raises(explain.ExplainError, match="layout"):
        explain.attribute(model, x, "saliency", target=0, layout="NHWC")  # type: ignore[arg-type]
    with pytest.raises(explain.ExplainError, match="layout"):
        explain.attribute(model, x[:, 0], "saliency", target=0, layout="NTCHW")


def test_a_layer_that_takes_each_frame_as_a_photo_cannot_be_traced() -> None:
    x = explain.Inputs((clips(count=1),), layout="NTCHW")
    with pytest.raises(explain.ExplainError, match="its frames"):
        trace(made(PerFrame()), x, x, "channels", layers="conv2", target=1)


def test_one_number_is_a_cube_in_a_volume() -> None:
    volume = torch.rand(1, 1, 6, 6, 6, dtype=torch.float64)
    model = made(nn.Sequential(nn.Flatten(), nn.Linear(216, 2)))
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
    model = made(getattr(transformers, f"{family}ForVideoClassification")(config))
    x = torch.rand(2, 4, 3, 16, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    methods = ["inputxgradient", "gradcam(relu=False)"]
    values = explain.attribute(model, {"pixel_values": x}, methods, target=[1, 2])
    expected = gradient(lambda clip: model(pixel_values=clip).logits, x, [1, 2]) * x
    assert_close(values["inputxgradient"].values, expected)
    assert values["gradcam"].values.shape == (2, frames, 2, 2)
    assert values["gradcam"].heatmap.shape == (2, 4, 16, 16)


@pytest.mark.filterwarnings(SEEN)
def test_packed_tiles_have_the_gradient_of_the_answer() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is an extra")
    words = transformers.LlamaConfig(**SIZES, num_key_value_heads=1, vocab_size=40, pad_token_id=0)
    photos = transformers.CLIPVisionConfig(**SIZES)
    config = transformers.LlavaNextConfig(
        vision_config=photos, text_config=words, image_token_id=39, image_grid_pinpoints=[[32, 32]]
    )
    model = made(transformers.LlavaNextForConditionalGeneration(config))
    generator = torch.Generator().manual_seed(4)
    tiles = torch.randn(1, 5, 3, 16, 16, generator=generator, dtype=torch.float64)
    # four tokens of the whole, and those of 4 x 4 places with line ends
    ids = torch.tensor([[1, *[39] * 24, 5, 6]])
    rest = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "image_sizes": torch.tensor([[32, 32]]),
    }

    def answer(tiles: torch.Tensor) -> torch.Tensor:
        return model(pixel_values=tiles, **rest).logits[:, -1].log_softmax(-1)

    expected = gradient(answer, tiles, [8]) * tiles
    for target in (Answer((8,)), Answer((8,), words=True)):
        values = explain.attribute(
            model, {"pixel_values": tiles, **rest}, "inputxgradient", target=target
        ).values
        assert_close(values, expected, rtol=1e-4, atol=1e-7)  # norms in float32
