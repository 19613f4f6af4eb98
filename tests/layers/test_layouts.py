"""How maps lie in tensors: followed from the pixels on where neither shape nor class tells, or
refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import explain
from explain import HookError, LayerError
from explain.data.inputs import as_inputs
from explain.layers import layouts, list_layers
from explain.layers.summary import channels_of
from explain.methods import GradCAM
from tests.conftest import Made, settled
from tests.networks import WIDTH, Block

SIGNED = GradCAM(relu=False)


class Own(nn.Module):
    """A module of a class that nobody knows, which lays a map out in its own way."""

    def __init__(self, lay: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.lay = lay

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lay(x) * 1.5


class LaidOut(nn.Module):
    """A convolution, its map laid out by a module of its own, and a head that weighs every
    position."""

    def __init__(
        self,
        lay: Callable[[torch.Tensor], torch.Tensor],
        size: tuple[int, ...] = (32, 32),
        channels: int = 8,
        stride: tuple[int, ...] = (4, 4),
    ) -> None:
        super().__init__()
        video = len(size) == 3
        self.conv = (nn.Conv3d if video else nn.Conv2d)(3, channels, stride, stride)
        self.own = Own(lay)
        self.fc = nn.LazyLinear(3)
        self(torch.zeros(1, 3, *size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.own(self.conv(x).tanh()).flatten(1))


def plain_gradcam(
    model: nn.Module, x: torch.Tensor, target: int, back: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Grad-CAM of the module's output, laid out by the inverse of what the module does."""
    given: list[torch.Tensor] = []
    with model.own.register_forward_hook(lambda module, args, output: given.append(output)):
        score = model(x)[:, target].sum()
    gradient = back(torch.autograd.grad(score, given[0])[0])
    maps = back(given[0])
    weights = gradient.flatten(2).mean(2)
    return torch.einsum("nk,nk...->n...", weights, maps).detach()


VIDEO = ((8, 16, 8), 4, (2, 4, 4))


def unchanged(maps: torch.Tensor) -> torch.Tensor:
    return maps


# What a module does with a map, the inverse of it, and the sizes of input, channels and patches.
LAID_OUT: dict[str, tuple[Any, ...]] = {
    "channels first, oblong map": (unchanged, unchanged, (32, 32), 8, (4, 16)),
    "channels first, oblong input": (unchanged, unchanged, (32, 16), 4, (4, 4)),
    "channels last, cube": (
        lambda t: t.movedim(1, -1),
        lambda t: t.movedim(-1, 1),
        (32, 32),
        8,
        (4, 4),
    ),
    "positions last": (
        lambda t: t.flatten(2),
        lambda t: t.unflatten(2, (7, 7)),
        (28, 28),
        64,
        (4, 4),
    ),
    "tokens": (
        lambda t: t.flatten(2).mT,
        lambda t: t.mT.unflatten(2, (4, 4)),
        (16, 16),
        16,
        (4, 4),
    ),
    "video, channels first": (unchanged, unchanged, *VIDEO),
    "video, channels last": (lambda t: t.movedim(1, -1), lambda t: t.movedim(-1, 1), *VIDEO),
    "video, frames first": (lambda t: t.transpose(1, 2), lambda t: t.transpose(1, 2), *VIDEO),
    "video, positions last": (
        lambda t: t.flatten(2),
        lambda t: t.unflatten(2, (4, 4, 2)),
        *VIDEO,
    ),
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_a_map_is_found_in_whatever_layout_a_module_gives_it(name: str) -> None:
    lay, back, size, channels, stride = LAID_OUT[name]
    model = LaidOut(lay, size, channels, stride).double().eval()
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    maps = explain.attribute(model, x, [SIGNED, "ablationcam"], target=1, layer="own")
    assert_close(maps["gradcam"].values, plain_gradcam(model, x, 1, back))
    # maps are put back as they lay
    assert maps["ablationcam"].values.shape == maps["gradcam"].values.shape
    assert channels_of(model, as_inputs(x), ["own"]) == {"own": channels}


class ConvNorm(nn.Linear):
    """Mixes the channels of a map that has them last."""


class PatchEmbedding(nn.Conv2d):
    """Gives its map with the channels last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).permute(0, 2, 3, 1)


class GroupNormLast(nn.GroupNorm):
    """Takes and gives maps with the channels last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.movedim(-1, 1)).movedim(1, -1)


class LayerNorm2d(nn.LayerNorm):
    """Normalises the channels of a map that has them first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Wide(nn.Conv2d):
    """A depthwise convolution that sees all of a small map from each of its cells."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.movedim(-1, 1)).movedim(1, -1)


def windows(x: torch.Tensor) -> torch.Tensor:
    """Cut a map with its channels last into windows of 4 x 4, let the tokens of each attend to each
    other, and put them together again, as Swin does."""
    cut = x.unflatten(2, (-1, 4)).unflatten(1, (-1, 4)).transpose(2, 3)
    tokens = cut.flatten(3, 4).flatten(0, 2)
    weights = (tokens @ tokens.mT / 8).softmax(-1)
    mixed = (weights @ tokens).view(len(x), 2, 2, 4, 4, -1)
    return x + mixed.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def behind(module: nn.Module, *, last: bool) -> nn.Module:
    """A module behind a convolution whose map it is given with its channels first or last."""

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        maps = model.conv(x).tanh()
        return model.head(model.own(maps.movedim(1, -1) if last else maps).flatten(1))

    return Made(forward, conv=nn.Conv2d(3, 8, 4, 4), own=module, head=nn.Linear(512, 3))


# A module whose class or name says something else than what it does with a map of 8 channels and
# 8 x 8 positions, and whether the channels are last in what it gives.
MISLEADING: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "a linear layer that is called a convolution": (lambda: ConvNorm(8, 8), True),
    "a norm that transposes inside": (lambda: LayerNorm2d(8), False),
    "a norm of groups with channels last": (lambda: GroupNormLast(2, 8), True),
    "a norm along the width": (lambda: nn.LayerNorm(8), False),
    "a wrapped linear layer": (lambda: Made(lambda m, x: m.part(x), part=ConvNorm(8, 8)), True),
    "windows of attention": (lambda: Own(windows), True),
    "an activation": (nn.ReLU, True),
    "a convolution as wide as the map": (lambda: Wide(8, 8, 15, 1, 7, groups=8), True),
    "a product that a function computes": (
        lambda: Own(lambda x: x @ torch.linspace(-1, 1, 64, dtype=x.dtype).view(8, 8)),
        True,
    ),
}


@pytest.mark.parametrize("name", MISLEADING)
def test_what_a_module_computes_says_its_layout_not_its_class(name: str) -> None:
    """A cube of 8 x 8 x 8 leaves the layout open."""
    make, last = MISLEADING[name]
    torch.manual_seed(0)
    model = behind(make(), last=last).double().eval()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    found = explain.attribute(model, x, SIGNED, target=1, layer="own").values
    back = (lambda maps: maps.movedim(-1, 1)) if last else unchanged
    assert_close(found, plain_gradcam(model, x, 1, back))
    for layer, its_last in (("own", last), ("own:input", last)):
        at = explain.hooks.Ablate(layer, channels=[3])
        with explain.hooks.intervene(model, [at]):
            scores = model(x)
        assert_close(scores, without_channel(model, x, layer, -1 if its_last else 1))


def without_channel(model: nn.Module, x: torch.Tensor, layer: str, dim: int) -> torch.Tensor:
    """The scores of a model if channel 3 of the output or input of its own module is zero."""

    def zeroed(maps: torch.Tensor) -> torch.Tensor:
        return maps.index_fill(dim, torch.tensor([3]), 0)

    if layer == "own":
        handle = model.own.register_forward_hook(lambda module, args, output: zeroed(output))
    else:
        handle = model.own.register_forward_pre_hook(lambda module, args: zeroed(args[0]))
    with handle, torch.no_grad():
        return model(x)


def test_a_convolution_may_give_its_channels_last() -> None:
    embed = PatchEmbedding(3, 16, 4, 4)
    head = nn.Sequential(nn.Flatten(), nn.Linear(1024, 3))
    model = Made(lambda model, x: model.head(model.own(x).tanh()), own=embed, head=head)
    model = model.double().eval()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    found = explain.attribute(model, x, SIGNED, target=1, layer="own").values
    assert_close(found, plain_gradcam(model, x, 1, lambda maps: maps.movedim(-1, 1)))


@pytest.mark.parametrize("last", [False, True], ids=["a linear layer", "a pooling"])
def test_a_layer_that_mixes_positions_and_channels_is_refused(last: bool) -> None:
    """A linear layer along the width, and a pooling of maps with their channels last."""
    module = nn.MaxPool2d((1, 3), 1, (0, 1)) if last else nn.Linear(8, 8)
    model = behind(module, last=last).eval()
    x = torch.randn(2, 3, 32, 32)
    with pytest.raises(LayerError, match="layout"):
        explain.attribute(model, x, SIGNED, target=1, layer="own")
    ablate = explain.hooks.Ablate("own", channels=[3])
    with explain.hooks.intervene(model, ablate), pytest.raises(HookError, match="channel_dim"):
        model(x)
    with explain.hooks.intervene(model, replace(ablate, channel_dim=1)):
        assert_close(model(x), without_channel(model, x, "own", 1))


@pytest.mark.parametrize("given", [2, 5])
def test_frames_in_the_batch_are_found_without_a_convolution(given: int) -> None:
    """Patches of frames that a linear layer takes, each frame an image of its own."""

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        frames = x.transpose(1, 2).flatten(0, 1)
        patches = frames.unflatten(3, (-1, 4)).unflatten(2, (-1, 4)).permute(0, 2, 4, 1, 3, 5)
        maps = model.own(patches.flatten(3)).tanh()
        return model.head(maps.flatten(1)).unflatten(0, (len(x), -1)).sum(1)

    model = Made(forward, own=nn.Linear(48, 4), head=nn.Linear(64, 3)).double().eval()
    x = torch.randn(given, 3, 6, 16, 16, dtype=torch.float64)
    found = explain.attribute(model, x, SIGNED, target=1, layer="own", layout="NCTHW").values
    kept: list[torch.Tensor] = []
    with model.own.register_forward_hook(lambda module, args, output: kept.append(output)):
        score = model(x)[:, 1].sum()
    (gradient,) = torch.autograd.grad(score, kept)
    maps, gradient = (part.view(given, 6, 4, 4, 4).movedim(-1, 1) for part in (kept[0], gradient))
    weights = gradient.mean((3, 4), keepdim=True)
    assert_close(found, (weights * maps).sum(1).detach())


@pytest.mark.parametrize("order", [(0, 1, 3, 2), (0, 3, 2, 1), (0, 3, 1, 2)], ids=str)
def test_a_width_before_the_height_is_refused(order: tuple[int, ...]) -> None:
    model = LaidOut(lambda t: t.permute(order), (32, 16), 6).eval()
    with pytest.raises(LayerError, match="'own' must"):
        explain.attribute(model, torch.randn(1, 3, 32, 16), SIGNED, target=1, layer="own")


@pytest.mark.parametrize("normalised", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("of_map", [(8, 2), (2, 8), (4, 4)], ids=str)
def test_the_number_of_tokens_is_not_their_height_and_width(
    of_map: tuple[int, int], normalised: bool
) -> None:
    """Of a map that a function makes, no module shows the size; it is found out."""

    def pooled(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model.flat(nn.functional.adaptive_avg_pool2d(model.conv(x).relu(), of_map))
        y = model.norm(y.transpose(1, 2)) if normalised else y
        return model.head(y.flatten(1))

    parts = {"conv": nn.Conv2d(3, 6, 3, 2, 1), "flat": nn.Flatten(2), "norm": nn.LayerNorm(6)}
    model = Made(pooled, **parts, head=nn.Linear(6 * 16, 3)).eval()
    x = torch.rand(2, 3, 32, 32)
    a = explain.attribute(model, x, SIGNED, target=1, layer="norm" if normalised else "flat")
    assert a.values.shape == (2, *of_map)


def test_tokens_without_a_map_are_those_that_are_clear_elsewhere() -> None:
    """A vision transformer that cuts patches by hand: what an untrained attention averages tells
    nothing by itself."""

    def transformer(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        tokens = nn.functional.unfold(x, 4, stride=4).transpose(1, 2)
        return model.head(model.blocks(model.embed(tokens) + model.position).mean(1))

    embed = nn.Linear(48, WIDTH)
    blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH))
    model = Made(transformer, embed=embed, blocks=blocks, head=nn.Linear(WIDTH, 3))
    model.position = nn.Parameter(0.02 * torch.randn(1, 24, WIDTH))
    calls = list_layers(model.eval(), torch.rand(1, 3, 24, 16))
    assert {str(call.grid) for call in calls if len(call.shape) == 3} == {"6 x 4"}


def test_a_layout_that_no_corner_shows_is_refused_in_one_line() -> None:
    """Every position answers to everything alike: nothing tells 8 x 8 from 8 x 2."""

    mixed = Own(lambda x: x.mean((1, 2, 3))[:, None, None, None].expand(-1, 8, 8, 2))
    head = nn.Sequential(nn.Flatten(), nn.Linear(128, 3))
    model = Made(lambda model, x: model.head(model.own(x)), own=mixed, head=head).eval()
    x = torch.randn(2, 3, 32, 32)
    doubt = r"\(2, 8, 8, 2\), which may be 8 x 8 in the layout NHWC or 8 x 2 in the layout NCHW"
    with pytest.raises(LayerError, match=doubt):
        explain.attribute(model, x, SIGNED, target=1, layer="own")
    (own,) = (call for call in list_layers(model, x) if call.name == "own")
    assert own.grid is None
    assert "8 x 2 in the layout NCHW" in own.doubt


def test_a_module_may_give_a_number() -> None:
    brightness = Own(lambda x: x.mean())
    model = Made(
        lambda model, x: model.conv(x) * model.own(x), own=brightness, conv=nn.Conv2d(3, 6, 3)
    )
    of_conv, of_own = list_layers(model.eval(), torch.rand(1, 3, 12, 12))
    assert (of_own.name, of_own.shape, of_own.grid) == ("own", (), None)
    assert str(of_conv.grid) == "10 x 10"


def test_a_network_that_takes_one_photo_alone_is_followed_on_it() -> None:
    x = torch.randn(1, 3, 32, 32)

    class Picky(LaidOut):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            if given.any() and not torch.equal(given, x):
                raise ValueError("not the photo that I know")
            return super().forward(given)

    model = Picky(lambda t: t.movedim(1, -1)).eval()
    found = explain.attribute(model, x, SIGNED, target=1, layer="own").values
    assert_close(found, plain_gradcam(model, x, 1, lambda t: t.movedim(-1, 1)))


# --- tokens that lie nowhere


class Spectral(nn.Module):
    """A transformer that reads patches and, as many, Fourier coefficients of the photo, as
    simple_vit_with_fft; ``filtered``, it turns the coefficients of tokens back, as GFNet."""

    def __init__(self, *, filtered: bool = False) -> None:
        super().__init__()
        self.of_patches = nn.Linear(48, WIDTH)
        self.of_spectrum = nn.Linear(96, WIDTH)
        self.filter = nn.Identity()
        self.norm = nn.LayerNorm(WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, 5)
        self.filtered = filtered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def patches(maps: torch.Tensor) -> torch.Tensor:
            cut = maps.unflatten(3, (-1, 4)).unflatten(2, (-1, 4)).permute(0, 2, 4, 1, 3, 5)
            return cut.flatten(3).flatten(1, 2)

        tokens = self.of_patches(patches(x))
        if self.filtered:
            spectrum = torch.fft.rfft(tokens, dim=1)
            back = torch.fft.irfft(0.5 * spectrum, n=tokens.shape[1], dim=1)
            tokens = self.norm(tokens + self.filter(back))
        else:
            parts = torch.view_as_real(torch.fft.fft2(x)).permute(0, 1, 4, 2, 3).flatten(1, 2)
            tokens = torch.cat([self.of_spectrum(patches(parts)), tokens], 1)
        return self.head(self.block(self.norm(tokens)).mean(1))


def test_fourier_coefficients_lie_nowhere() -> None:
    model = settled(Spectral()).double().eval()
    x = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    grids = {call.name: call.grid for call in list_layers(model, x)}
    assert grids["of_spectrum"] is None
    assert grids["norm"] is not None
    assert [*grids["norm"].tokens] == [*range(16, 32)]
    for method in ("gradcam", "eigencam"):
        with pytest.raises(LayerError, match="map"):
            explain.attribute(model, x, method, target=1, layer="of_spectrum")
    assert explain.attribute(model, x, "gradcam", target=1).layer != "of_spectrum"
    with explain.hooks.capture(model, "of_spectrum") as seen:  # the values themselves
        model(x)
    assert seen.activations["of_spectrum"].shape == (2, 16, WIDTH)


def test_tokens_that_are_turned_back_lie_where_they_did() -> None:
    model = settled(Spectral(filtered=True)).double().eval()
    x = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    grids = {call.name: str(call.grid) for call in list_layers(model, x)}
    assert grids["filter"] == grids["norm"] == "4 x 4"
    a = explain.attribute(model, x, GradCAM(relu=False), target=1, layer="norm")
    assert a.values.shape == (2, 4, 4)


def test_a_shape_tells_its_likeliest_layout() -> None:
    photo, video = (224, 224), (16, 112, 112)
    assert layouts.find_grid((1, 512, 7, 7), photo) == layouts.Grid("NCHW", 7, 7)
    assert layouts.find_grid((1, 7, 7, 768), photo) == layouts.Grid("NHWC", 7, 7)
    assert layouts.find_grid((1, 197, 768), photo) == layouts.Grid("tokens", 14, 14, skip=1)
    of_video = layouts.find_grid((1, 512, 2, 7, 7), video)
    assert of_video is not None
    assert of_video.size == (2, 7, 7)
    assert layouts.read_map((1, 8, 8, 2), (32, 32)).open
    assert not layouts.read_map((1, 16, 8, 8), (32, 32)).open
    assert layouts.frames_in_batch((16, 64, 7, 7), (8, 224, 224), 2) == 8
    assert layouts.frames_in_batch((2, 64, 8, 7, 7), (8, 224, 224), 2) is None


def test_positions_tell_the_grid_that_values_lie_on() -> None:
    rows, columns = torch.rand(1, 3, 1, 1), torch.rand(1, 1, 2, 1)
    grids = [layouts.Grid("NCHW", 2, 8), layouts.Grid("NHWC", 3, 2)]
    assert layouts.map_grid((rows, columns), (1, 3, 2, 8), grids) == grids[1]
    ys, xs = torch.tensor([[0, 0.25, 0.75, 0.25, 0.75], [0, 0.25, 0.25, 0.75, 0.75]])
    grid = layouts.token_grid((ys.reshape(1, 5, 1), xs.reshape(1, 5, 1)), (1, 5, 8), 1)
    assert grid is not None
    assert (grid.size, tuple(grid.tokens)) == ((2, 2), (1, 3, 2, 4))


def test_tokens_that_are_laid_out_are_put_back_beside_the_others() -> None:
    tokens, grid = torch.rand(2, 5, 3), layouts.Grid("tokens", 2, 2, skip=1)
    maps = grid.spread(tokens)
    assert_close(maps, tokens[:, 1:].mT.reshape(2, 3, 2, 2), rtol=0, atol=0)
    assert_close(grid.beside(tokens), tokens[:, 0], rtol=0, atol=0)
    assert_close(grid.fold(maps, tokens), tokens, rtol=0, atol=0)
