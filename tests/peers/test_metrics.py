"""Metrics against Quantus, grad-cam and Captum, where these follow the papers; where they do not,
by name."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import explain
from explain.baselines import Neighbours, Zero
from explain.metrics import (
    ROAD,
    AttributionLocalisation,
    Complexity,
    EnergyPointingGame,
    FaithfulnessEstimate,
    Infidelity,
    Monotonicity,
    PixelFlipping,
    RelevanceRank,
    Sparseness,
)
from explain.metrics.maps import ranks_of
from tests.conftest import TinyNet, settled

quantus = pytest.importorskip("quantus", reason="Quantus comes with the extra 'peers'")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the peers, about this and that


class Small(nn.Module):
    """Takes NumPy's single precision, as Quantus gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TinyNet()
        settled(self.net)
        self.net.fc.weight.data *= 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@pytest.fixture
def model() -> nn.Module:
    return Small().eval()


@pytest.fixture
def photos() -> torch.Tensor:
    return torch.rand(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def maps() -> torch.Tensor:
    """Without ties, so that every package has the same order of pixels."""
    return torch.rand(2, 12, 12, generator=torch.Generator().manual_seed(2))


def ask(
    metric: Any,
    model: nn.Module,
    photos: torch.Tensor,
    maps: torch.Tensor,
    target: int,
    **more: Any,
) -> Any:
    """Ask Quantus; its maps have a channel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return metric(
            model=model,
            x_batch=photos.numpy(),
            y_batch=np.full(len(photos), target),
            a_batch=maps[:, None].numpy(),
            softmax=True,
            device="cpu",
            **more,
        )


QUIET = {"disable_warnings": True, "display_progressbar": False}


STEPS = {"features_in_step": 36, "perturb_baseline": 0.0, "normalise": False, "abs": False}
"""It counts each channel for itself, so 36 are 12 pixels."""


def test_pixel_flipping_is_quantus_to_1e_5(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    peer = quantus.PixelFlipping(return_auc_per_sample=False, **STEPS, **QUIET)
    theirs = np.array(ask(peer, model, photos, maps, 1))
    metric = PixelFlipping(steps=12, baseline=Zero())
    table = explain.evaluate(model, photos, maps, metric, target=1)
    ours = table.curve("map", "morf")[1][:, 1:].numpy()  # theirs begins behind the first step
    assert np.abs(theirs - ours).max() < 1e-5


SAME = {
    "FaithfulnessEstimate": (FaithfulnessEstimate(12, Zero(), "probability"), STEPS),
    "Sparseness": (Sparseness(), {"normalise": False, "abs": True}),
    "Complexity": (Complexity(), {"normalise": False, "abs": True}),
}


@pytest.mark.parametrize("name", SAME)
def test_figures_are_quantus(
    name: str, model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    metric, options = SAME[name]
    theirs = ask(getattr(quantus, name)(**options, **QUIET), model, photos, maps, 1)
    table = explain.evaluate(model, photos, maps, metric, target=1)
    assert table["map"][metric.name].tolist() == pytest.approx([*map(float, theirs)], abs=1e-4)


def test_a_quantus_mistake_monotonicity_never_shows_a_pixel(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    """Quantus covers pixels of the covered photo once more, so its scores stay the same and every
    map gets a 1. The paper shows them, the least relevant first."""
    assert all(ask(quantus.Monotonicity(**STEPS, **QUIET), model, photos, maps, 1))
    table = explain.evaluate(model, photos, maps, Monotonicity(12, Zero()), target=1)
    assert not table["map"]["monotonicity"].all()


def test_localisations_are_quantus(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    masks = torch.zeros(2, 12, 12, dtype=torch.bool)
    masks[0, 2:7, 3:9] = True
    masks[1, 6:12, 0:5] = True
    asked = {
        "RelevanceMassAccuracy": EnergyPointingGame(),
        "RelevanceRankAccuracy": RelevanceRank(),
        "AttributionLocalisation": AttributionLocalisation(weighted=False, sign="absolute"),
    }
    for name, metric in asked.items():
        signed = name == "AttributionLocalisation"
        values = maps - maps.mean() if signed else maps
        options: Any = {} if signed else {"normalise": False, "abs": False}
        peer = getattr(quantus, name)(**options, **QUIET)
        theirs = ask(peer, model, photos, values, 1, s_batch=masks[:, None].numpy())
        table = explain.evaluate(model, photos, values, metric, target=1, masks=masks)
        ours = table["map"][metric.name].tolist()
        assert ours == pytest.approx([*map(float, theirs)], abs=1e-5)


def test_road_is_grad_cams_but_for_its_noise(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    """Its noise is drawn again for each photo, so it is switched off here for both."""
    pytest.importorskip("pytorch_grad_cam", reason="grad-cam comes with the extra 'peers'")
    from pytorch_grad_cam.metrics.road import NoisyLinearImputer

    metric = ROAD((20, 60), Neighbours(noise=0))
    curves = explain.evaluate(model, photos, maps, metric, target=1).curve("map", "road")[1]
    impute = NoisyLinearImputer(noise=0)
    for photo, ranks, curve in zip(photos, ranks_of(maps), curves.tolist(), strict=True):
        expected = []
        for count in (29, 86):
            shown = [
                impute(photo, (kept).float()) for kept in (ranks < 144 - count, ranks >= count)
            ]
            least, most = model(torch.stack(shown).float()).softmax(1)[:, 1].tolist()
            expected.append((least - most) / 2)
        assert curve == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("scaled", [True, False])
def test_infidelity_is_captums_with_the_same_noise(
    scaled: bool, model: nn.Module, photos: torch.Tensor
) -> None:
    captum = pytest.importorskip("captum.metrics", reason="Captum comes with the extra 'peers'")
    photo = photos[:1]
    values = torch.randn(1, 3, 12, 12)
    batches: list[torch.Tensor] = []
    handle = model.register_forward_pre_hook(lambda module, args: batches.append(args[0].clone()))
    metric = Infidelity(5, 0.1, scaled=scaled)
    table = explain.evaluate(model, photo, values, metric, target=1)
    handle.remove()
    changes = [photo - batch for batch in batches]
    (noise,) = [change for change in changes if 0 < change.abs().amax() < 1]  # a probe's are larger
    options: Any = {"target": 1, "n_perturb_samples": 5, "normalize": scaled}
    theirs = captum.infidelity(model, lambda x: (noise, x - noise), photo, values, **options)
    assert table["map"]["infidelity"].item() == pytest.approx(theirs.item(), abs=1e-5)
