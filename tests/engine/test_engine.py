"""The engine against plain autograd and finite differences, and its promise to leave everything as
it was."""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import explain
from explain import ExplainError, ExplainWarning, LayerError, MethodError, ModelError, TargetError
from explain.attribution.selection import select
from explain.engine import Attributions
from explain.engine.needs import BlockAttention
from explain.engine.perturbations import Scores, Searches
from explain.methods import GradCAM, Occlusion, ShapleyCAM
from explain.methods.base import get_method
from explain.targets import ScoreTarget
from tests.conftest import ATTENDING, COVERING, TinyNet, settled, snapshot

METHODS = [name for name in explain.list_methods() if name not in ATTENDING | COVERING]
ANYWHERE = [name for name in METHODS if name != "cam"]  # at any layer
AGAIN = (Scores, Searches, Attributions, BlockAttention)
RERUNNING = {
    name for name in METHODS if any(isinstance(need, AGAIN) for need in get_method(name).needs)
}
ONE_PASS = [name for name in ANYWHERE if name not in RERUNNING]


def test_one_forward_pass_serves_all_methods_layers_and_targets(
    net: TinyNet, x: torch.Tensor
) -> None:
    explain.attribute(net, x)  # finds the default layer
    passes: list[int] = []
    net.register_forward_hook(lambda *_: passes.append(1))
    explain.attribute(net, x, ONE_PASS, targets=[0, 1, None], layer=["layer1", "layer2"])
    assert len(passes) == 1


def failing(output: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("method", "target", "error"),
    [
        *((method, 1, None) for method in METHODS),
        ("gradcam", 99, TargetError),
        ("guidedbackprop", failing, ZeroDivisionError),
        ("scorecam", failing, ZeroDivisionError),
    ],
)
def test_model_and_caller_are_left_as_found(
    method: str, target: Any, error: type[Exception] | None, x: torch.Tensor
) -> None:
    net = settled(TinyNet()).double()
    calls: list[int] = []
    net.layer1.register_forward_hook(lambda *_: calls.append(1))
    net.bn1.eval()
    net.conv1.requires_grad_(False)
    net.fc.weight.grad = torch.ones_like(net.fc.weight)
    before = snapshot(net)
    copied = x.clone()
    with nullcontext() if error is None else pytest.raises(error):
        explain.attribute(net, x, method, target=target, layer="dropout")
    assert calls
    assert snapshot(net) == before
    assert torch.equal(x, copied)
    assert x.grad is None


def test_an_explanation_inside_another_is_refused(net: TinyNet, x: torch.Tensor) -> None:
    def nested(output: torch.Tensor) -> torch.Tensor:
        return explain.attribute(net, x).score

    with pytest.raises(ExplainError, match="from inside another one"):
        explain.attribute(net, x, target=nested)
    assert len(explain.attribute(net, x)) == 3


def test_scores_that_cannot_be_explained_say_why(net: TinyNet, x: torch.Tensor) -> None:
    with pytest.raises(TargetError, match="target cut must"):
        explain.attribute(
            net,
            x,
            "saliency",
            target=ScoreTarget(type("cut", (), {"__call__": lambda s, o: o.detach()[:, 0]})()),
        )
    with pytest.raises(LayerError, match="'layer2' must"):
        explain.attribute(
            net, x, "gradcam", target=lambda output: (output * 0).detach()[:, 0], layer="layer2"
        )
    broken = settled(TinyNet()).double()
    broken.fc.bias.data[:] = float("nan")
    for method in ("gradcam", "saliency", "deeplift", "scorecam", "smoothgrad"):
        with pytest.raises(ModelError, match="finite"):
            explain.attribute(broken, x, method)


def test_a_map_that_is_zero_everywhere_comes_with_the_reason(net: TinyNet, x: torch.Tensor) -> None:
    def says(model: nn.Module, reason: str, **options: Any) -> None:
        with pytest.warns(
            ExplainWarning, match=f"gradcam is zero everywhere for image 0, 1, 2: {reason}"
        ):
            a = explain.attribute(model, x, "gradcam", **{"target": 0, "layer": "layer2"} | options)
        assert a.heatmap.abs().max() == 0

    nn.init.zeros_(net.fc.weight)
    says(
        net,
        r"the score does not change with layer layer2 \(the gradient is zero\); choose another layer",
    )
    against = nn.Sequential(
        nn.Conv2d(3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2)
    )
    against = settled(against).double()
    nn.init.constant_(against[4].weight, -1.0)
    says(against, "all of layer 1 contributes negatively; choose another target", layer="1")
    nn.init.constant_(against[4].weight, 1.0)
    nn.init.constant_(against[0].bias, -100.0)
    says(against, "layer 1 gives zero everywhere, as behind a dead ReLU", layer="1")
    nn.init.constant_(against[0].bias, 1.0)
    against[4].bias.data = torch.tensor([2000.0, 0.0]).double()
    says(
        nn.Sequential(*against, nn.Softmax(1)),
        "the model gives probabilities, this one almost 0 or 1",
        layer="1",
    )


def test_gradients_that_are_not_finite_are_not_drawn() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 1)
            nn.init.ones_(self.conv.weight)
            nn.init.zeros_(self.conv.bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sqrt(self.conv(x).relu() * 0).mean((2, 3))

    for method in (
        "gradcam",
        "gradcam++",
        "layercam",
        "saliency",
        "guidedbackprop",
        "fullgrad",
        "shapleycam",
    ):
        with pytest.raises(ModelError, match=f"but {re.escape(method)} found NaN or infinity"):
            explain.attribute(Root(), torch.rand(1, 3, 4, 4), method, target=0, layer="conv")


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
    x = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    names = select(vit, x, "everything").methods
    unfit = ["cam", "cheferbimodal", "drise", "featurepermutation", "shapleycam"]
    assert sorted(set(explain.list_methods()) - set(names)) == unfit
    with pytest.raises(MethodError, match="derivatives"):
        explain.attribute(vit, x, "shapleycam")
    with sdpa_kernel(SDPBackend.MATH):
        assert explain.attribute(vit, x, ShapleyCAM()).values.shape == (1, 3, 3)
    for name, found in explain.attribute(vit, x, "all").items():
        assert torch.isfinite(found.values).all(), name
        assert found.heatmap.shape == (1, 12, 12)


BOTH: list[Any] = ["full", "bfloat16"]


def test_the_error_of_bfloat16_is_in_the_result(net: TinyNet, x: torch.Tensor) -> None:
    net = net.float()
    x = x.float()[:1]
    height = x.shape[2] // 2
    width = x.shape[3] // 2
    quarters = Occlusion(window=(height, width), stride=(height, width))
    found = explain.attribute(net, x, quarters, target=1, precision="bfloat16")
    rows = x.repeat(4, 1, 1, 1)
    for row, (top, left) in zip(rows, product((0, height), (0, width)), strict=True):
        row[:, top : top + height, left : left + width] = 0
    with torch.no_grad():
        exact = net(rows)[:, 1]
        change = net(rows)[:, 1] - net(x)[:, 1]
        with torch.autocast("cpu", torch.bfloat16):
            rounded = net(rows)[:, 1].float()
    assert found.rounding == pytest.approx(
        float((rounded - exact).abs().max() / change.abs().max()), rel=0.02
    )
    assert f"bfloat16: scores off by {100 * found.rounding:.2g} % of their change" in repr(found)
    several = ["scorecam", "integratedgradients", "gradcam", "kernelshap"]
    values = explain.attribute(net, x, several, target=1, precision="bf16")
    assert [values[name].rounding is not None for name in several] == [True, False, False, True]
    assert explain.attribute(net, x, "scorecam", target=1).rounding is None


@pytest.mark.parametrize(
    "method", ["kernelshap(samples=64)", "shapleysampling(samples=100)", "lime(samples=60)"]
)
def test_the_error_of_bfloat16_is_that_of_values_that_multiply_it(method: str) -> None:
    """Estimated from eight rows, of four networks: on average the true error, and never a small
    part of it."""
    shares = []
    for seed in range(4):
        torch.manual_seed(seed)
        convs = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()
        )
        model = nn.Sequential(convs, nn.Flatten(), nn.Linear(16 * 49, 4)).eval()
        x = torch.rand(1, 3, 28, 28)
        full, rounded = (
            explain.attribute(model, x, method, target=1, precision=each) for each in BOTH
        )
        error = (rounded.values - full.values).abs().max() / full.values.abs().max()
        shares.append(float(error) / rounded.rounding)
    assert max(shares) < 2
    assert 0.3 < sum(shares) / 4 < 1.2


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


class OverwritesAnEarlierView(nn.Module):
    """Adds the shortcut, which is the last to be computed, to a view that was there before it
    (GhostNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Conv2d(3, 6, 3)
        self.side = nn.Conv2d(3, 4, 3)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = self.main(x)[:, :4]
        maps += self.side(x)
        return self.fc(maps.relu().mean((2, 3)))


def test_a_view_from_before_the_layer_may_be_overwritten_behind_it(x: torch.Tensor) -> None:
    model = settled(OverwritesAnEarlierView()).double().eval()
    found = explain.attribute(model, x, GradCAM(relu=False), target=1)
    assert found.layer == "side"
    side = model.side(x).detach().requires_grad_()
    score = model.fc((model.main(x)[:, :4] + side).relu().mean((2, 3)))[:, 1].sum()
    weights = torch.autograd.grad(score, side)[0].mean((2, 3), keepdim=True)
    torch.testing.assert_close(found.values, (weights * side).sum(1).detach())


def test_one_function_for_one_or_several_methods_and_targets(net: TinyNet, x: torch.Tensor) -> None:
    one = explain.attribute(net, x, "saliency", target=1)
    several = explain.attribute(net, x, ["saliency"], target=1)
    targets = explain.attribute(net, x, "saliency", targets=[1, 2])
    both = explain.attribute(net, x, ["saliency"], targets=[1])
    best = explain.attribute(net, x, "saliency", top_k=2)
    for same in (several["saliency"], targets[0], both[0]["saliency"]):
        assert torch.equal(same.values, one.values)
    assert [len(found) for found in (targets, both, best)] == [2, 1, 2]
    assert torch.equal(best[0].values, explain.attribute(net, x, "saliency").values)


RECTIFIERS = [F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.silu, F.mish, F.hardswish]


class OverwritesViews(nn.Module):
    """Rectifiers of which each overwrites a view of another tensor."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 18, 3, padding=1)
        self.fc = nn.Linear(18, 5)
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = []
        for rectify, part in zip(RECTIFIERS, self.conv(x).chunk(9, 1), strict=True):
            parts.append(rectify(part.clone()[:], inplace=self.in_place))
        return self.fc(torch.cat(parts, 1).square().mean((2, 3)))


class ReadsBothNames(nn.Module):
    """Overwrites a view, and reads it by its old name as well as by its new one; ``.view`` refuses
    other layouts."""

    def __init__(self, *, in_place: bool, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.conv = nn.Conv2d(3, 4, 3)
        self.relu = nn.ReLU(inplace=in_place)
        self.fc = nn.Linear(4, 5)
        self.last = nn.Linear(4 * 80, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        earlier = self.conv(x)[:]
        later = self.relu(input=earlier)
        if not self.relu.inplace:
            earlier = later = later * 1.5 if self.again else later
        elif self.again:  # autograd allows it where it has not kept what the rectifier gave
            later.mul_(1.5)
        return self.fc(later.mean((2, 3))) + self.last(
            (earlier * 0.5).contiguous().view(len(x), -1)
        )


MAPS = ["gradcam(relu=False)", "ablationcam(relu=False)"]


@pytest.mark.parametrize(
    ("build", "layer", "methods"),
    [
        (OverwritesViews, "conv", ["guidedbackprop", "deconvnet", "saliency"]),
        (ReadsBothNames, "relu", [*MAPS, "saliency"]),
        (partial(ReadsBothNames, again=True), "relu", MAPS),
    ],
)
def test_overwritten_views_are_explained_like_tensors_that_are_not(
    build: Any, layer: str, methods: list[str], x: torch.Tensor
) -> None:
    overwriting = settled(build(in_place=True)).double().eval()
    plain = settled(build(in_place=False)).double().eval()
    values = explain.attribute(overwriting, x, methods, target=1, layer=layer)
    for name, expected in explain.attribute(plain, x, methods, target=1, layer=layer).items():
        assert expected.values.any()
        torch.testing.assert_close(values[name].values, expected.values)


def test_a_shared_module_goes_by_all_its_names(net: TinyNet, x: torch.Tensor) -> None:
    net.alias = net.layer2
    expected = explain.attribute(net, x, target=1, layer="layer2")
    assert torch.equal(explain.attribute(net, x, target=1, layer="alias").values, expected.values)
