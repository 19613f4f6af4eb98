"""Networks that keep something from call to call, and networks that draw random numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import ModelError
from explain.methods import (
    AblationCAM,
    GuidedIntegratedGradients,
    IntegratedGradients,
    Occlusion,
    Smooth,
)
from tests.conftest import settled

BLOCKS = Occlusion(window=4, stride=4, baseline=0.0)
X = torch.rand(3, 3, 12, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
EXACT = {"rtol": 1e-9, "atol": 1e-12}
Holder = Callable[["Remembers"], Any]


class Remembers(nn.Module):
    """Adds half of what the last call with as many rows has left, as spiking networks do between
    resets. ``store`` says where it is kept."""

    def __init__(self, store: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.fc = nn.Linear(6, 5)
        self.store = store
        self.v: Tensor | None = None
        self.memories: dict[str, Tensor] = {}
        self.last: deque[Tensor] = deque(maxlen=1)
        self.elsewhere = SimpleNamespace(v=None)

    @property
    def kept(self) -> Tensor | None:
        if self.store == "a dictionary":
            return self.memories.get("v")
        if self.store == "a queue":
            return self.last[0] if self.last else None
        return self.elsewhere.v if self.store == "elsewhere" else self.v

    def keep(self, v: Tensor) -> None:
        if self.store == "a dictionary":
            self.memories["v"] = v
        elif self.store == "a queue":
            self.last.append(v)
        elif self.store == "elsewhere":
            self.elsewhere.v = v
        elif self.store == "in place" and self.v is not None and len(self.v) == len(v):
            self.v.copy_(v)
        else:
            self.v = v

    def reset(self) -> None:
        self.v = None
        self.elsewhere.v = None
        self.memories.clear()
        self.last.clear()

    def head(self, maps: Tensor) -> Tensor:
        h = F.softplus(maps).mean((2, 3))
        kept = self.kept
        if kept is not None and kept.shape == h.shape:
            h = h + 0.5 * kept
        self.keep(h.detach())
        return self.fc(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x))


def remembering(store: str) -> Remembers:
    return settled(Remembers(store)).double().eval()  # type: ignore[return-value]


def occluded(score: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The drop of each image's score ``(N, 3, 3)`` without each block of pixels."""
    drops = torch.zeros(len(x), 3, 3, dtype=x.dtype)
    for i in range(len(x)):
        for row in range(3):
            for column in range(3):
                y = x.clone()
                y[i, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = 0
                drops[i, row, column] = (score(x) - score(y))[i]
    return drops


def ablated(model: Remembers, x: Tensor) -> Tensor:
    """Ablation-CAM, signed, of a network that is reset before each pass."""

    def score(maps: Tensor) -> Tensor:
        model.reset()
        return model.head(maps)[:, 2]

    maps = model.conv(x)
    full = score(maps)
    total = torch.zeros_like(maps[:, 0])
    for channel in range(maps.shape[1]):
        without = maps.clone()
        without[:, channel] = 0
        drop = (full - score(without)) / full
        total += drop[:, None, None] * maps[:, channel]
    return total


def values(model: nn.Module, x: Tensor, method: Any, **options: Any) -> Tensor:
    found = explain.attribute(model, x, method, target=2, **options).values
    return found[:, 2::4, 2::4] if method == BLOCKS else found


@pytest.mark.parametrize("batch_size", [None, 1, 3])
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("store", ["an attribute", "in place", "a dictionary", "a queue"])
def test_what_a_pass_keeps_is_put_back_before_the_next(
    store: str, images: int, batch_size: int | None
) -> None:
    model = remembering(store)
    x = X[:images]

    @torch.no_grad()
    def score(x: Tensor) -> Tensor:
        model.reset()
        return model(x)[:, 2]

    expected = occluded(score, x)
    with torch.no_grad():
        expected_cam = ablated(model, x)
    model.reset()
    if store == "in place":
        model(x)  # what it keeps is that of the caller
        before = model.v.clone()
    how = {"batch_size": batch_size}
    if store != "in place":
        assert_close(values(model, x, BLOCKS, **how), expected, **EXACT)
        cam = values(model, x, AblationCAM(relu=False), layer="conv", **how)
        assert_close(cam, expected_cam, **EXACT)
        assert model.kept is None
        return
    again = [values(model, x, BLOCKS, **how) for _ in range(2)]
    assert_close(again[0], again[1], **EXACT)
    assert_close(model.v, before, rtol=0, atol=0)


METHODS: list[Any] = [
    BLOCKS,
    "scorecam",
    AblationCAM(),
    IntegratedGradients(steps=8),
    GuidedIntegratedGradients(steps=4),
    Smooth(samples=6),
]


@pytest.mark.parametrize("batch_size", [None, 1, 4])
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_what_cannot_be_put_back_is_refused_and_a_reset_before_each_pass_helps(
    method: Any, images: int, batch_size: int | None
) -> None:
    model = remembering("elsewhere")
    how = {"layer": "conv", "batch_size": batch_size} if "cam" in str(method).lower() else {}
    how["batch_size"] = batch_size
    with pytest.raises(ModelError, match="reset") as error:
        values(model, X[:images], method, **how)
    assert "\n" not in str(error.value)
    model.reset()
    model.register_forward_pre_hook(lambda module, args: module.reset())
    found = values(model, X[:images], method, **how)
    fresh = remembering("an attribute")
    assert_close(found, values(fresh, X[:images], method, **how), **EXACT)


class Draws(nn.Module):
    """Dropout that evaluation mode does not switch off, for each row or for all rows alike."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.fc = nn.Linear(16, 5)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        h = F.softplus(self.conv(x)).mean((2, 3))
        if self.shared:
            return self.fc(h * torch.rand(16, dtype=h.dtype))
        return self.fc(F.dropout(h, 0.5, training=True))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("images", [1, 2, 3, 4])
@pytest.mark.filterwarnings("ignore:model draws random numbers")
def test_each_altered_image_gets_the_draw_of_its_image(images: int, shared: bool) -> None:
    model = settled(Draws(shared)).double().eval()
    x = torch.cat([X, X.flip(2)])[:images]
    x[:, :, 4:8, 4:8] = 0
    state = torch.get_rng_state()

    @torch.no_grad()
    def score(x: Tensor) -> Tensor:
        torch.set_rng_state(state)
        return model(x)[:, 2]

    expected = occluded(score, x)
    torch.set_rng_state(state)
    found = values(model, x, BLOCKS)
    assert_close(found, expected, **EXACT)
    assert found[:, 1, 1].abs().max() < 1e-12  # nothing changes there


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("images", [1, 2])
def test_smooth_averages_over_draws(images: int, shared: bool) -> None:
    model = settled(Draws(shared)).double().eval()
    x = X[:images]

    def of_seed(seed: int) -> Callable[[Tensor], Tensor]:
        @torch.no_grad()
        def score(x: Tensor) -> Tensor:
            torch.manual_seed(seed)
            return model(x)[:, 2]

        return score

    before = torch.get_rng_state()
    found = explain.attribute(model, x, Smooth(BLOCKS, samples=3, sigma=0), target=2).values
    assert torch.equal(torch.get_rng_state(), before)
    expected = sum(occluded(of_seed(seed), x) for seed in range(3)) / 3
    assert_close(found[:, 2::4, 2::4], expected, **EXACT)


@pytest.mark.parametrize("method", [BLOCKS, IntegratedGradients(steps=4)], ids=str)
@pytest.mark.parametrize("images", [1, 2])
def test_draws_are_told_unless_they_are_averaged(method: Any, images: int) -> None:
    model = settled(Draws(False)).double().eval()
    with pytest.warns(explain.ExplainWarning, match="draws"):
        values(model, X[:images], method)
    assert values(model, X[:images], Smooth(method, samples=2)).isfinite().all()


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("batch_size", [None, 1])
def test_draws_of_numpy_are_refused(images: int, batch_size: int | None) -> None:
    generator = np.random.default_rng(0)

    class OfNumPy(Draws):
        def forward(self, x: Tensor) -> Tensor:
            h = F.softplus(self.conv(x)).mean((2, 3))
            return self.fc(h * torch.from_numpy(generator.random(tuple(h.shape))))

    model = settled(OfNumPy(False)).double().eval()
    with pytest.raises(ModelError, match="random"):
        values(model, X[:images], BLOCKS, batch_size=batch_size)


def test_deeplift_takes_both_of_its_passes_with_the_same_draw() -> None:
    model = settled(Draws(True)).double().eval()
    found = explain.attribute(model, X[:1], "deeplift", target=2)
    torch.testing.assert_close(found.delta, torch.zeros(1, dtype=X.dtype), **EXACT)
