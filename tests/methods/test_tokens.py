"""Masks from a transformer's own tokens: clusters, ViT-CX and input sampling, against plain
loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import ExplainError, ModelError
from explain.methods import TIS, ViTCX
from explain.methods.score_cam import means
from explain.methods.wrappers import noise
from tests.conftest import TinyNet, settled

EXACT = {"rtol": 1e-8, "atol": 1e-12}
BLOCKS = ["encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_1"]
LAYER = f"{BLOCKS[1]}.ln_1"


@pytest.fixture
def vit() -> torchvision.models.VisionTransformer:
    return (
        settled(torchvision.models.VisionTransformer(20, 5, 2, 2, 12, 24, num_classes=3))
        .double()
        .eval()
    )


def photos(count: int = 1) -> Tensor:
    return torch.randn(
        count, 3, 20, 20, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )


def given_by(model: nn.Module, name: str, x: Tensor) -> Tensor:
    """What a layer gives for one photo ``(C, H, W)``, as maps ``(C, 4, 4)``."""
    found = []
    handle = model.get_submodule(name).register_forward_hook(lambda m, args, out: found.append(out))
    with torch.no_grad():
        model(x[None])
    handle.remove()
    return found[0][0, 1:].T.reshape(-1, 4, 4)


def plain_linkage(distances: list[list[float]], most: float) -> list[int]:
    """Merge the two nearest clusters, again and again."""
    clusters = [[i] for i in range(len(distances))]
    while len(clusters) > 1:
        pairs = [(i, j) for i in range(len(clusters)) for j in range(i)]
        apart = {
            (i, j): max(distances[a][b] for a in clusters[i] for b in clusters[j]) for i, j in pairs
        }
        i, j = min(apart, key=apart.__getitem__)
        if apart[i, j] >= most:
            break
        clusters[j] += clusters.pop(i)
    labels = [0] * len(distances)
    for number, members in enumerate(sorted(clusters, key=min)):
        for member in members:
            labels[member] = number
    return labels


def test_means_are_those_of_the_points_that_are_nearest_to_them() -> None:
    points = torch.rand(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    centres = means(points, 7, seed=1)
    nearest = torch.cdist(points, centres).argmin(1)
    for number, centre in enumerate(centres):
        assert_close(centre, points[nearest == number].mean(0))
    assert torch.equal(centres, means(points, 7, seed=1))
    assert not torch.equal(centres, means(points, 7, seed=2))
    assert len(means(points[:5].repeat(3, 1), 7, seed=0)) == 5


def chance(model: nn.Module, x: Tensor, target: int) -> float:
    with torch.no_grad():
        return float(model(x[None]).softmax(1)[0, target])


def plain_vitcx(
    model: nn.Module, x: Tensor, target: int, distance: float, sigma: float
) -> tuple[Any, int]:
    large = F.interpolate(given_by(model, LAYER, x)[None], size=(20, 20), mode="bilinear")[0]
    masks = [(each - each.min()) / (each.max() - each.min()) for each in large]
    cosines = [[float((a * b).sum() / a.norm() / b.norm()) for b in masks] for a in masks]
    labels = plain_linkage([[1 - cosine for cosine in row] for row in cosines], distance)
    total = seen = torch.zeros(20, 20, dtype=torch.float64)
    for number in range(max(labels) + 1):
        mask = torch.stack(
            [each for each, label in zip(masks, labels, strict=True) if label == number]
        ).sum(0)
        mask = (mask - mask.min()) / (mask.max() - mask.min())
        added = sigma * noise(0, number, x) * (1 - mask)
        weight = (
            chance(model, x * mask + added, target)
            - chance(model, x + added, target)
            + chance(model, x, target)
        )
        total = total + weight * mask
        seen = seen + mask
    return torch.where(seen > 0, total / seen, 0), max(labels) + 1


@pytest.mark.parametrize("distance", [0.02, 0.12, 4.0])
def test_vitcx_weighs_clusters_of_maps_by_what_the_model_says_of_what_is_seen(
    vit: Any, distance: float
) -> None:
    found = explain.attribute(
        vit, photos(2), ViTCX(distance, sigma=0.3), target=[1, 2], layer=LAYER
    )
    for i, x in enumerate(photos(2)):
        expected, clusters = plain_vitcx(vit, x, i + 1, distance, 0.3)
        assert_close(found.values[i], expected, **EXACT)
        assert found[i].samples == 2 * clusters
    if distance == 0.12:
        assert 1 < found.samples / 2 < 12


def plain_tis(model: Any, x: Tensor, target: int, samples: int, share: float) -> Tensor:
    channels = torch.cat([given_by(model, block, x).flatten(1) for block in BLOCKS])
    total = torch.zeros(16, dtype=torch.float64)
    times = torch.zeros(16, dtype=torch.float64)
    for centre in means(channels, samples, seed=0):
        kept = sorted(centre.argsort(descending=True)[: int(share * 16)].tolist())
        with torch.no_grad():
            tokens = (
                torch.cat([model.class_token, model._process_input(x[None])], 1)
                + model.encoder.pos_embedding
            )
            some = tokens[:, [0, *(1 + place for place in kept)]]
            score = model.heads(model.encoder.ln(model.encoder.layers(some))[:, 0]).softmax(1)[
                0, target
            ]
        total[kept] += score
        times[kept] += 1
    return (total / times.clamp(min=1)).reshape(4, 4)


@pytest.mark.parametrize(("samples", "share"), [(9, 0.5), (1024, 0.3)])
def test_tis_averages_the_scores_of_samples_that_have_a_token(
    vit: Any, samples: int, share: float
) -> None:
    found = explain.attribute(vit, photos(2), TIS(samples, share), target=[1, 2])
    for i, x in enumerate(photos(2)):
        assert_close(found.values[i], plain_tis(vit, x, i + 1, samples, share), **EXACT)
    assert found.samples == min(samples, 24)


class Counting(nn.Module):
    """A transformer that must have all of its tokens."""

    def __init__(self, vit: Any) -> None:
        super().__init__()
        self.vit = vit
        vit.encoder.layers[1].register_forward_pre_hook(self._count)

    def _count(self, module: nn.Module, args: Any) -> None:
        if args[0].shape[1] != 17:
            raise RuntimeError("shape of the places does not fit")

    def forward(self, x: Tensor) -> Tensor:
        return self.vit(x)


@pytest.mark.parametrize(
    ("model_of", "method", "message"),
    [
        (lambda vit: TinyNet(), ViTCX(), "vitcx must"),
        (lambda vit: TinyNet(), TIS(), "tis must"),
        (Counting, TIS(), "RuntimeError"),
    ],
)
def test_other_networks_are_refused(
    vit: Any, model_of: Callable[[Any], Any], method: Any, message: str
) -> None:
    model = model_of(vit).double().eval()
    x = photos() if isinstance(model, Counting) else photos()[:, :, :16, :16]
    with pytest.raises(ExplainError, match=message) as caught:
        explain.attribute(model, x, method, target=1)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, ModelError)
