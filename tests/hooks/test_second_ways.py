"""Outputs that leave a layer by more ways than one: the gradient is that of all of them, by plain
autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from explain import LayerError
from explain.hooks import HookGroup, capture
from explain.hooks.capturing import Capture, cut_where_allowed
from tests.conftest import Made


@dataclass
class Both:
    maps: torch.Tensor
    peak: torch.Tensor


class Layer(nn.Module):
    """A convolution whose output leaves in the way that ``way`` says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.way = way
        self.kept: Any = None

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> Any:
        y = self.conv(x)
        self.kept = y
        match self.way:
            case "tuple":
                return y, y.mean((2, 3))
            case "dataclass":
                return Both(y, y.mean((2, 3)))
            case "twice":
                return y, y
            case "second argument":
                out += y
                return out
            case "view":
                y = y.permute(0, 1, 3, 2)
                return y, y.mean((2, 3))
            case "overwritten inside":
                return y.relu_(), y.mean((2, 3))
        return y


STAYS = ["twice", "attribute", "second argument", "overwritten inside"]
"""What autograd itself does not let anybody overwrite afterwards."""
WAYS = ["tuple", "view", *STAYS]


class Net(nn.Module):
    """Reads what its layer gave by two ways, overwriting the first on its way where ``in_place``
    says so."""

    def __init__(self, way: str, *, in_place: bool = False, only_second: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 3, 3, padding=1)
        self.body = Layer(way)
        self.fc = nn.Linear(4, 5)
        self.other = nn.Linear(4, 5)
        self.in_place = in_place
        self.only_second = only_second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps, second = self.ways(x)
        if self.in_place and self.body.way not in STAYS:
            maps.mul_(1.5)
        scores = self.other(second)
        return scores if self.only_second else scores + self.fc((maps**2).mean((2, 3)))

    def ways(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.zeros(len(x), 4, *x.shape[2:], dtype=x.dtype)
        returned = self.body(self.stem(x), out)
        match self.body.way:
            case "twice":
                return returned[0], returned[1].amax((2, 3))
            case "attribute":
                return returned, self.body.kept.amax((2, 3))
            case "second argument":
                return returned, out.amax((2, 3))
            case "dataclass":
                return returned.maps, returned.peak
        return returned


def plainly(model: Net, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the layer gives, and the gradient of the first score in it: nothing in place, no
    hooks."""
    way = model.body.way
    y = model.body.conv(model.stem(x)).detach()
    if way == "overwritten inside":
        y = y.relu()
    if way == "view":
        y = y.permute(0, 1, 3, 2)
    y = y.contiguous().requires_grad_()
    largest = way in ("twice", "attribute", "second argument")
    second = y.amax((2, 3)) if largest else y.mean((2, 3))
    factor = 1.5 if model.in_place and way not in STAYS else 1
    scores = model.other(second)
    if not model.only_second:
        scores = scores + model.fc(((factor * y) ** 2).mean((2, 3)))
    return y.detach(), torch.autograd.grad(scores[:, 0].sum(), y)[0]


def networks(way: str, **options: Any) -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    return Net(way, **options).double().eval(), torch.randn(2, 3, 5, 5, dtype=torch.float64)


def assert_close(found: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("frozen", "options"),
    [(False, {}), (True, {}), (False, {"in_place": True}), (True, {"only_second": True})],
    ids=str,
)
@pytest.mark.parametrize("grad", [False, True], ids=["cut", "whole"])
@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_is_that_of_every_way(
    way: str, grad: bool, frozen: bool, options: dict[str, bool]
) -> None:
    model, x = networks(way, **options)
    activation, expected = plainly(model, x)
    model.requires_grad_(not frozen)

    def run(cut: bool) -> Capture:
        with torch.set_grad_enabled(not cut), HookGroup(model) as group:
            captured = Capture(group, ["body"], gradients=True, cut=cut)
            captured.backward(model(x.clone())[:, 0].sum())
        return captured

    record = (run(False) if grad else cut_where_allowed(run)).records[0]
    assert torch.equal(record.activation, activation)
    assert_close(record.gradient, expected)


@pytest.mark.parametrize("way", WAYS)
def test_a_cut_pass_records_no_graph_below_the_layer(way: str) -> None:
    model, x = networks(way)
    below: list[bool] = []
    with torch.no_grad(), HookGroup(model) as group:
        captured = Capture(group, ["body"], gradients=True)
        group.forward("stem", lambda module, args, output: below.append(output.requires_grad))
        model(x)
    assert below == [False]
    assert not captured.missing


@pytest.mark.parametrize(("way", "keys"), [("tuple", [0, 1]), ("dataclass", ["maps", "peak"])])
def test_all_tensors_of_an_output_are_recorded_with_gradients_by_position_or_key(
    way: str, keys: list[Any]
) -> None:
    model, x = networks(way)
    with capture(model, "body") as seen:
        model(x)[:, 0].sum().backward()
    (record,) = seen.records
    assert list(record.tensors) == keys
    assert record.tensors[keys[0]] is record
    second = record.tensors[keys[1]]
    assert torch.equal(second.activation, model.ways(x)[1].detach())
    assert_close(second.gradient, model.other.weight[0].detach().expand(2, 4))
    assert_close(record.gradient, plainly(model, x)[1])


def test_a_layer_that_hands_on_what_it_was_given_has_the_gradient_of_what_leaves_it() -> None:
    def around(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = model.conv(x)
        return (x + model.drop(x) ** 2).sum()

    model = Made(around, conv=nn.Conv2d(3, 4, 1), drop=nn.Dropout()).double().eval()
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    y = model.conv(x).detach()
    for grad in (False, True):
        for layers in (["drop"], ["conv", "drop"], ["drop:input"], ["drop", "conv", "drop:input"]):
            with torch.set_grad_enabled(grad), capture(model, layers) as seen:
                seen.backward(model(x))
            for layer in layers:
                assert_close(seen.gradients[layer], 1 + 2 * y if layer == "conv" else 2 * y)


def test_a_view_that_is_overwritten_behind_the_layer_keeps_its_gradient_also_for_its_base() -> None:
    def turns(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        maps = model.conv(x)
        tokens = model.turn(maps)
        tokens.mul_(2).add_(0.1)
        return (maps**2).sum() + tokens.sum()

    model = Made(turns, conv=nn.Conv2d(3, 4, 1), turn=nn.Flatten(2)).double().eval()
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    later = model.conv(x).flatten(2).detach() * 2 + 0.1
    for source in (x, x.clone().requires_grad_()):
        with capture(model, "turn") as seen:
            model(source).backward()
        assert_close(seen.gradients["turn"], 2 * (2 * later + 1))
    with torch.no_grad(), capture(model, "turn") as seen:
        score = model(x)
    with pytest.raises(LayerError, match="layer 'turn' must"):  # its base has no history there
        seen.backward(score)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_recorded_once_while_backward_repeats_them(reentrant: bool) -> None:
    model, x = networks("attribute")
    _, expected = plainly(model, x)
    source = x.clone().requires_grad_()
    with capture(model, "body") as seen:
        scores = model.stem(source)
        out = torch.zeros(1)
        maps = checkpoint(model.body, scores, out, use_reentrant=reentrant)
        second = maps.amax((2, 3))
        (model.other(second) + model.fc((maps**2).mean((2, 3))))[:, 0].sum().backward()
    assert len(seen.records) == 1
    assert_close(seen.gradients["body"], expected)


def test_the_input_of_a_layer_that_takes_a_container_is_captured_within_it() -> None:
    def sums(model: nn.Module, given: list[torch.Tensor]) -> torch.Tensor:
        given.append(given[0] * 3)
        return given[0] ** 2

    net = nn.ModuleDict({"sums": Made(sums)})
    x = torch.tensor([1.0, 2.0])
    given = [x]
    with torch.no_grad(), capture(net, "sums:input") as seen:
        out = net["sums"](given)
        (out.sum() + given[1].sum() + given[0].sum()).backward()
    assert given[0] is x  # what hooks put into the caller's list is taken back
    assert torch.equal(seen.gradients["sums:input"], 2 * x + 3)


@pytest.mark.parametrize(
    ("output", "message"),
    [("text", "must return a tensor, got str"), (torch.ones(1).long(), "floating-point")],
)
def test_layers_without_usable_output_are_refused(output: Any, message: str) -> None:
    model = nn.Sequential(Made(lambda layer, x: output))
    with pytest.raises(LayerError, match=message), capture(model, "0"):
        model(torch.ones(1))


def test_gradients_of_which_parts_may_be_missing_are_refused() -> None:
    def hidden(layer: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():  # out of autograd's sight
            return x * 2, x.amax((2, 3))

    model = nn.Sequential(Made(hidden))
    x = torch.rand(1, 3, 4, 4)
    with capture(model, "0") as seen:
        first, second = model(x)
    with pytest.raises(LayerError, match="layer '0' must"):
        seen.backward(first.sum() + second.sum())
    with pytest.raises(LayerError, match="'0' must"):
        seen.gradients  # noqa: B018
    assert torch.equal(seen.activations["0"], first)
    refused = pytest.raises(LayerError, match=r"outside torch\.inference_mode")
    with torch.inference_mode(), capture(model, "0"), refused:
        model(x)
