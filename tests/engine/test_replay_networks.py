"""Networks of many kinds before a layer: replayed wherever that is exact, and run again or refused
elsewhere."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import explain
from explain import ModelError
from explain.methods import AblationCAM
from tests.conftest import settled

X = torch.randn(2, 3, 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SIGNED = AblationCAM(relu=False)
ONCE = "what lies before the layer is replayed"
WHOLE = "all of the network runs again"


class Stem(nn.Module):
    """A stem, the layer, and a head; subclasses say what happens in between."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.layer = nn.Conv2d(6, 6, 3, padding=1)
        self.fc = nn.Linear(6, 5)
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.between(self.stem(x)))

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return self.layer(h.relu())

    def head(self, y: torch.Tensor) -> torch.Tensor:
        return self.fc(F.softplus(y).square().mean((2, 3)))


class Shortcut(Stem):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        h = h.tanh()
        return self.layer(h) + h


class Beside(Stem):
    """Rows that are put beside others have to be as many."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.layer(h), h], 2)


class CountsRows(Stem):
    """Works behind the layer on as many rows as there were before it."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        y = self.layer(h)
        for i in range(len(h)):
            y[i] = y[i] * 2 - y[i].mean()
        return y


class InPlaceBefore(Stem):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        before = h.sum((2, 3), keepdim=True)
        h.relu_().add_(1).mul_(before)
        return self.layer(h) + 0.1 * h


class InPlaceBehind(Stem):
    """Overwrites behind the layer what the tape keeps."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        h = h.tanh()
        y = self.layer(h)
        h.mul_(2)
        return y + h


class InPlaceByNumpy(Stem):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        h = h.detach().tanh()
        values = h.numpy()
        y = self.layer(h)
        values *= 2
        return y + h


class Decides(Stem):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        h = h.tanh() if h.mean() > 0 else h.sigmoid()
        for _ in range(1 + int(h.amax().item() > 0.5)):
            h = h * 1.5
        return self.layer(h) + h


class Views(Stem):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        flat = h.view(len(h), 6, -1)
        flat[:, :2] += 1
        return self.layer(flat.mT.mT.reshape(h.shape)) + h[:, [1, 0, 2, 3, 5, 4]]


class Iterates(Stem):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        rows = torch.stack([row * 2 for row in h])
        most, where = h.max(1, keepdim=True)
        return self.layer(rows) + most * (where + 1)


class WritesABuffer(Stem):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        self.count.fill_(h.square().mean())
        return self.layer(h) * self.count


class CountsItsCalls(Stem):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.layer(h) * self.count


class Remembers(Stem):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        self.kept = h.tanh()
        y = self.layer(h)
        return y + self.kept


class RandomBehind(Stem):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        h = h * torch.rand(1, dtype=h.dtype)
        return self.layer(h) * torch.rand(1, dtype=h.dtype)


class TakesTurns(Stem):
    """Does the same by another function every time."""

    turn = 0

    def between(self, h: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        h = h.relu() if self.turn % 2 else h.clamp(min=0)
        return self.layer(h) + h


NETWORKS: dict[type[Stem], str] = {
    Stem: ONCE,
    Shortcut: ONCE,
    InPlaceBefore: ONCE,
    Decides: ONCE,
    Views: ONCE,
    Iterates: ONCE,
    Remembers: ONCE,
    WritesABuffer: ONCE,
    InPlaceBehind: WHOLE,
    InPlaceByNumpy: WHOLE,
    Beside: WHOLE,
    CountsRows: WHOLE,
    RandomBehind: WHOLE,
    TakesTurns: WHOLE,
}


class Stems(TorchDispatchMode):
    """Counts how often the stem's convolution is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default and args[0].shape[1] == 3:
            self.count += 1
        return func(*args, **(kwargs or {}))


def made(kind: type[Stem]) -> Stem:
    model = settled(kind()).double().eval()
    explain.attribute(model, X[:1], "eigencam", target=1, layer="layer")  # looks at the layers
    model.turn = 0  # type: ignore[attr-defined]
    torch.manual_seed(0)
    return model


def score(
    model: Stem, x: torch.Tensor, without: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The score of one image, with a map of the layer set to zero by a hook; and the maps as they
    were."""
    seen: list[torch.Tensor] = []

    def zeroed(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(output.clone())
        if without is None:
            return output
        keep = torch.ones(output.shape[1], dtype=output.dtype)
        keep[without] = 0
        return output * keep[:, None, None]

    handle = model.layer.register_forward_hook(zeroed)
    count = model.count.clone()
    state = torch.get_rng_state()
    with torch.no_grad():
        found = model(x)[0, 1]
        model.count.copy_(count)
    torch.set_rng_state(state)
    handle.remove()
    return found, seen[0]


def ablated(model: Stem, x: torch.Tensor) -> torch.Tensor:
    """Ablation-CAM, signed, with a whole pass for each of the maps."""
    full, maps = score(model, x)
    total = torch.zeros_like(maps[:, 0])
    for channel in range(maps.shape[1]):
        total += (full - score(model, x, channel)[0]) / full * maps[:, channel]
    return total


@pytest.mark.parametrize(
    ("kind", "batch_size"), [*product(NETWORKS, [None, 4]), (Shortcut, 1), (CountsRows, 1)]
)
def test_ablations_equal_the_plain_computation(kind: type[Stem], batch_size: int | None) -> None:
    model = made(kind)
    expected = ablated(model, X[:1])
    model = made(kind)
    with Stems() as stems:
        found = explain.attribute(
            model, X[:1], SIGNED, target=1, layer="layer", batch_size=batch_size
        ).values
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    # the photo's own pass is kept
    assert (stems.count == 1) == (NETWORKS[kind] == ONCE)


@pytest.mark.parametrize("method", ["scorecam", "smooth(ablationcam)"])
def test_a_network_that_scores_an_image_otherwise_every_time_is_refused(method: str) -> None:
    model = made(CountsItsCalls)
    with pytest.raises(ModelError, match="whenever") as error:
        explain.attribute(model, X[:1], method, target=1, layer="layer")
    assert "\n" not in str(error.value)


def test_what_counts_before_the_layer_is_as_it_was_in_the_pass_of_the_photo() -> None:
    model = made(CountsItsCalls)
    expected = ablated(model, X[:1])
    model = made(CountsItsCalls)
    before = model.count.clone()
    found = explain.attribute(model, X[:1], SIGNED, target=1, layer="layer").values
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert model.count == before


def test_nothing_is_replayed_past_hooks_of_others() -> None:
    model = made(Shortcut)
    calls = list[int]()
    expected = ablated(model, X[:1])
    handle = model.stem.register_forward_hook(
        lambda module, args, output: calls.append(len(output))
    )
    with Stems() as stems:
        found = explain.attribute(
            model, X[:1], SIGNED, target=1, layer="layer", batch_size=2
        ).values
    handle.remove()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert stems.count == len(calls) == 1 + 1 + 3  # the photo, the probe, and three pieces
    assert set(calls) == {1}
