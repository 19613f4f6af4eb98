"""``name:input``: what a layer is given is explained as what another gives, by every kind of
method."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import explain
from explain import LayerError
from explain.methods import GradCAM
from tests.conftest import Made, TinyNet, settled


@pytest.mark.parametrize("method", ["gradcam", "shapleycam", "scorecam", "ablationcam"])
def test_the_input_of_a_layer_is_what_the_layer_before_it_gives(
    method: str, x: torch.Tensor
) -> None:
    layers = (
        nn.Conv2d(3, 4, 3),
        nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3)),
        nn.AdaptiveAvgPool2d(1),
    )
    net = settled(nn.Sequential(*layers, nn.Flatten(), nn.Tanh(), nn.Linear(4, 5))).double().eval()
    expected = explain.attribute(net, x, method, target=1, layer="0").values
    together = explain.attribute(net, x, [method, "saliency"], target=1, layer="1:input")
    assert together[method].layer == "1:input"
    assert_close(together[method].values, expected, rtol=1e-9, atol=1e-12)


def twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A convolution that runs twice, and a shortcut around it."""
    x = model.stem(x)
    for _ in range(2):
        x = x + model.conv(input=x.tanh())
    return model.fc((x**2).mean((2, 3)))


def test_calls_and_shortcuts_are_told_apart(x: torch.Tensor) -> None:
    parts = {"stem": nn.Conv2d(3, 4, 3), "conv": nn.Conv2d(4, 4, 3, padding=1)}
    model = settled(Made(twice, **parts, fc=nn.Linear(4, 5))).double().eval()
    start = model.stem(x)
    first = start.tanh().detach().requires_grad_()
    middle = start + model.conv(first)
    second = middle.tanh()  # what is given; the shortcut is the network's
    alone = second.detach().requires_grad_()
    for layer, given in (("conv:input@0", first), ("conv:input", alone), ("conv:input@1", alone)):
        end = middle + model.conv(second) if given is first else middle.detach() + model.conv(alone)
        score = model.fc((end**2).mean((2, 3)))[:, 2].sum()
        gradient = torch.autograd.grad(score, given, retain_graph=True)[0]
        expected = (gradient.mean((2, 3), keepdim=True) * given).sum(1).detach()
        found = explain.attribute(model, x, GradCAM(relu=False), target=2, layer=layer).values
        assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_tokens_are_known_where_the_layer_itself_gives_none(x: torch.Tensor) -> None:
    tokens = Made(lambda model, x: x.flatten(2).transpose(1, 2))
    mean = Made(lambda model, tokens: tokens.square().mean(1))
    layers = [nn.Conv2d(3, 7, 3, padding=1), tokens, nn.LayerNorm(7), mean, nn.Linear(7, 5)]
    model = settled(nn.Sequential(*layers)).double().eval()
    before = explain.attribute(model, x, GradCAM(relu=False), target=1, layer="2").values
    assert before.shape == (len(x), *x.shape[2:])
    given = explain.attribute(model, x, GradCAM(relu=False), target=1, layer="3:input").values
    assert_close(given, before)


def test_inputs_that_are_none_or_no_numbers_are_refused(net: TinyNet, x: torch.Tensor) -> None:
    with pytest.raises(LayerError, match="did you mean 'layer1'"):
        explain.attribute(net, x, layer="layr1:input")

    def embeds(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        levels = (x[:, 0] > 0).long()
        return (model.table(levels).movedim(-1, 1) + model.none()).mean((2, 3))

    nothing = Made(lambda model: torch.ones(1))
    model = Made(embeds, table=nn.Embedding(4, 3), none=nothing).double().eval()
    for name in ("table", "none"):
        with pytest.raises(LayerError, match=f"layer '{name}:input' must"):
            explain.attribute(model, x, target=0, layer=f"{name}:input")
