"""The engine against plain autograd and finite differences, and its promise to leave everything as
it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
from torch import nn

import explain
from explain import ArgumentError, ExplainWarning, LayerError, ModelError, TargetError
from explain.attribution.selection import select
from explain.methods import GradCAM, Occlusion
from explain.targets import ScoreTarget
from tests.conftest import Made, TinyNet, layer_for, settled


def test_scores_that_cannot_be_explained_say_why(net: TinyNet, x: torch.Tensor) -> None:
    cut = ScoreTarget(type("cut", (), {"__call__": lambda self, output: output.detach()[:, 0]})())
    with pytest.raises(TargetError, match="target cut must"):
        explain.attribute(net, x, "saliency", target=cut)
    with pytest.raises(LayerError, match="'layer2' must"):
        explain.attribute(net, x, "gradcam", target=cut.function, layer="layer2")
    net.fc.bias.data[:] = float("nan")
    for method in ("gradcam", "saliency", "deeplift", "scorecam", "smoothgrad"):
        with pytest.raises(ModelError, match="finite"):
            explain.attribute(net, x, method)


@pytest.mark.parametrize(
    ("weight", "bias", "score", "reason"),
    [
        (0.0, 1.0, 0.0, r"the score does not change with layer 0 \(.*\); choose another layer"),
        (-1.0, 1.0, 0.0, "all of layer 0 contributes negatively; choose another target"),
        (1.0, -100.0, 0.0, "layer 0 gives zero everywhere, as behind a dead ReLU"),
        (1.0, 1.0, 2000.0, "the model gives probabilities, this one almost 0 or 1"),
    ],
)
def test_a_map_that_is_zero_everywhere_comes_with_the_reason(
    weight: float, bias: float, score: float, reason: str, x: torch.Tensor
) -> None:
    maps = nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU())
    head = nn.Linear(2, 2)
    model = nn.Sequential(maps, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head).double()
    if score:
        model.append(nn.Softmax(1))
    nn.init.constant_(maps[0].bias, bias)
    nn.init.constant_(head.weight, weight)
    head.bias.data = torch.tensor([score, 0.0]).double()
    with pytest.warns(ExplainWarning, match=f"is zero everywhere for image 0, 1, 2: {reason}"):
        a = explain.attribute(model, x, "gradcam", target=0, layer="0")
    assert a.heatmap.abs().max() == 0


def test_gradients_that_are_not_finite_are_not_drawn(x: torch.Tensor) -> None:
    root = Made(
        lambda net, x: torch.sqrt(net.conv(x).relu() * 0).mean((2, 3)), conv=nn.Conv2d(3, 2, 1)
    ).double()
    nn.init.ones_(root.conv.bias)
    for method in ("gradcam", "layercam", "saliency", "guidedbackprop", "fullgrad", "shapleycam"):
        with pytest.raises(ModelError, match=f"but {method} found NaN or infinity"):
            explain.attribute(root, x, method, target=0, layer=layer_for(method, "conv"))


def test_a_wrong_layer_is_told_even_where_no_method_looks_at_it(
    net: TinyNet, x: torch.Tensor
) -> None:
    with pytest.raises(LayerError, match="did you mean 'layer1'"):
        explain.attribute(net, x, "saliency", layer="layr1")


def test_warnings_carry_the_line_of_the_caller() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2))
    with pytest.warns(ExplainWarning, match="guidedbackprop found no") as caught:
        explain.attribute(model, torch.rand(1, 3, 4, 4), "guidedbackprop")
    assert caught[0].filename == __file__


# random weights: a map may well be empty
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_every_method_for_any_network_explains_a_transformer() -> None:
    torch.manual_seed(0)
    vit = torchvision.models.VisionTransformer(12, 4, 2, 2, 8, 12, num_classes=5)
    vit = settled(vit).double().train()
    x = torch.randn(1, 3, 12, 12, dtype=torch.float64)
    names = select(vit, x, "everything").methods
    unfit = ["cam", "cheferbimodal", "drise", "featurepermutation"]
    assert explain.attribute(vit, x, "shapleycam").values.shape == (1, 3, 3)
    assert sorted(set(explain.list_methods()) - set(names)) == unfit
    for name, a in explain.attribute(vit, x, "all").items():
        assert torch.isfinite(a.values).all(), name
        assert a.heatmap.shape == (1, 12, 12)


def test_perturbed_photos_run_in_the_callers_mixed_precision(net: TinyNet, x: torch.Tensor) -> None:
    net = net.float()
    x = x.float()[:1]
    halves = Occlusion(window=(6, 10), stride=(6, 10))
    rows = x.repeat(3, 1, 1, 1)
    rows[1, :, :6] = 0
    rows[2, :, 6:] = 0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        scores = net(rows)[:, 1].float()
        a = explain.attribute(net, x, halves, target=1)
    torch.testing.assert_close(a.values[0, [0, -1], 0], scores[0] - scores[1:])
    with pytest.raises(ArgumentError, match="autocast"):
        explain.attribute(net, x, halves, precision="bfloat16")  # type: ignore[call-overload]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_in_half_precision_come_with_a_warning(
    net: TinyNet, x: torch.Tensor, dtype: torch.dtype
) -> None:
    net = net.to(dtype)
    x = x.to(dtype)
    for method in ("integratedgradients", "saliency", "lrp"):
        with pytest.warns(ExplainWarning, match="half|float16"):
            explain.attribute(net, x, method, target=1)
    explain.attribute(net, x, ["gradcam", "scorecam"], target=1)  # a warning would be an error here


def test_a_view_from_before_the_layer_may_be_overwritten_behind_it(x: torch.Tensor) -> None:
    """The shortcut, which is the last to be computed, is added to a view that was there before it
    (GhostNet)."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        maps = net.main(x)[:, :4]
        maps += net.side(x)
        return net.fc(maps.relu().mean((2, 3)))

    parts = {"main": nn.Conv2d(3, 6, 3), "side": nn.Conv2d(3, 4, 3), "fc": nn.Linear(4, 5)}
    model = settled(Made(forward, **parts)).double().eval()
    a = explain.attribute(model, x, GradCAM(relu=False), target=1)
    assert a.layer == ("side", "main")
    parts = [model.side(x).detach().requires_grad_(), model.main(x).detach().requires_grad_()]
    score = model.fc((parts[1][:, :4] + parts[0]).relu().mean((2, 3)))[:, 1].sum()
    maps = []
    for part, gradient in zip(parts, torch.autograd.grad(score, parts), strict=True):
        maps.append((gradient.mean((2, 3), keepdim=True) * part).sum(1).detach())
    torch.testing.assert_close([*a.maps.values()], maps)
    torch.testing.assert_close(a.values, maps[0] + maps[1])


@pytest.mark.parametrize("again", [False, True])
def test_overwritten_views_are_explained_like_tensors_that_are_not(
    again: bool, x: torch.Tensor
) -> None:
    """A view is overwritten, perhaps twice, and read by its old name as well as by its new one."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        earlier = net.conv(x)[:]
        later = net.relu(input=earlier)
        if not net.relu.inplace:
            earlier = later = later * 1.5 if again else later
        elif again:  # autograd allows it where it has not kept what the rectifier gave
            later.mul_(1.5)
        # `.view` refuses other layouts
        read = (earlier * 0.5).contiguous().view(len(x), -1)
        return net.fc(later.mean((2, 3))) + net.last(read)

    def model(in_place: bool) -> nn.Module:
        parts = {"relu": nn.ReLU(in_place), "fc": nn.Linear(4, 5), "last": nn.Linear(4 * 80, 5)}
        return settled(Made(forward, conv=nn.Conv2d(3, 4, 3), **parts)).double().eval()

    methods = ["gradcam(relu=False)", "ablationcam(relu=False)", "saliency"]
    values, expected = (
        explain.attribute(model(in_place), x, methods[: 3 - again], target=1, layer="relu")
        for in_place in (True, False)
    )
    for name, a in values.items():
        assert a.values.any()
        torch.testing.assert_close(a.values, expected[name].values)
