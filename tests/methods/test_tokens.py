"""Masks from a transformer's own tokens: clusters, ViT-CX and input sampling, against plain
loops."""

from __future__ import annotations

import itertools
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
from explain.layers.placement import Placement
from explain.methods import TIS, ViTCX
from explain.methods.score_cam import clustered, means
from explain.methods.wrappers import noise
from tests.conftest import TinyNet, settled
from tests.methods.plain import unit
from tests.peers.common import random

EXACT = {"rtol": 1e-8, "atol": 1e-12}
BLOCKS = ["encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_1"]
LAYER = f"{BLOCKS[1]}.ln_1"


@pytest.fixture
def vit() -> torchvision.models.VisionTransformer:
    network = torchvision.models.VisionTransformer(20, 5, 2, 2, 12, 24, num_classes=3)
    return settled(network).double().eval()


def photos(count: int = 1) -> Tensor:
    return random(3, count, 3, 20, 20)


def given_by(model: nn.Module, name: str, x: Tensor) -> Tensor:
    """What a layer gives for one photo ``(C, H, W)``, as maps ``(C, 4, 4)``."""
    outputs: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_hook(lambda *call: outputs.append(call[2]))
    with torch.no_grad():
        model(x[None])
    handle.remove()
    return outputs[0][0, 1:].T.reshape(-1, 4, 4)


def plain_linkage(distances: Tensor, most: float) -> list[list[int]]:
    """Merge the two nearest clusters, again and again."""
    clusters = [[i] for i in range(len(distances))]
    while len(clusters) > 1:
        gaps = {
            (i, j): float(distances[clusters[i]][:, clusters[j]].max())
            for i, j in itertools.combinations(range(len(clusters)), 2)
        }
        i, j = min(gaps, key=gaps.__getitem__)
        if gaps[i, j] >= most:
            break
        clusters[i] += clusters.pop(j)
    return sorted(clusters, key=min)


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
    masks = torch.stack([unit(mask, shift=True) for mask in large])
    flat = masks.flatten(1)
    clusters = plain_linkage(1 - F.cosine_similarity(flat[:, None], flat, dim=2), distance)
    total = torch.zeros(20, 20, dtype=torch.float64)
    seen = torch.zeros_like(total)
    for number, members in enumerate(clusters):
        mask = unit(masks[members].sum(0), shift=True)
        added = sigma * noise(0, number, x) * (1 - mask)
        of_mask = chance(model, x * mask + added, target) - chance(model, x + added, target)
        total += (of_mask + chance(model, x, target)) * mask
        seen += mask
    return torch.where(seen > 0, total / seen, 0), len(clusters)


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


@pytest.mark.parametrize("distance", [0.02, 0.3, 4.0])
def test_maps_are_clustered_by_their_masks_wherever_their_cells_lie(distance: float) -> None:
    rows = torch.tensor([2.0, 5.0, 11.0])
    columns = torch.tensor([3.0, 4.0, 9.0, 18.0])
    centres = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1)[None]
    placement = Placement((16, 20), centres)
    maps = torch.rand(9, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = placement.on_photo(maps[None])[0]
    masks = torch.stack([unit(mask, shift=True) for mask in drawn]).flatten(1)
    members = plain_linkage(1 - F.cosine_similarity(masks[:, None], masks, dim=2), distance)
    spans = drawn.flatten(1).amax(1) - drawn.flatten(1).amin(1)
    expected = torch.stack([sum(maps[i] / spans[i] for i in some) for some in members])
    assert_close(clustered(maps, (16, 20), distance, placement), expected)


def plain_tis(model: Any, x: Tensor, target: int, samples: int, share: float) -> Tensor:
    channels = torch.cat([given_by(model, block, x).flatten(1) for block in BLOCKS])
    total = torch.zeros(16, dtype=torch.float64)
    times = torch.zeros(16, dtype=torch.float64)
    for centre in means(channels, samples, seed=0):
        kept = sorted(centre.argsort(descending=True)[: int(share * 16)].tolist())
        with torch.no_grad():
            tokens = torch.cat([model.class_token, model._process_input(x[None])], 1)
            tokens = tokens + model.encoder.pos_embedding
            some = model.encoder.layers(tokens[:, [0, *(1 + place for place in kept)]])
            logits = model.heads(model.encoder.ln(some)[:, 0])
        total[kept] += logits.softmax(1)[0, target]
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


def counting(vit: Any) -> nn.Module:
    """A transformer that must have all of its tokens."""

    def count(module: nn.Module, args: Any) -> None:
        if args[0].shape[1] != 17:
            raise RuntimeError("shape of the places does not fit")

    vit.encoder.layers[1].register_forward_pre_hook(count)
    return vit


@pytest.mark.parametrize(
    ("model_of", "method", "message"),
    [
        (lambda vit: TinyNet(), ViTCX(), "vitcx must"),
        (lambda vit: TinyNet(), TIS(), "tis must"),
        (counting, TIS(), "RuntimeError"),
    ],
)
def test_other_networks_are_refused(
    vit: Any, model_of: Callable[[Any], Any], method: Any, message: str
) -> None:
    with pytest.raises(ExplainError, match=message) as caught:
        explain.attribute(model_of(vit).double().eval(), photos(), method, target=1)
    assert not isinstance(caught.value, ModelError)
