"""What feeds the methods: full-backward hooks give what the engine gives, where they can be
used."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torchvision.models import MobileNetV2, ResNet, vgg
from torchvision.models.resnet import BasicBlock

import explain
from explain.hooks import HookGroup, capture
from explain.methods import GradCAM
from tests.conftest import Made, in_threads, layer_for, snapshot


def network(way: str) -> nn.Module:
    """A network that PyTorch's own full-backward hooks refuse, or see less of, as ``way`` says; the
    output of its layer also leaves in a list."""
    kept: list[torch.Tensor] = []

    def keep(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = layer.conv(x)
        kept[:] = [y if way == "a list" else y.detach()]
        return y

    def forward(model: nn.Module, photo: torch.Tensor) -> Any:
        if way == "in place at once":
            photo -= 0.1
        maps = model.layer(model.relu(model.conv(photo)))
        maps = torch.relu(maps) if way == "a function" else model.relu(maps)
        scores = model.head(maps.mean((2, 3)) + kept[0].amax((2, 3)))
        return {"logits": scores} if way == "a mapping" else scores

    parts = {
        "conv": nn.Conv2d(3, 16, 3),
        "relu": nn.ReLU(inplace=way == "in place"),
        "layer": Made(keep, conv=nn.Conv2d(16, 16, 3, padding=1)),
        "head": nn.Linear(16, 5),
    }
    return Made(forward, **parts).double().eval()


METHODS = {
    "gradcam(relu=False)": "gradcam(relu=False, gradients=full_backward)",
    "guidedbackprop": "guidedbackprop(gradients=full_backward)",
    "saliency": "saliency(gradients=full_backward)",
}


@pytest.mark.filterwarnings("ignore:.*not the derivative")  # a branch is behind detach()
@pytest.mark.parametrize(
    "way", ["modules", "in place", "in place at once", "a function", "a list", "a mapping"]
)
def test_methods_by_full_backward_hooks_are_those_by_autograd_or_refused(way: str) -> None:
    model = network(way)
    x = torch.rand(2, 3, 11, 9, dtype=torch.float64)
    before = snapshot(model)
    for plain, hooked in METHODS.items():
        for targets in ([2], [0, 4]):  # of several, each has hooks of its own
            run = partial(
                explain.attribute, model, x, targets=targets, layer=layer_for(plain, "layer")
            )
            if way == "a function" and plain == "guidedbackprop":
                with pytest.raises(explain.ExplainError, match="full-backward"):
                    run(hooked)
                continue
            for one, other in zip(run(hooked), run(plain), strict=True):
                assert_close(one.values, other.values, rtol=1e-12, atol=1e-14)
    assert snapshot(model) == before
    with pytest.raises(explain.ExplainError, match="positional"):
        explain.attribute(model, {"photo": x}, "saliency(gradients=full_backward)", target=2)


Gradients = tuple[torch.Tensor | None, ...]


def clamp(module: nn.Module, grad_input: Gradients, grad_output: Gradients) -> Gradients:
    return tuple(None if gradient is None else gradient.clamp(min=0) for gradient in grad_input)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "layer4": lambda: ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5),
    "features": lambda: MobileNetV2(num_classes=5, width_mult=0.25),
    "0": lambda: nn.Sequential(
        vgg.make_layers([8, "M", 12, "M", 16]),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    ),
}
"""By the names of their layers."""


@pytest.mark.parametrize("layer", NETWORKS)
@pytest.mark.parametrize("of_torch", [True, False])
def test_hooks_by_hand_give_gradcam_guided_backpropagation_and_saliency(
    layer: str, of_torch: bool
) -> None:
    """With the returned ``grad_input``: hooks of PyTorch, where nothing works in place, and of a
    group."""
    torch.manual_seed(0)
    model = NETWORKS[layer]().double().eval()
    rectifiers = [m for m in model.modules() if isinstance(m, (nn.ReLU, nn.ReLU6))]
    for rectifier in rectifiers:
        rectifier.inplace = not of_torch
    x = torch.rand(2, 3, 48, 48, dtype=torch.float64, requires_grad=True)
    kept: dict[str, torch.Tensor] = {}

    def keep_maps(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        kept["maps"] = output.detach().clone()

    def keep_gradient(module: nn.Module, grad_input: Gradients, grad_output: Gradients) -> None:
        kept["gradient"] = grad_output[0]

    def keep_pixels(module: nn.Module, grad_input: Gradients, grad_output: Gradients) -> None:
        kept["pixels"] = grad_input[0]

    def scored(*hooks: tuple[nn.Module, Any]) -> None:
        """Run forward and backward with full-backward hooks on modules."""
        with HookGroup(model) as group, ExitStack() as handles:
            handles.enter_context(model.get_submodule(layer).register_forward_hook(keep_maps))
            for module, hook in hooks:
                if of_torch:
                    handles.enter_context(module.register_full_backward_hook(hook))
                else:
                    group.backward(module, hook)
            model(x)[:, 3].sum().backward()

    scored((model.get_submodule(layer), keep_gradient), (model, keep_pixels))
    weights = kept["gradient"].mean((2, 3), keepdim=True)
    by_hand = {
        "gradcam": (weights * kept["maps"]).sum(1),
        "saliency": kept["pixels"].abs(),
    }
    scored(*((rectifier, clamp) for rectifier in rectifiers), (model, keep_pixels))
    by_hand["guidedbackprop"] = kept["pixels"]
    methods = [GradCAM(relu=False), "saliency", "guidedbackprop"]
    maps = explain.attribute(model, x.detach(), methods, target=3, layer=layer, placement="even")
    for name, values in by_hand.items():
        assert values.abs().max() > 0
        assert_close(maps[name].values, values, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", ["backward", "another thread", "seen.backward", "calls of others"])
@pytest.mark.parametrize("used", [(1,), (0, 2)])
def test_each_call_of_a_layer_has_its_own_gradient_or_none(used: tuple[int, ...], way: str) -> None:
    outputs: list[torch.Tensor] = []

    def three_calls(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        outputs[:] = [model.layer(x)]
        for _ in range(2):
            outputs.append(model.layer(outputs[-1].tanh()))
        return torch.stack([outputs[i].tanh() for i in used]).square().sum()

    model = Made(three_calls, layer=nn.Linear(3, 3)).double()
    x = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(three_calls(model, x), outputs, allow_unused=True)
    others = int(way == "calls of others")
    with capture(model, "layer") as seen:
        in_threads(others, lambda number: three_calls(model, 3 * x).backward())
        score = model(x)
        in_threads(others, lambda number: three_calls(model, 5 * x).backward())
    if way == "seen.backward":
        seen.backward(score)
        assert model.layer.weight.grad is None
    elif way == "another thread":
        in_threads(1, lambda number: score.backward())
    else:
        score.backward()
    for record, gradient in zip(seen.records, expected, strict=True):
        assert_close(record.gradient, gradient, rtol=1e-12, atol=1e-14)
