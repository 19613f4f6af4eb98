from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize
from torch.testing import assert_close

import explain
from explain.hooks.preserve import untouched
from tests.conftest import TinyNet, snapshot


def test_a_train_method_of_ones_own_is_not_called() -> None:
    class Frozen(nn.Module):
        def train(self, mode: bool = True) -> nn.Module:
            raise AssertionError("train() must not be called")

    model = Frozen()
    with untouched(model):
        assert not model.training
    assert model.training


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_rng_gradient_mode_and_inference_mode_come_back(net: TinyNet, mode: type) -> None:
    with mode():
        before = snapshot(net)
        with untouched(net):
            assert not torch.is_inference_mode_enabled()
            torch.rand(3)
            torch.set_grad_enabled(not torch.is_grad_enabled())
        assert snapshot(net) == before


# --- what forward passes write into a model


class Average(nn.Module):
    """Takes off a running mean: the first photos set it, and each pass moves it, by ``data`` that
    no version shows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.is_first = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.is_first:
            self.mean.copy_(x.detach().mean((0, 2, 3)))
            self.is_first = False
        self.mean.data.mul_(0.5).add_(0.5 * x.detach().mean((0, 2, 3)))
        return x - self.mean[:, None, None]


class Replaced(nn.Module):
    """Puts another tensor in the place of a buffer, makes one that was not there, for the size of
    the photos, and deletes one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("ramp", None)
        self.register_buffer("start", torch.ones(()))
        self.width: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._buffers.pop("start", None)
        self.total = self.total + x.detach().mean((0, 2, 3))
        if self.width != x.shape[3]:
            self.width = x.shape[3]
            self.ramp = torch.linspace(0, 1, x.shape[3], dtype=x.dtype)
        return (x + self.total[:, None, None]) * self.ramp


# what is taken off or added in these has no gradient
@pytest.mark.filterwarnings("ignore:.*not the derivative")
@pytest.mark.parametrize("writer", [Average, Replaced, FakeQuantize])
def test_what_passes_write_into_a_model_is_put_back(writer: type[nn.Module]) -> None:
    kind = torch.float32 if writer is FakeQuantize else torch.float64
    rest = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    model = nn.Sequential(writer(), nn.Sequential(*rest).to(kind)).eval()
    x = torch.rand(1, 3, 8, 8, dtype=kind)
    expected = copy.deepcopy(model)(x)[:, 1].detach()
    before = snapshot(model)
    attributes = {key: value for key, value in vars(model[0]).items() if key != "_buffers"}
    buffers = dict(model[0]._buffers)
    methods = ["gradcam(relu=False)", "saliency"]
    if writer is FakeQuantize:
        methods.append("occlusion(window=4, stride=4)")
    maps = explain.attribute(model, x, methods, target=1)
    assert_close(maps["gradcam"].score, expected)
    assert snapshot(model) == before
    assert all(vars(model[0])[key] is value for key, value in attributes.items())
    assert model[0]._buffers.keys() == buffers.keys()
    assert all(model[0]._buffers[name] is buffer for name, buffer in buffers.items())


class Scaled(nn.Module):
    """Writes the brightness of the photos, with its gradient, into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("brightness", torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.brightness.fill_(x.square().mean())
        return x * self.brightness


def test_a_buffer_that_is_written_with_a_gradient_is_put_back() -> None:
    model = nn.Sequential(Scaled(), nn.Conv2d(3, 4, 3), nn.ReLU()).double().eval()
    x = torch.rand(1, 3, 8, 8, dtype=torch.float64)
    before = snapshot(model)
    explain.list_layers(model, x)
    assert snapshot(model) == before
    assert not model[0].brightness.requires_grad
