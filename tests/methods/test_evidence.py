"""The smallest evidence, against sets that are found by plain loops over all subsets."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import explain
from explain.baselines import OtherPhoto, Zero
from explain.methods import GradCAM, Necessary, Squares, Sufficient
from explain.methods import evidence as search
from tests.methods.plain_transformer import Transformer

SIDE = 6


def to_tensor(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture.resize((SIDE, SIDE)))).double().movedim(-1, 0) / 255


def network(seed: int) -> nn.Module:
    """Convolutions and products of places, so that regions depend on each other."""
    torch.manual_seed(seed)
    head = nn.Linear(96, 3)
    with torch.no_grad():
        head.weight *= 8  # so that probabilities differ
    first = [nn.Conv2d(2, 5, 3, padding=1), nn.Tanh(), nn.Conv2d(5, 6, 3), nn.SiLU()]
    return nn.Sequential(*first, nn.Flatten(), head).double()


def photo(seed: int, model: nn.Module | None = None) -> Tensor:
    """A photo ``(1, 2, 6, 6)``; one whose top class is not that of a blank one, if there is a
    model."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(1, 2, SIDE, SIDE, dtype=torch.float64, generator=draw)
        if model is None or top(model, x) != top(model, torch.zeros_like(x)):
            return x


def top(model: nn.Module, x: Tensor) -> int:
    with torch.no_grad():
        return int(model(x).argmax())


def shown(regions: Iterable[int], across: int) -> Tensor:
    """The mask ``(H, W)`` of some squares."""
    labels = torch.arange(across**2).reshape(across, across)
    width = SIDE // across
    labels = labels.repeat_interleave(width, 0).repeat_interleave(width, 1)
    return torch.isin(labels, torch.tensor(sorted(regions), dtype=torch.long))


def regions_in(mask: Tensor, across: int) -> set[int]:
    """The squares that a mask ``(H, W)`` consists of; it has no parts of others."""
    width = SIDE // across
    cells = mask.reshape(across, width, across, width).double().mean((1, 3)).flatten()
    assert set(cells.tolist()) <= {0.0, 1.0}
    return set(cells.nonzero()[:, 0].tolist())


def stays(model: nn.Module, x: Tensor, visible: Iterable[int], across: int, target: int) -> bool:
    return top(model, x * shown(visible, across)) == target


def the_set(model: nn.Module, x: Tensor, method: Any, **options: Any) -> search.EvidenceSet:
    """The only set of one photo."""
    (evidence,) = explain.attribute(model, x, method, **options).sets[0]
    return evidence


@pytest.mark.parametrize("seed", range(4))
def test_of_few_regions_no_smaller_set_exists(seed: int) -> None:
    model = network(seed)
    x = photo(seed, model)
    target = top(model, x)
    every = set(range(9))
    subsets = [set(some) for size in range(10) for some in itertools.combinations(every, size)]
    enough = [some for some in subsets if stays(model, x, some, 3, target)]
    needed = [some for some in subsets if not stays(model, x, every - some, 3, target)]
    for method, sets in ((Sufficient(3, Zero()), enough), (Necessary(3, Zero()), needed)):
        evidence = the_set(model, x, method)
        smallest = min(map(len, sets))
        assert evidence.proof == "smallest"
        assert regions_in(evidence.mask, 3) in [some for some in sets if len(some) == smallest]


def assert_minimal(model: nn.Module, x: Tensor, evidence: search.EvidenceSet) -> set[int]:
    target = top(model, x)
    kept = regions_in(evidence.mask, SIDE)
    assert evidence.proof == "minimal"
    assert stays(model, x, kept, SIDE, target)
    assert not any(stays(model, x, kept - {region}, SIDE, target) for region in kept)
    return kept


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("guide", [None, GradCAM()])
def test_a_minimal_set_loses_its_property_without_any_of_its_regions(seed: int, guide: Any) -> None:
    model = network(seed)
    x = photo(seed + 10, model)
    target = top(model, x)
    every = set(range(SIDE**2))
    assert_minimal(model, x, the_set(model, x, Sufficient(SIDE, Zero(), guide=guide)))
    for needed in explain.attribute(model, x, Necessary(SIDE, Zero())).sets[0]:
        lost = regions_in(needed.mask, SIDE)
        assert not stays(model, x, every - lost, SIDE, target)
        assert all(stays(model, x, every - lost | {region}, SIDE, target) for region in lost)


class Wild(nn.Module):
    """About 0.4 of the pixels are enough, and waves of all of them say which: what can be left out
    keeps changing."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wave = nn.Linear(SIDE**2, 40)
        self.head = nn.Linear(40, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = x.flatten(1)
        score = self.head((8 * self.wave(seen)).sin()) + 4 * seen.mean(1, keepdim=True)
        return torch.cat([score, torch.full_like(score, 1.6)], 1)


@pytest.mark.parametrize("slow", [search.SLOW, 0])
def test_sets_are_minimal_where_all_regions_depend_on_each_other(
    slow: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 0, regions are tried in turn after the first round, as where rounds change little."""
    monkeypatch.setattr(search, "SLOW", slow)
    monkeypatch.setattr(search, "TURN", 3)
    x = torch.ones(1, 1, SIDE, SIDE).double()
    sizes = []
    for seed in range(6):
        model = Wild(seed).double()
        sizes.append(len(assert_minimal(model, x, the_set(model, x, Sufficient(SIDE, Zero())))))
    assert max(sizes) > 2


def test_the_probability_with_a_set_and_without_it_and_the_share_that_is_to_stay() -> None:
    model = network(1)
    x = torch.cat([photo(3, model), photo(4, model)])
    target = model(x).argmax(1)
    sets = explain.attribute(model, x, Sufficient(3, Zero(), keep=0.8), target=target).sets
    whole = model(x).softmax(1).amax(1)
    for image in range(2):
        (evidence,) = sets[image]
        masks = torch.stack([evidence.mask, ~evidence.mask])[:, None]
        alone, without = model(x[image] * masks).softmax(1)[:, target[image]].tolist()
        assert evidence.alone == pytest.approx(alone, rel=1e-12)
        assert evidence.without == pytest.approx(without, rel=1e-12)
        assert evidence.alone >= 0.8 * whole[image].item() * (1 - 1e-5)
        assert evidence.size == pytest.approx(float(evidence.mask.double().mean()))


class Marks(nn.Module):
    """Says class 1 where one of two places is bright."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.stack([x[:, :, :2, :2].mean((1, 2, 3)), x[:, :, 4:, 4:].mean((1, 2, 3))])
        return torch.stack([torch.full_like(places[0], 0.5), places.amax(0)], 1)


def test_two_marks_of_which_either_is_enough_are_two_reasons_and_both_are_needed() -> None:
    x = torch.ones(1, 3, SIDE, SIDE).double()
    marks = torch.stack([shown({0}, 3), shown({8}, 3)])
    attribution = explain.attribute(Marks(), x, Sufficient(3, Zero(), reasons=4))
    masks = [evidence.mask for evidence in attribution.sets[0]]
    assert sorted(mask.tolist() for mask in masks) == sorted(marks.tolist())
    first, second = (attribution.values[0][mask] for mask in masks)
    assert float(first.min()) > float(second.max()) > 0
    assert not attribution.values[0][~marks.any(0)].any()
    assert torch.equal(the_set(Marks(), x, Necessary(3, Zero())).mask, marks.any(0))


def test_what_turns_the_answer_into_another_class() -> None:
    model = network(0)
    x = photo(0, model)
    others = [photo(seed) for seed in range(30)]
    other = next(image for image in others if top(model, image) != top(model, x))
    becomes = top(model, other)
    mask = the_set(model, x, Necessary(3, OtherPhoto(other), becomes=becomes)).mask
    assert top(model, torch.where(mask, other, x)) == becomes
    for size in range(len(regions_in(mask, 3))):
        for regions in itertools.combinations(range(9), size):
            assert top(model, torch.where(shown(regions, 3), other, x)) != becomes


def exchanged(
    model: nn.Module, layer: str, x: Tensor, other: Tensor, places: Iterable[int]
) -> Tensor:
    """The scores of a photo with some places of a layer's output from another photo, by a plain
    hook.

    Outputs are maps ``(1, C, h, w)``, or tokens ``(1, T, C)`` with a class token before them.
    """
    outputs: list[Tensor] = []
    chosen = torch.tensor(sorted(places), dtype=torch.long)

    def exchange(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        outputs.append(output.clone())
        mixed = output.clone()
        if output.ndim == 4:
            mixed.flatten(2)[..., chosen] = outputs[0].flatten(2)[..., chosen]
        else:
            mixed[:, 1 + chosen] = outputs[0][:, 1 + chosen]
        return mixed

    handle = model.get_submodule(layer).register_forward_hook(exchange)
    with torch.no_grad():
        model(other)
        scores: Tensor = model(x)
    handle.remove()
    return scores[0]


class Mapped(nn.Module):
    """A map of 3 x 3 or 6 x 6 places, which a head multiplies with each other."""

    def __init__(self, seed: int, stride: int, channels: int = 2) -> None:
        super().__init__()
        torch.manual_seed(seed)
        first = nn.Conv2d(channels, 5, 3, stride, padding=1)
        self.maps = nn.Sequential(first, nn.Tanh(), nn.Conv2d(5, 4, 3, padding=1))
        side = SIDE // stride
        self.behind = nn.Sequential(nn.SiLU(), nn.Flatten(), nn.Linear(4 * side**2, 9), nn.SiLU())
        self.head = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.behind(self.maps(x)))  # type: ignore[no-any-return]


def two_classes(model: Any, layer: str, places: int) -> tuple[Tensor, Tensor, int]:
    """Two photos, and the class of the second one, which the first one has when all places of a
    layer are exchanged.

    The head of the model is centred first, so that it tells photos apart.
    """
    draw = torch.Generator().manual_seed(1)
    channels = 2 if layer == "maps" else 3
    photos = torch.randn(40, channels, SIDE, SIDE, dtype=torch.float64, generator=draw)
    with torch.no_grad():
        model.head.bias.sub_(model(photos).mean(0))
    x = photos[:1]
    for other in photos[:, None]:
        becomes = top(model, other)
        mixed = exchanged(model, layer, x, other, range(places))
        if becomes != top(model, x) and int(mixed.argmax()) == becomes:
            return x, other, becomes
    raise AssertionError("no such photos")


def transformer() -> Transformer:
    torch.manual_seed(5)
    model = Transformer(fused=True).double()
    with torch.no_grad():
        model.head.weight *= 9
    return model


@pytest.mark.parametrize(
    ("model", "layer", "side"),
    [
        (Mapped(0, 1), "maps", SIDE),
        (Mapped(1, 2), "maps", 3),
        (Mapped(2, 2), "maps", 3),
        (transformer(), "blocks.0", 3),
    ],
)
def test_places_of_a_layer_are_exchanged_with_those_of_another_photo(
    model: nn.Module, layer: str, side: int
) -> None:
    model.double()
    x, other, becomes = two_classes(model, layer, side**2)
    method = Necessary(baseline=OtherPhoto(other), becomes=becomes, of_layer=True)
    evidence = the_set(model, x, method, layer=layer)
    width = SIDE // side
    places = set(evidence.mask[::width, ::width].flatten().nonzero()[:, 0].tolist())
    scores = exchanged(model, layer, x, other, places)
    assert int(scores.argmax()) == becomes
    assert evidence.without == pytest.approx(scores.softmax(0)[top(model, x)].item(), rel=1e-9)
    rest = exchanged(model, layer, x, other, set(range(side**2)) - places)
    assert evidence.alone == pytest.approx(rest.softmax(0)[top(model, x)].item(), rel=1e-9)
    smaller = [tuple(places - {place}) for place in places]
    if side == 3:
        assert evidence.proof == "smallest"
        sizes = range(len(places))
        smaller = [some for size in sizes for some in itertools.combinations(range(9), size)]
    for some in smaller:
        assert int(exchanged(model, layer, x, other, some).argmax()) != becomes


def test_what_lies_before_the_layer_is_run_no_more_often_for_more_sets() -> None:
    model = Mapped(1, 1).double()
    x, other, becomes = two_classes(model, "maps", SIDE**2)
    rows: list[int] = []
    model.maps[0].register_forward_hook(lambda module, args, output: rows.append(len(output)))
    counts = {}
    for across in (2, SIDE):
        rows.clear()
        method = Necessary(Squares(across), OtherPhoto(other), becomes=becomes, of_layer=True)
        samples = explain.attribute(model, x, method, layer="maps").samples
        counts[samples] = sum(rows)
    assert max(counts) > 10 * min(counts)
    assert max(counts.values()) < 2 * min(counts)


def test_the_budget_ends_the_search_with_a_set_that_is_good_and_says_so() -> None:
    model = network(5)
    x = photo(5, model)
    samples = explain.attribute(model, x, Sufficient(SIDE, Zero())).samples
    attribution = explain.attribute(model, x, Sufficient(SIDE, Zero(), samples=samples // 2))
    (evidence,) = attribution.sets[0]
    assert evidence.proof == "found"
    assert attribution.samples <= samples // 2 + 2
    assert top(model, x * evidence.mask) == top(model, x)


def test_an_interrupt_keeps_the_sets_of_earlier_images_and_leaves_later_ones_empty() -> None:
    model = network(5)
    x = torch.cat([photo(seed, model) for seed in (5, 6, 7)])
    method = Sufficient(SIDE, Zero())

    def stop(done: int, total: int) -> None:
        if done > method.samples + 40:  # in the second image
            raise KeyboardInterrupt

    alone = explain.attribute(model, x[:1], method)
    with pytest.warns(explain.ExplainWarning, match="image 2"):
        partial = explain.attribute(model, x, method, progress=stop, keep_partial=True)
    assert torch.equal(partial.values[:1], alone.values)
    assert [len(partial.sets[image]) for image in range(3)] == [1, 1, 0]
    assert partial.finished.tolist() == [True, False, False]
    (evidence,) = partial.sets[1]
    assert evidence.proof == "found"
    assert top(model, x[1:2] * evidence.mask) == top(model, x[1:2])


def test_an_answer_that_nothing_turns_into_another_class_is_warned_of() -> None:
    model = network(0)
    x = photo(0, model)
    (becomes,) = {0, 1, 2} - {top(model, x), top(model, torch.zeros_like(x))}
    with pytest.warns(explain.ExplainWarning, match="all regions absent"):
        attribution = explain.attribute(model, x, Necessary(3, Zero(), becomes=becomes))
    assert attribution.sets[0] == ()


def test_a_record_of_regions_of_a_layer_is_loaded_and_repeated(tmp_path: Path) -> None:
    model = Mapped(0, 2, channels=3).double()
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 255, (2, SIDE, SIDE, 3), dtype=np.uint8)
    picture, other_picture = map(Image.fromarray, pixels)
    x = to_tensor(picture)[None]
    other = to_tensor(other_picture)[None]
    with torch.no_grad():
        model.head.bias.sub_((model(x) + model(other))[0] / 2)
    becomes = top(model, other)
    categories = ["cup", "pot", "pan"]
    explainer = explain.Explainer(model, preprocess=to_tensor, size=SIDE, categories=categories)
    method = Necessary(baseline=OtherPhoto(other), becomes=becomes, of_layer=True)
    explanation = explainer(picture, methods=[method], layer="maps")
    explanation.save(tmp_path)
    loaded = explain.load(next(tmp_path.glob("*.json")))
    (evidence,) = explanation["necessary"].sets[0]
    (stored,) = loaded.attribution.sets[0]
    (again,) = loaded.repeat(explainer, image=picture)["necessary"].sets[0]
    assert evidence.mask.any()
    for same in (stored, again):
        assert torch.equal(evidence.mask, same.mask)
        assert (evidence.alone, evidence.without) == (same.alone, same.without)
        assert evidence.proof == same.proof
