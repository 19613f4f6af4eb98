"""Metrics against Quantus, grad-cam and Captum, where these follow the papers; where they do not,
by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
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
from explain.metrics.maps import gradient_histograms, ranks_of, ssim
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


def test_pixel_flipping_is_quantus_to_1e_5(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    peer = quantus.PixelFlipping(
        features_in_step=36,
        perturb_baseline=0.0,
        normalise=False,
        abs=False,
        return_auc_per_sample=False,
        **QUIET,
    )
    # it counts each channel for itself, so 36 are 12 pixels
    theirs = np.array(ask(peer, model, photos, maps, 1))
    table = explain.evaluate(
        model, photos, {"map": maps}, PixelFlipping(steps=12, baseline=Zero()), target=1
    )
    ours = table.curve("map", "morf")[1][:, 1:].numpy()  # theirs begins behind the first step
    assert np.abs(theirs - ours).max() < 1e-5


def test_faithfulness_estimate_is_quantus(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    peer = quantus.FaithfulnessEstimate(
        features_in_step=36, perturb_baseline=0.0, normalise=False, abs=False, **QUIET
    )
    theirs = ask(peer, model, photos, maps, 1)
    metric = FaithfulnessEstimate(12, Zero(), "probability")
    table = explain.evaluate(model, photos, {"map": maps}, metric, target=1)["map"]
    assert table["faithfulnessestimate"].tolist() == pytest.approx(theirs, abs=1e-5)


def test_a_quantus_mistake_monotonicity_never_shows_a_pixel(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    """Quantus covers pixels of the covered photo once more, so its scores stay the same and every
    map gets a 1.

    The paper shows them, the least relevant first.
    """
    peer = quantus.Monotonicity(
        features_in_step=36, perturb_baseline=0.0, normalise=False, abs=False, **QUIET
    )
    assert all(ask(peer, model, photos, maps, 1))
    ours = explain.evaluate(model, photos, {"map": maps}, Monotonicity(12, Zero()), target=1)[
        "map"
    ]["monotonicity"]
    for photo, values, found in zip(photos, maps, ours.tolist(), strict=True):
        order = values.flatten().argsort()  # the least relevant first
        curve = []
        for count in range(0, 145, 12):
            keep = torch.zeros(144).index_fill(0, order[:count], 1).reshape(12, 12)
            curve.append(model((photo * keep)[None])[0].softmax(0)[1].item())
        assert found == float(all(after >= before for before, after in pairwise(curve)))
    assert not ours.all()


def test_complexities_are_quantus(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    table = explain.evaluate(model, photos, {"map": maps}, [Sparseness(), Complexity()], target=1)[
        "map"
    ]
    for name, peer in {"sparseness": quantus.Sparseness, "complexity": quantus.Complexity}.items():
        theirs = ask(peer(normalise=False, abs=True, **QUIET), model, photos, maps, 1)
        assert table[name].tolist() == pytest.approx([float(v) for v in theirs], abs=1e-4)


def test_localisations_are_quantus(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    masks = torch.zeros(2, 12, 12, dtype=torch.bool)
    masks[0, 2:7, 3:9] = True
    masks[1, 6:12, 0:5] = True
    table = explain.evaluate(
        model, photos, {"map": maps}, [EnergyPointingGame(), RelevanceRank()], target=1, masks=masks
    )["map"]
    peers = {
        "energypointinggame": quantus.RelevanceMassAccuracy,
        "relevancerank": quantus.RelevanceRankAccuracy,
    }
    for name, peer in peers.items():
        theirs = ask(
            peer(normalise=False, abs=False, **QUIET),
            model,
            photos,
            maps,
            1,
            s_batch=masks[:, None].numpy(),
        )
        assert table[name].tolist() == pytest.approx([float(v) for v in theirs], abs=1e-5)
    signed = maps - maps.mean()
    like_quantus = AttributionLocalisation(weighted=False, sign="absolute")
    ours = explain.evaluate(model, photos, {"map": signed}, like_quantus, target=1, masks=masks)
    peer = quantus.AttributionLocalisation(**QUIET)
    theirs = ask(peer, model, photos, signed, 1, s_batch=masks[:, None].numpy())
    expected = [float(v) for v in theirs]
    assert ours["map"]["attributionlocalisation"].tolist() == pytest.approx(expected, abs=1e-5)


def test_road_is_grad_cams_but_for_its_noise(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    """Its noise is drawn again for each photo, so it is switched off here for both."""
    pytest.importorskip("pytorch_grad_cam", reason="grad-cam comes with the extra 'peers'")
    from pytorch_grad_cam.metrics.road import NoisyLinearImputer

    table = explain.evaluate(
        model, photos, {"map": maps}, ROAD((20, 60), Neighbours(noise=0)), target=1
    )
    ranks = ranks_of(maps)
    for i in range(2):
        for k, count in enumerate((29, 86)):
            found = {}
            for name, covered in {
                "morf": ranks[i] < count,
                "lerf": ranks[i] >= 144 - count,
            }.items():
                filled = NoisyLinearImputer(noise=0)(photos[i], (~covered).float())
                found[name] = model(filled[None].float())[0].softmax(0)[1].item()
            expected = (found["lerf"] - found["morf"]) / 2
            assert table.curve("map", "road")[1][i, k].item() == pytest.approx(expected, abs=1e-5)


def altered(model: nn.Module, photo: torch.Tensor, run: Callable[[], Any]) -> torch.Tensor:
    """The inputs other than a photo that a model sees while something runs, each once ``(K, C, H,
    W)``."""
    rows: list[torch.Tensor] = []
    handle = model.register_forward_pre_hook(
        lambda module, given: rows.extend(given[0].detach().clone())
    )
    run()
    handle.remove()
    found: list[torch.Tensor] = []
    for row in rows:
        if not any(torch.equal(row, each) for each in (photo[0], *found)):
            found.append(row)
    return torch.stack(found)


def test_infidelity_is_captums_with_the_same_noise(model: nn.Module, photos: torch.Tensor) -> None:
    captum = pytest.importorskip("captum.metrics", reason="Captum comes with the extra 'peers'")
    values = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(3))
    for scaled in (True, False):
        metric = Infidelity(5, 0.1, scaled=scaled)
        for i in range(2):
            photo = photos[i : i + 1]
            own = values[i : i + 1]
            found: list[float] = []

            def judge() -> None:
                table = explain.evaluate(model, photo, {"map": own}, metric, target=1)  # noqa: B023
                found.append(table["map"]["infidelity"].item())  # noqa: B023

            rows = altered(model, photo, judge)[-5:]  # behind those of the probe
            calls = iter(photo - rows)

            def perturb(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                noise = torch.stack([next(calls) for _ in range(len(inputs))])  # noqa: B023
                return noise, inputs - noise

            theirs = captum.infidelity(
                model, perturb, photo, own, target=1, n_perturb_samples=5, normalize=scaled
            )
            assert found[0] == pytest.approx(theirs.item(), abs=1e-5)


def test_similarities_are_those_of_scikit_image() -> None:
    metrics = pytest.importorskip("skimage.metrics", reason="scikit-image comes with Quantus")
    feature = pytest.importorskip("skimage.feature")
    generator = torch.Generator().manual_seed(0)
    maps = torch.rand(1, 64, 64, generator=generator, dtype=torch.float64)
    maps = (maps - maps.min()) / (maps.max() - maps.min())
    theirs = feature.hog(
        maps[0].numpy(), orientations=9, pixels_per_cell=(16, 16), cells_per_block=(3, 3)
    )
    assert np.abs(gradient_histograms(maps)[0].numpy() - theirs).max() < 1e-6
    other = (
        0.5 * maps + 0.5 * torch.rand(1, 64, 64, generator=generator, dtype=torch.float64)
    ).clamp(0, 1)
    other = (other - other.min()) / (other.max() - other.min())
    score, field = metrics.structural_similarity(
        maps[0].numpy(),
        other[0].numpy(),
        gaussian_weights=True,
        sigma=1.5,
        use_sample_covariance=False,
        data_range=1.0,
        full=True,
    )
    # edges are mirrored there, and left out here
    assert ssim(maps, other).item() == pytest.approx(score, abs=0.01)
    assert field.shape == (64, 64)
