"""Branches that reach the score side by side are explained together, or named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import ExplainWarning
from explain.methods import GradCAM, HiResCAM, RefineCAM
from explain.metrics import Sensitivity
from explain.models import Stitched
from explain.targets import Detections, Segmentation
from tests.conftest import Made, settled

X = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def member(stride: int = 1, width: int = 8) -> nn.Module:
    body = [nn.Conv2d(3, width, 3, stride, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 1, 1)]
    end = [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4)]
    return nn.Sequential(*body, *end)


def made(forward: Callable[..., Any], *members: nn.Module) -> nn.Module:
    return settled(Made(forward, members=nn.ModuleList(members))).double().eval()


def mean_of_members(model: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([member(x) for member in model.members]).mean(0)


def joined(model: nn.Module, x: Tensor) -> Tensor:
    """Two backbones of one head, as in many papers."""
    first, second, head = model.members
    return head(torch.cat([first[:4](x).mean((2, 3)), second[:4](x).mean((2, 3))], 1))


def products(
    model: nn.Module, x: Tensor, layers: Sequence[str], target: int | Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """What each position of some layers adds to a score, by plain autograd: ``(N, h, w)`` each."""
    kept: list[Tensor] = []
    handles = [
        model.get_submodule(layer).register_forward_hook(lambda m, args, out: kept.append(out))
        for layer in layers
    ]
    output = model(x)
    score = output[:, target].sum() if isinstance(target, int) else target(output).sum()
    for handle in handles:
        handle.remove()
    gradients = torch.autograd.grad(score, kept)
    return [(a * g).sum(1).detach() for a, g in zip(kept, gradients, strict=True)]


@pytest.mark.parametrize("count", [1, 2])
def test_the_map_of_an_ensemble_is_that_of_all_members(count: int) -> None:
    model = made(mean_of_members, member(), member(), member())
    found = explain.attribute(model, X[:count], "hirescam", target=1)
    layers = [f"members.{i}.3" for i in (2, 1, 0)]
    assert found.layer == tuple(layers)
    assert found.fuse == "sum"
    assert_close(found.values, torch.stack(products(model, X[:count], layers[::-1], 1)).sum(0))
    bias = torch.stack([member[-1].bias[1] for member in model.members]).mean()
    assert_close(found.values.sum((1, 2)) + bias, found.score)
    again = explain.attribute(model, X[:count], "gradcam", target=1)
    parts = [
        explain.attribute(model, X[:count], "gradcam", target=1, layer=name) for name in layers
    ]
    assert_close(again.values, torch.stack([part.values for part in parts]).sum(0))


def test_backbones_of_other_sizes_add_what_they_add_to_the_score() -> None:
    model = made(joined, member(), member(2, 12), nn.Linear(20, 4))
    found = explain.attribute(model, X, "hirescam", target=1, placement="even")
    assert found.layer == ("members.1.3", "members.0.3")
    assert found.values.shape == (2, 32, 32)
    fine, coarse = products(model, X, ["members.0.3", "members.1.3"], 1)
    enlarged = F.interpolate(coarse[:, None], scale_factor=2, mode="bilinear")[:, 0] / 4
    assert_close(found.values, fine + enlarged)
    assert_close(found.values.sum((1, 2)) + model.members[2].bias[1], found.score)


def test_named_layers_are_summed_where_that_is_asked_for() -> None:
    model = made(mean_of_members, member(), member(), member())
    layers = ["members.0.3", "members.2.3"]
    found = explain.attribute(model, X, "hirescam", target=1, layer=layers, fuse="sum")
    assert_close(found.values, torch.stack(products(model, X, layers, 1)).sum(0))
    mean = explain.attribute(model, X, "hirescam", target=1, layer=layers)
    assert mean.fuse == "mean"
    assert not torch.allclose(mean.values, found.values)


def test_a_module_that_is_called_twice_is_explained_at_both_calls() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        (net,) = model.members
        return net(x) + 0.3 * net(x.clamp(min=0.5))

    model = made(forward, member())
    found = explain.attribute(model, X, "hirescam", target=1)
    assert found.layer == ("members.0.3", "members.0.3@0")
    assert_close(found.values.sum((1, 2)) + 1.3 * model.members[0][-1].bias[1], found.score)


def test_members_that_are_transformers_and_others_are_explained_together() -> None:
    vit = torchvision.models.VisionTransformer(32, 8, 2, 2, 8, 16, num_classes=4)
    model = made(mean_of_members, vit, member(), vit.__class__(32, 8, 2, 2, 12, 16, num_classes=4))
    found = explain.attribute(model, X, GradCAM(relu=False), target=1, placement="even")
    block = "encoder.layers.encoder_layer_1.ln_1"
    layers = (f"members.2.{block}", "members.1.3", f"members.0.{block}")
    assert sorted(found.layer) == sorted(layers)
    parts = found.maps
    assert parts[f"members.0.{block}"].shape == (2, 4, 4)
    total = sum(
        F.interpolate(part[:, None], (32, 32), mode="bilinear")[:, 0] * part[0].numel() / 32**2
        for part in parts.values()
    )
    assert_close(found.values, total)


def test_maps_of_other_sizes_keep_their_sum_where_their_cells_look() -> None:
    model = made(joined, member(), member(3, 12), nn.Linear(20, 4))
    found = explain.attribute(model, X, "hirescam", target=1)
    assert found.maps["members.1.3"].shape == (2, 11, 11)
    total = torch.stack([part.sum((1, 2)) for part in found.maps.values()]).sum(0)
    assert_close(found.values.sum((1, 2)), total)


def test_what_is_no_branch_is_not_added() -> None:
    """A layer that another one is computed from, one that is multiplied, and one that no score
    depends on."""

    def shortcut(model: nn.Module, x: Tensor) -> Tensor:
        first, second, head = model.members
        maps = first(x)
        return head((maps + second(maps)).mean((2, 3)))

    def product(model: nn.Module, x: Tensor) -> Tensor:
        first, second, head = model.members
        maps = first(x)
        return head((second(maps) * second(maps.flip(1))).mean((2, 3)))

    def unused(model: nn.Module, x: Tensor) -> Tensor:
        first, second, head = model.members
        maps = first(x)
        model.kept = second(maps)
        return head(maps.mean((2, 3)))

    convolutions = [nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)]
    for forward, layer in [
        (shortcut, "members.1"),
        (product, "members.1"),
        (unused, "members.0"),
    ]:
        model = made(forward, *convolutions, nn.Linear(8, 4))
        assert explain.attribute(model, X, GradCAM(relu=False), target=1).layer == layer


COPIES: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "a mirrored copy": lambda x: [x, x.flip(3)],
    "two crops": lambda x: [x[..., :24, :24], x[..., 8:, 8:]],
    "a turned copy": lambda x: [x, x.rot90(1, (2, 3))],
    "a shifted copy": lambda x: [x.roll(9, 2), x],
    "ten crops": lambda x: torchvision.transforms.functional.ten_crop(x, 24),
}


def copies(kind: str) -> nn.Module:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return torch.stack([model.members[0](copy) for copy in COPIES[kind](x)]).mean(0)

    return made(forward, member())


def copied_back(take: Callable[[Tensor], Sequence[Tensor]], maps: Sequence[Tensor]) -> Tensor:
    """The sum of maps with a cell for each pixel of a copy, each where the copy took it from."""
    photo = torch.zeros(2, 1, 32, 32, dtype=torch.float64, requires_grad=True)
    pairs = zip(take(photo), maps, strict=True)
    copied = torch.stack([(copy[:, 0] * of_copy).sum() for copy, of_copy in pairs]).sum()
    (expected,) = torch.autograd.grad(copied, photo)
    return expected[:, 0]


@pytest.mark.parametrize("kind", COPIES)
def test_branches_that_see_the_photo_elsewhere_are_named_where_maps_are_even(kind: str) -> None:
    with pytest.warns(ExplainWarning, match="leaves out") as said:
        found = explain.attribute(copies(kind), X, "hirescam", target=1, placement="even")
    (warning,) = said
    assert "members.0.3" in str(warning.message)
    assert isinstance(found.layer, str)
    if "copy" in kind:  # what sees the whole photo as it is
        assert found.layer == ("members.0.3" if "shifted" in kind else "members.0.3@0")


@pytest.mark.parametrize("kind", COPIES)
def test_branches_that_see_the_photo_elsewhere_are_drawn_there(kind: str) -> None:
    model = copies(kind)
    found = explain.attribute(model, X, "hirescam", target=1)
    assert_close(found.values, copied_back(COPIES[kind], products(model, X, ["members.0.3"], 1)))


def resized_crops(x: Tensor) -> Sequence[Tensor]:
    larger = F.interpolate(x, (64, 64), mode="bilinear")
    return [larger[..., :24, :24], larger[..., 40:, 40:]]


@pytest.mark.parametrize("take", [resized_crops, lambda x: [x[..., :16, :16], x[..., 16:, 16:]]])
def test_coarse_maps_of_crops_keep_their_sum_and_stay_in_their_crops(
    take: Callable[[Tensor], Sequence[Tensor]],
) -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return torch.stack([model.members[0](copy) for copy in take(x)]).mean(0)

    model = made(forward, backbone().extend(member()[4:]))
    found = explain.attribute(model, X, "hirescam", target=1)
    parts = torch.stack([part.sum((1, 2)) for part in products(model, X, ["members.0.3"], 1)])
    assert_close(found.values[:, :16, :16].sum((1, 2)), parts[0])
    assert_close(found.values[:, 16:, 16:].sum((1, 2)), parts[1])
    named = found.layer
    again = explain.attribute(model, X, "hirescam", target=1, layer=[*named], fuse="sum")
    assert_close(again.values, found.values)


def segmenter() -> nn.Module:
    return member()[:4].append(nn.Conv2d(8, 4, 3, 1, 1))


def backbone() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())


def conv_relu(channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 8, 3, 1, 1), nn.ReLU())


def branched(model: nn.Module, x: Tensor) -> Tensor:
    maps, first, second, head = model.members
    x = maps(x)
    return head(torch.cat([first(x), second(x)], 1))


def added_backbones(model: nn.Module, x: Tensor) -> Tensor:
    first, second, head = model.members
    return F.interpolate(head(first(x) + second(x)), x.shape[2:])


def mean_of_sizes(model: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([F.interpolate(net(x), (32, 32)) for net in model.members]).mean(0)


REGION = torch.zeros(32, 32)
REGION[3:30, 10:25] = 1


def of_region(maps: Tensor) -> Tensor:
    return (maps[:, 1] * REGION).sum() / REGION.sum()


def decoded(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Scores ``(N, cells, K)`` and boxes around the cells."""
    corners = torch.arange(maps[0, 0].numel(), dtype=maps.dtype)[:, None] + torch.tensor(
        [0, 0, 4, 4]
    )
    return maps.flatten(2).mT, corners.expand(len(maps), -1, -1)


def of_best_box(maps: Tensor) -> Tensor:
    return maps.flatten(1).amax(1).sum()


DENSE: dict[str, tuple[Callable[[], nn.Module], Sequence[str]]] = {
    "the mean of segmenters": (
        lambda: made(mean_of_members, *(segmenter() for _ in range(3))),
        ["members.2.3", "members.1.3", "members.0.3"],
    ),
    "two backbones": (
        lambda: made(added_backbones, backbone(), backbone(), nn.Conv2d(8, 4, 3, 1, 1)),
        ["members.1", "members.0"],
    ),
    "two branches of one map": (
        lambda: made(branched, conv_relu(3), conv_relu(8), conv_relu(8), nn.Conv2d(16, 4, 3, 1, 1)),
        ["members.2", "members.1"],
    ),
}


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("answer", ["a region", "a box"])
def test_the_map_of_one_of_many_answers_is_that_of_all_branches(kind: str, answer: str) -> None:
    build, layers = DENSE[kind]
    model = build()
    target = Segmentation(1, REGION) if answer == "a region" else Detections(decode=decoded)
    score = of_region if answer == "a region" else of_best_box
    for _ in range(2):
        found = explain.attribute(model, X, HiResCAM(relu=False), target=target)
        assert found.layer == tuple(layers)
        assert found.fuse == "sum"
        assert_close(found.values, torch.stack(products(model, X, layers, score)).sum(0))


def test_what_a_box_is_not_made_of_is_no_branch_of_it() -> None:
    """The other detector, whose boxes are beside it, and the levels of a feature pyramid."""

    def beside(model: nn.Module, x: Tensor) -> Tensor:
        return torch.cat([net(x) for net in model.members], 3)

    def pyramid(model: nn.Module, x: Tensor) -> Tensor:
        fine, coarse, lateral, head = model.members
        maps = fine(x)
        return head(lateral(maps) + F.interpolate(coarse(maps), maps.shape[2:]))

    convolutions = [nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 3, 1, 1)]
    models = made(beside, segmenter(), segmenter()), made(pyramid, member()[:4], *convolutions)
    for model in models:
        found = explain.attribute(
            model, X[:1], HiResCAM(relu=False), target=Detections(decode=decoded)
        )
        assert isinstance(found.layer, str)
        assert_close(found.values, products(model, X[:1], [found.layer], of_best_box)[0])


def windows(model: nn.Module, x: Tensor) -> Tensor:
    maps = x.new_zeros(len(x), 4, 32, 32)
    for top in (0, 16):
        for left in (0, 8, 16):
            window = (..., slice(top, top + 16), slice(left, left + 16))
            maps[window] += model.members[0](x[window])
    return maps


def mirrored(model: nn.Module, x: Tensor) -> Tensor:
    return model.members[0](x) + model.members[0](x.flip(3)).flip(3)


WINDOWS = [(top, left) for top in (0, 16) for left in (0, 8, 16)]
WHERE_READ: dict[Callable[..., Tensor], Callable[[Tensor], Sequence[Tensor]]] = {
    windows: lambda x: [x[..., top : top + 16, left : left + 16] for top, left in WINDOWS],
    mirrored: lambda x: [x, x.flip(3)],
}


@pytest.mark.parametrize("forward", WHERE_READ)
def test_calls_of_a_segmenter_are_drawn_where_they_see_the_photo(
    forward: Callable[..., Tensor],
) -> None:
    model = made(forward, segmenter())
    target = Segmentation(1, REGION)
    found = explain.attribute(model, X, HiResCAM(relu=False), target=target)
    maps = products(model, X, ["members.0.3"], of_region)
    assert_close(found.values, copied_back(WHERE_READ[forward], maps))
    with pytest.warns(ExplainWarning, match=r"members\.0\.3@") as said:
        refined = explain.attribute(model, X, "refinecam", target=target)
    assert len(said) == 1
    assert isinstance(refined.layer, str)


def test_a_window_of_an_ensemble_is_explained_in_all_members() -> None:
    net = made(mean_of_members, segmenter(), segmenter())
    stitched = Stitched(net, 16).eval()
    target = Segmentation(1, REGION)
    found = explain.attribute(stitched, X, HiResCAM(relu=False), target=target)
    layers = [f"model.members.{i}.3" for i in (1, 0)]
    assert found.layer == tuple(layers)
    parts = [
        explain.attribute(stitched, X, HiResCAM(relu=False), target=target, layer=layer).values
        for layer in layers
    ]
    assert_close(found.values, parts[0] + parts[1])


@pytest.mark.parametrize("kind", ["classifiers", "segmenters", "backbones"])
def test_stages_are_those_of_all_branches(kind: str) -> None:
    """The product over resolutions of the sum over branches."""
    classifiers = made(joined, backbone(), backbone(), nn.Linear(16, 4))
    backbones = made(added_backbones, backbone(), backbone(), nn.Conv2d(8, 4, 3, 1, 1))
    model = {"classifiers": classifiers, "backbones": backbones}.get(kind) or made(
        lambda net, x: F.interpolate(mean_of_members(net, x), x.shape[2:]),
        *(backbone().append(nn.Conv2d(8, 4, 3, 1, 1)) for _ in range(2)),
    )
    for parameter in model.parameters():  # so that something speaks for the class at each stage
        parameter.data += 0.05
    target: Any = 1 if kind == "classifiers" else Segmentation(1, REGION)
    score = (lambda y: y[:, 1].sum()) if kind == "classifiers" else of_region
    found = explain.attribute(
        model, X, RefineCAM(HiResCAM(relu=False)), target=target, placement="even"
    )
    last = "3" if kind != "backbones" else ""
    stages = [
        [f"members.{i}.1" for i in (1, 0)],
        [f"members.{i}.{last}".strip(".") for i in (1, 0)],
    ]
    assert found.layer == (*stages[0], *stages[1])
    assert found.fuse == "stages"
    expected = torch.ones(())
    for stage in stages:
        total = torch.stack(products(model, X, stage, score)).sum(0)
        share = total / total.abs().amax((1, 2), keepdim=True)
        enlarged = F.interpolate(share[:, None], (16, 16), mode="bilinear")[:, 0]
        expected = expected * enlarged.clamp(min=0)
    assert_close(found.values, expected)


def test_stages_of_branches_that_no_product_adds_up_are_named() -> None:
    model = made(mean_of_members, member(), member(2))
    with pytest.warns(ExplainWarning, match=r"'members\.0\.3'"):
        found = explain.attribute(model, X, "refinecam", target=1)
    assert found.layer == ("members.0.3", "members.1.3")


def test_metrics_run_the_method_again_on_all_branches() -> None:
    model = made(mean_of_members, member(), member(), member())
    table = explain.evaluate(model, X, ["hirescam"], Sensitivity(radius=1e-9), target=1)
    ((changes,),) = [of_method.values() for of_method in table.values()]
    assert changes.max() < 1e-6
