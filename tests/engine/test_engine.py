"""The engine against plain autograd and finite differences, and its promise to leave everything as
it was."""

from __future__ import annotations

import re
from collections.abc import Callable
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
from explain.engine import Activations, Attributions, InputGradients, LayerGradients
from explain.engine.execution import gather
from explain.engine.needs import BlockAttention, RuleCoverage
from explain.engine.perturbations import Scores, Searches
from explain.engine.plan import plan_of
from explain.methods import AblationCAM, GradCAM, Occlusion, ShapleyCAM
from explain.methods.base import get_method, uses_layer
from explain.relevance.gradient_rules import GuidedRule
from explain.targets import ClassTarget, ScoreTarget, TopClass
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


def test_evidence_has_what_was_needed_and_is_detached(net: TinyNet, x: torch.Tensor) -> None:
    guided = GuidedRule()
    needs = [
        Activations(),
        LayerGradients(),
        InputGradients(),
        InputGradients(guided),
        RuleCoverage(guided),
    ]
    (evidence_of,) = gather(net, x, plan_of(needs, ["layer2"]), [ClassTarget(2)])
    evidence = evidence_of("layer2")
    assert evidence.activations.shape == evidence.gradients.shape == (3, 8, 6, 5)
    assert evidence[InputGradients()].shape == evidence[InputGradients(guided)].shape == x.shape
    # conv1's, layer1's, and the two functional ones
    assert evidence[RuleCoverage(guided)].covered == {"relu": 4}
    tensors = [found for found in evidence.answers.values() if isinstance(found, torch.Tensor)]
    assert len(tensors) == 4
    assert not any(tensor.requires_grad for tensor in [*tensors, evidence.score])
    assert evidence.classes.tolist() == [2, 2, 2]


def test_several_targets_equal_one_call_each(net: TinyNet, x: torch.Tensor) -> None:
    targets = [0, TopClass(1)]
    for found, target in zip(
        explain.attribute(net, x, METHODS, targets=targets), targets, strict=True
    ):
        for name, alone in explain.attribute(net, x, METHODS, target=target).items():
            torch.testing.assert_close(found[name].values, alone.values, rtol=1e-12, atol=1e-12)
            assert torch.equal(found[name].target, alone.target)


def raises(module: nn.Module, args: Any) -> None:
    raise ZeroDivisionError("from the user's model")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("case", "state"),
    [
        ("works", "eval"),
        *(
            (case, "train, grads, partly frozen")
            for case in ("works", "bad target", "bad layer", "model that raises")
        ),
        ("target that raises", "eval"),
        ("interrupt", "eval"),
    ],
)
def test_model_and_caller_are_left_as_found(
    method: str, case: str, state: str, x: torch.Tensor
) -> None:
    net = settled(TinyNet()).double()
    calls: list[str] = []
    net.layer1.register_forward_hook(lambda *_: calls.append("user's"))
    if state == "eval":
        net.eval()
    else:
        net.bn1.eval()
        net.conv1.requires_grad_(False)
        net.fc.weight.grad = torch.ones_like(net.fc.weight)
    explain.attribute(net, x)
    if case == "model that raises":
        net.avgpool.register_forward_pre_hook(raises)
    before = snapshot(net)
    given = x.clone()
    shown = x.requires_grad
    run: Callable[..., Any] = lambda **options: explain.attribute(net, x, method, **options)  # noqa: E731
    if case == "works":
        run(target=1, layer="dropout")
        assert calls[-1] == "user's"
    elif case == "bad target":
        with pytest.raises(TargetError):
            run(target=99)
    elif case == "bad layer":
        of_layer = uses_layer(get_method(method))
        with pytest.raises(
            LayerError, match="'unused' was not called" if of_layer else "not in the model"
        ):
            run(layer="unused" if of_layer else "no such layer")
    elif case == "model that raises":
        with pytest.raises(ZeroDivisionError, match="model"):
            run()
    else:
        kind = KeyboardInterrupt if case == "interrupt" else ZeroDivisionError

        def fail(output: torch.Tensor) -> torch.Tensor:
            raise kind

        with pytest.raises(kind):
            run(target=fail)
    assert snapshot(net) == before
    assert torch.equal(x, given)
    assert x.requires_grad == shown
    assert x.grad is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("method", METHODS)
def test_the_callers_gradient_mode_and_a_frozen_model_make_no_difference(
    method: str, mode: type, net: TinyNet, x: torch.Tensor
) -> None:
    expected = explain.attribute(net, x, method, target=1).values
    net.requires_grad_(False)
    with mode():
        found = explain.attribute(net, x.clone(), method, target=1).values
    torch.testing.assert_close(found.clone(), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("method", ANYWHERE)
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_the_input_of_the_caller_is_not_touched_by_a_model_that_works_in_place(method: str) -> None:
    conv = nn.Conv2d(3, 4, 3)
    head = nn.Linear(16, 2)
    model = settled(
        nn.Sequential(nn.ReLU(inplace=True), conv, nn.ReLU(inplace=True), nn.Flatten(), head),
        seed=3,
    )
    x = torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    before = x.detach().clone()
    explain.attribute(model, x, method, target=0)
    assert torch.equal(x, before)
    assert x.grad is None


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_equals_its_images_one_by_one_in_any_order(
    method: str, net: TinyNet, x: torch.Tensor
) -> None:
    targets = torch.tensor([3, 0, 2])
    whole = explain.attribute(net, x, method, target=targets)
    for i in range(3):
        alone = explain.attribute(net, x[i : i + 1], method, target=int(targets[i]))
        torch.testing.assert_close(whole.values[i], alone.values[0], rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(whole.heatmap[i], alone.heatmap[0], rtol=1e-5, atol=1e-6)
    order = torch.tensor([2, 0, 1])
    mixed = explain.attribute(net, x[order], method, target=targets[order])
    torch.testing.assert_close(mixed.values, whole.values[order], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:.* may be off by tens of percent")
def test_other_number_formats_and_channels_last_work(
    method: str, dtype: torch.dtype, net: TinyNet, x: torch.Tensor
) -> None:
    lighter = settled(TinyNet()).to(dtype).eval().to(memory_format=torch.channels_last)
    # what is compared is the arithmetic, not the rounding of the weights
    net.load_state_dict(lighter.state_dict())
    expected = explain.attribute(
        net, x.to(dtype).double(), method, target=1, layer="dropout"
    ).heatmap
    found = explain.attribute(
        lighter,
        x.to(dtype).contiguous(memory_format=torch.channels_last),
        method,
        target=1,
        layer="dropout",
    )
    assert found.values.dtype == torch.float32
    assert found.heatmap.dtype == torch.float32
    error = (found.heatmap - expected).abs().mean()
    assert error < (1e-5 if dtype == torch.float32 else 0.1)


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
    for method in METHODS:
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


def test_all_methods_that_a_target_leaves_are_used_for_one_that_is_no_class(
    net: TinyNet, x: torch.Tensor
) -> None:
    net.eval()
    found = explain.plan(net, x, "all", target=lambda output: output[:, 0] - output[:, 1]).wanted
    assert {"gradcam", "scorecam", "saliency"} <= set(found)
    assert not {"cam", "finercam", "shapleycam", "legrad"} & set(found)


class Rectified(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.conv(x)).sum((2, 3))


SHARED_NAMES = [
    "relu",
    "relu6",
    "leaky_relu",
    "elu",
    "silu",
    "gelu",
    "hardswish",
    "mish",
    "softplus",
    "selu",
    "celu",
    "rrelu",
    "hardtanh",
]
RECTIFIERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    name: getattr(F, name) for name in SHARED_NAMES
} | {
    "torch.relu": torch.relu,
    "relu_": lambda x: x.relu_(),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.2])),
    "threshold": lambda x: F.threshold(x, 0.1, 0.0),
}


@pytest.mark.parametrize("name", RECTIFIERS)
def test_functional_rectifiers_of_every_kind_are_caught(name: str) -> None:
    """Uncaught, they would raise the warning that no rectifier was found."""
    torch.manual_seed(0)
    model = Rectified(RECTIFIERS[name])
    x = torch.randn(1, 3, 6, 6)
    guided = explain.attribute(model, x, "guidedbackprop", target=0).values
    assert guided.shape == x.shape


INPLACE = [
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.RReLU,
    nn.SiLU,
    nn.Mish,
    nn.Hardswish,
    nn.Hardtanh,
]


@pytest.mark.parametrize("kind", INPLACE)
def test_rectifiers_in_place_are_caught_like_the_others(kind: type[nn.Module]) -> None:
    x = torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(0))

    def guided(inplace: bool) -> torch.Tensor:
        first = (nn.Conv2d(3, 4, 3), kind(inplace=inplace), nn.Conv2d(4, 4, 3))
        last = (nn.Flatten(), nn.Linear(16, 2))
        model = settled(nn.Sequential(*first, nn.ReLU(), *last))
        return explain.attribute(model, x, "guidedbackprop", target=0).values

    assert guided(False).abs().max() > 0
    # ELU in place recovers its input
    torch.testing.assert_close(guided(True), guided(False), rtol=1e-4, atol=1e-6)


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


def test_a_nan_in_any_class_is_refused_and_a_masked_class_is_not(
    net: TinyNet, x: torch.Tensor
) -> None:
    net.fc.bias.data[4] = float("-inf")
    assert explain.attribute(net, x, target=0).logits is not None
    net.fc.bias.data[4] = float("nan")
    with pytest.raises(ModelError, match="finite"):
        explain.attribute(net, x, target=0)


def test_a_layer_that_mixes_up_the_batch_is_refused(x: torch.Tensor) -> None:
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.split, self.fc = nn.Identity(), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            windows = self.split(torch.cat(x.chunk(2, dim=2)))
            return self.fc(windows.mean((2, 3)).unflatten(0, (2, -1)).mean(0))

    with pytest.raises(LayerError, match="map"):
        explain.attribute(Windows(), x.float(), "gradcam", target=0, layer="split")


def test_a_model_that_turns_gradients_off_says_so(x: torch.Tensor) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 2).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                features = self.conv(x)
            return self.fc(features.mean((2, 3)))

    with pytest.raises(LayerError, match="the score does not use"):
        explain.attribute(Frozen(), x.float(), "gradcam", target=0, layer="conv")
    with torch.inference_mode():
        inference = nn.Conv2d(3, 2, 3)
    with pytest.raises(ModelError, match=r"outside torch\.inference_mode"):
        explain.attribute(inference, x.float(), "saliency")


def test_a_wrong_layer_is_told_even_where_no_method_looks_at_it(
    net: TinyNet, x: torch.Tensor
) -> None:
    with pytest.raises(LayerError, match="did you mean 'layer1'"):
        explain.attribute(net, x, "saliency", layer="layr1")


def test_a_shared_module_goes_by_all_its_names(net: TinyNet, x: torch.Tensor) -> None:
    net.alias = net.layer2
    expected = explain.attribute(net, x, target=1, layer="layer2")
    assert torch.equal(explain.attribute(net, x, target=1, layer="alias").values, expected.values)


def test_warnings_carry_the_line_of_the_caller() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2))
    with pytest.warns(ExplainWarning, match="guidedbackprop found no") as caught:
        explain.attribute(model, torch.rand(1, 3, 4, 4), "guidedbackprop")
    assert caught[0].filename == __file__


class TestTransformers:
    @pytest.fixture
    def vit(self) -> nn.Module:
        torch.manual_seed(0)
        model = torchvision.models.VisionTransformer(12, 4, 2, 2, 8, 12, num_classes=5)
        return settled(model).double().train()

    @pytest.mark.parametrize("method", sorted(ATTENDING - COVERING - {"cheferbimodal"}))
    @pytest.mark.parametrize("frozen", [False, True])
    @pytest.mark.filterwarnings("ignore:gradeclip is zero everywhere")
    def test_model_and_caller_are_left_as_found(
        self, method: str, frozen: bool, vit: nn.Module
    ) -> None:
        vit.requires_grad_(not frozen)
        x = torch.randn(
            2, 3, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        before = snapshot(vit)
        given = x.clone()
        whole = explain.attribute(vit, x, method, target=torch.tensor([3, 1])).values
        with torch.inference_mode():
            alone = explain.attribute(vit, x[1:].clone(), method, target=1).values
        torch.testing.assert_close(alone.clone(), whole[1:], rtol=1e-10, atol=1e-13)
        with pytest.raises(TargetError):
            explain.attribute(vit, x, method, target=9)
        assert snapshot(vit) == before
        assert torch.equal(x, given)

    # random weights: a map may well be empty
    @pytest.mark.filterwarnings("ignore:.* is zero everywhere")
    def test_every_method_for_any_network_explains_one(self, vit: nn.Module) -> None:
        x = torch.randn(
            1, 3, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        names = explain.applicable_methods(vit, x)
        unfit = ["cam", "cheferbimodal", "drise", "featurepermutation", "shapleycam"]
        assert sorted(set(explain.list_methods()) - set(names)) == unfit
        with pytest.raises(MethodError, match="derivatives"):
            explain.attribute(vit, x, "shapleycam")
        with sdpa_kernel(SDPBackend.MATH):
            assert explain.attribute(vit, x, ShapleyCAM()).values.shape == (1, 3, 3)
        for name, found in explain.attribute(vit, x, "all").items():
            assert torch.isfinite(found.values).all(), name
            assert found.heatmap.shape == (1, 12, 12)


class Bypass(nn.Module):
    """Something leads past the layer, and is put beside it: more rows behind the layer than before
    it do not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.side = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.cat([self.body(x).relu(), self.side(x)], 1).mean((2, 3)))


def counting(model: nn.Module) -> list[int]:
    sizes: list[int] = []
    model.register_forward_hook(lambda module, args, output: sizes.append(len(args[0])))
    return sizes


def test_ablations_fan_out_at_the_layer_where_the_network_lets_them(
    net: TinyNet, x: torch.Tensor
) -> None:
    explain.attribute(net, x)
    sizes = counting(net)
    explain.attribute(net, x, "ablationcam", target=1)
    # the images, and each once more for a probe and for all of its ablations
    assert sizes == [3, *[1, 1] * 3]
    model = settled(Bypass()).double()
    sizes = counting(model)
    found = explain.attribute(model, x, "ablationcam", target=1, layer="body").values
    # of each image a probe, since no try came to an end, and all four maps
    assert sizes == [3, *[4, 4] * 3]
    for i in range(3):
        alone = explain.attribute(model, x[i : i + 1], "ablationcam", target=1, layer="body").values
        torch.testing.assert_close(found[i : i + 1], alone, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("method", sorted(RERUNNING))
def test_networks_that_view_their_maps_are_run_in_a_layout_that_they_take(
    method: str, x: torch.Tensor
) -> None:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4 * 10 * 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.conv(x).relu().view(len(x), -1))

    model = settled(Viewing(), seed=2).double()
    found = explain.attribute(model, x, method, target=1, layer="conv")
    model.forward = lambda z: model.fc(model.conv(z).relu().flatten(1))  # type: ignore[method-assign]
    expected = explain.attribute(model, x, method, target=1, layer="conv")
    torch.testing.assert_close(found.values, expected.values, rtol=1e-9, atol=1e-12)


def test_long_work_can_be_interrupted(x: torch.Tensor) -> None:
    net = settled(TinyNet()).double().train()
    before = snapshot(net)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for method in RERUNNING:
        with pytest.raises(KeyboardInterrupt):
            explain.attribute(net, x, method, target=1, batch_size=2, progress=stop)
        assert snapshot(net) == before


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


def test_a_search_looks_once_at_the_rounding_of_its_rows() -> None:
    passes: list[int] = []

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            maps = self.conv(x).relu()
            passes.append(len(maps))
            return self.head(maps.mean((2, 3)))

    net = Counted().eval()
    x = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    net.conv.bias.data.zero_()
    net.head.weight.data *= 100
    net.head.bias.data.zero_()
    target = int(net(x).argmax())
    net.head.bias.data[(target + 1) % 3] = 1  # the answer where all is absent
    for layer in ({}, {"layer": "conv"}):
        method = explain.methods.Sufficient(6, "zero", of_layer=bool(layer))
        beside = []
        for precision in BOTH:
            passes.clear()
            found = explain.attribute(net, x, method, target=target, precision=precision, **layer)
            assert (found.rounding is None) == (precision == "full")
            beside.append(sum(passes) - int(found.samples))
        assert beside[1] - beside[0] <= 8 * 2 + 8, (
            "eight rows in both ways, once, with rows that are not perturbed"
        )


def test_bfloat16_is_for_altered_photos_whose_scores_alone_are_needed(
    net: TinyNet, x: torch.Tensor
) -> None:
    net = net.float()
    for method in ("scorecam", "ablationcam"):
        full = explain.attribute(net, x.float(), method, target=1)
        light = explain.attribute(net, x.float(), method, target=1, precision="bf16")
        assert light.values.dtype == torch.float32
        assert not torch.equal(light.values, full.values)
        assert (light.heatmap - full.heatmap).abs().mean() < 0.02
    # their gradients would be far off
    for method in ("integratedgradients", "smoothgrad", "expectedgradients"):
        full = explain.attribute(net, x.float(), method, target=1)
        light = explain.attribute(net, x.float(), method, target=1, precision="bf16")
        torch.testing.assert_close(light.values, full.values, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(light.delta, full.delta, rtol=1e-4, atol=1e-6)
    signed = [
        explain.attribute(net, x.float(), AblationCAM(relu=False), target=1, precision=p).values
        for p in BOTH
    ]
    assert (signed[0] - signed[1]).abs().max() < 0.05 * signed[0].abs().max()
    same = explain.attribute(net, x.float(), "gradcam", target=1, precision="bf16")
    assert torch.equal(same.values, explain.attribute(net, x.float(), "gradcam", target=1).values)


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


class OverwritesViews(nn.Module):
    """Rectifiers of which each overwrites a view of another tensor."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 120, 5)
        self.relu = nn.ReLU(inplace=in_place)
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        # views, each of a tensor of its own
        parts = [x[:, i : i + 2].clone()[:] for i in (0, 2, 4, 6)]
        if self.in_place:
            parts[0].relu_()
            F.leaky_relu(parts[1], 0.2, True)
            F.elu(parts[2], inplace=True)
            torch.celu_(parts[3])
        else:
            parts = [
                parts[0].relu(),
                F.leaky_relu(parts[1], 0.2),
                F.elu(parts[2]),
                torch.celu(parts[3]),
            ]
        return self.fc(self.relu((torch.cat(parts, 1) - 0.2).flatten(1)))


@pytest.mark.parametrize("method", ["guidedbackprop", "deconvnet", "saliency"])
def test_rectifiers_that_overwrite_a_view_follow_the_rule_too(method: str, x: torch.Tensor) -> None:
    found, expected = (
        explain.attribute(
            settled(OverwritesViews(in_place=in_place)).double().eval(), x, method, target=1
        ).values
        for in_place in (True, False)
    )
    torch.testing.assert_close(found, expected)
    assert found.any()


@pytest.mark.parametrize("method", ["ablationcam", "scorecam", "smoothgrad", "augmented(gradcam)"])
def test_a_caller_in_inference_mode_may_have_a_model_that_works_in_place(
    method: str, x: torch.Tensor
) -> None:
    class Greedy(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.mul_(2))

    layers = (
        nn.Conv2d(3, 4, 3),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    model = settled(Greedy(*layers)).double().eval()
    expected = explain.attribute(model, x, method, target=1, layer="0").values
    with torch.inference_mode():
        assert torch.equal(
            explain.attribute(model, x, method, target=1, layer="0").values, expected
        )


def test_one_image_with_channels_last_is_explained_like_one_with_channels_first() -> None:
    """A view of it has other strides in the dimension of size 1, which backward through
    normalisations goes by."""
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 16, 1),
        nn.Conv2d(16, 16, 1),
        nn.BatchNorm2d(16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    model = settled(nn.Sequential(*layers, nn.Linear(16, 3))).double().eval()
    x = torch.randn(1, 3, 7, 3, dtype=torch.float64)
    last = x.contiguous(memory_format=torch.channels_last)
    methods = ["hirescam", "fullgrad", "saliency"]
    found, expected = (
        explain.attribute(model, each, methods, target=0, layer="1") for each in (last, x)
    )
    for method in methods:
        torch.testing.assert_close(found[method].values, expected[method].values)


class OverwritesAnEarlierView(nn.Module):
    """Adds the shortcut, which is the last to be computed, to a view that was there before it
    (GhostNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side, self.fc = nn.Conv2d(3, 6, 3), nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

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


class ReadsBothNames(nn.Module):
    """Overwrites a view, and reads it by its old name as well as by its new one; ``.view`` refuses
    other layouts."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.again = again
        self.conv, self.relu, self.fc = nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Linear(4, 5)
        self.last = nn.Linear(4 * 80, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.conv(x)[:]
        after = self.relu(input=before)
        if self.again:  # autograd allows it where it has not kept what the rectifier gave
            after.mul_(1.5)
        scores = self.fc(after.mean((2, 3)))
        return scores + self.last((before * 0.5).contiguous().view(len(x), -1))


@pytest.mark.parametrize("together", [[], ["saliency"]])
def test_gradients_come_back_by_every_name_of_what_a_layer_overwrote(
    together: list[str], x: torch.Tensor
) -> None:
    model = settled(ReadsBothNames(again=not together)).double().eval()
    found = explain.attribute(model, x, [GradCAM(relu=False), *together], target=1, layer="relu")[
        "gradcam"
    ]
    maps = model.conv(x).relu().detach().requires_grad_()

    def score(maps: torch.Tensor) -> torch.Tensor:
        later = maps * 1.5 if model.again else maps
        return (model.fc(later.mean((2, 3))) + model.last((later * 0.5).flatten(1)))[:, 1]

    weights = torch.autograd.grad(score(maps).sum(), maps)[0].mean((2, 3), keepdim=True)
    torch.testing.assert_close(found.values, (weights * maps).sum(1).detach())
    with torch.no_grad():
        expected = ablated_by_hand(score, maps)
    ablated = explain.attribute(model, x, AblationCAM(relu=False), target=1, layer="relu").values
    torch.testing.assert_close(ablated, expected)


def ablated_by_hand(
    score: Callable[[torch.Tensor], torch.Tensor], maps: torch.Tensor
) -> torch.Tensor:
    """Ablation-CAM, signed: each of the maps weighted by the share that the score loses without
    it."""
    expected = torch.zeros_like(maps[:, 0])
    for k in range(maps.shape[1]):
        without = maps.clone()
        without[:, k] = 0
        expected += ((score(maps) - score(without)) / score(maps))[:, None, None] * maps[:, k]
    return expected


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


@pytest.mark.parametrize(
    "wrong", [{"target": 1, "targets": [1]}, {"targets": 3}, {"targets": []}, {"target": [1] * 7}]
)
def test_the_other_word_is_named_for_wrong_targets(
    wrong: dict[str, Any], net: TinyNet, x: torch.Tensor
) -> None:
    with pytest.raises(explain.TargetError, match="targets"):
        explain.attribute(net, x, "saliency", **wrong)
