"""The smallest evidence, against sets that are found by plain loops over all subsets."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import explain
from explain.baselines import OtherPhoto, Zero
from explain.methods import GradCAM, Necessary, Sufficient
from explain.methods import evidence as search
from tests.conftest import Made
from tests.methods.plain_transformer import Transformer

SIDE = 6


def mapped(seed: int, stride: int = 1, channels: int = 2) -> Any:
    """A photo, a map of 3 x 3 or 6 x 6 places, and a head that multiplies places with each other."""
    torch.manual_seed(seed)
    maps = [nn.Conv2d(channels, 5, 3, stride, padding=1), nn.Tanh(), nn.Conv2d(5, 4, 3, padding=1)]
    behind = [nn.SiLU(), nn.Flatten(), nn.LazyLinear(9), nn.SiLU()]
    parts = {"photo": nn.Identity(), "maps": nn.Sequential(*maps)}
    parts |= {"behind": nn.Sequential(*behind), "head": nn.Linear(9, 3)}
    model = nn.Sequential(OrderedDict(parts)).double()
    model(torch.zeros(1, channels, SIDE, SIDE).double())
    return model


def network(seed: int) -> Any:
    """Regions depend on each other, and probabilities differ."""
    model = mapped(seed)
    model.behind[2].weight.data *= 8
    model.head.weight.data *= 8
    return model


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
    regions = set(mask[::width, ::width].flatten().nonzero()[:, 0].tolist())
    assert torch.equal(mask, shown(regions, across))
    return regions


def stays(model: nn.Module, x: Tensor, visible: Iterable[int], across: int, target: int) -> bool:
    return top(model, x * shown(visible, across)) == target


def the_set(model: nn.Module, x: Tensor, method: Any, **options: Any) -> search.EvidenceSet:
    """The only set of one photo."""
    (evidence,) = explain.attribute(model, x, method, **options).sets[0]
    return evidence


@pytest.mark.parametrize("seed", range(3))
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
        alone = model(x * evidence.mask).softmax(1)[0, target].item()
        without = model(x * ~evidence.mask).softmax(1)[0, target].item()
        assert (evidence.alone, evidence.without) == pytest.approx((alone, without), rel=1e-12)


def assert_minimal(model: nn.Module, x: Tensor, evidence: search.EvidenceSet) -> None:
    """No pixel of a set can be left out."""
    assert evidence.proof == "minimal"
    target = top(model, x)
    kept = regions_in(evidence.mask, SIDE)
    assert stays(model, x, kept, SIDE, target)
    assert not any(stays(model, x, kept - {region}, SIDE, target) for region in kept)


@pytest.mark.parametrize("seed", range(3))
def test_a_minimal_set_loses_its_property_without_any_of_its_regions(seed: int) -> None:
    model = network(seed)
    x = photo(seed + 10, model)
    target = top(model, x)
    every = set(range(SIDE**2))
    guide = GradCAM() if seed else None
    assert_minimal(model, x, the_set(model, x, Sufficient(SIDE, Zero(), guide=guide)))
    lost = regions_in(the_set(model, x, Necessary(SIDE, Zero())).mask, SIDE)
    assert not stays(model, x, every - lost, SIDE, target)
    assert all(stays(model, x, every - lost | {region}, SIDE, target) for region in lost)


def wild(net: Any, x: Tensor) -> Tensor:
    """About 0.4 of the pixels are enough, and waves of all of them say which: what can be left out
    keeps changing."""
    seen = x.flatten(1)
    score = net.head((8 * net.wave(seen)).sin()) + 4 * seen.mean(1, keepdim=True)
    return torch.cat([score, torch.full_like(score, 1.6)], 1)


@pytest.mark.parametrize("seed", range(4))
def test_sets_are_minimal_where_regions_are_tried_in_turn(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first round, as where rounds change little."""
    monkeypatch.setattr(search, "SLOW", 0)
    monkeypatch.setattr(search, "TURN", 3)
    torch.manual_seed(seed)
    model = Made(wild, wave=nn.Linear(SIDE**2, 40), head=nn.Linear(40, 1)).double()
    x = torch.ones(1, 1, SIDE, SIDE).double()
    assert_minimal(model, x, the_set(model, x, Sufficient(SIDE, Zero())))


def brightest(net: nn.Module, x: Tensor) -> Tensor:
    """Says class 1 where one of two places is bright."""
    mark = torch.maximum(x[:, :, :2, :2].mean((1, 2, 3)), x[:, :, 4:, 4:].mean((1, 2, 3)))
    return torch.stack([torch.full_like(mark, 0.5), mark], 1)


def test_two_marks_of_which_either_is_enough_are_two_reasons_and_both_are_needed() -> None:
    x = torch.ones(1, 3, SIDE, SIDE).double()
    model = Made(brightest)
    attribution = explain.attribute(model, x, Sufficient(3, Zero(), reasons=4))
    masks = [evidence.mask for evidence in attribution.sets[0]]
    assert sorted(regions_in(mask, 3).pop() for mask in masks) == [0, 8]
    first, second = (attribution.values[0][mask] for mask in masks)
    assert float(first.min()) > float(second.max()) > 0
    both = shown({0, 8}, 3)
    assert not attribution.values[0][~both].any()
    assert torch.equal(the_set(model, x, Necessary(3, Zero())).mask, both)


def exchanged(model: Any, layer: str, x: Tensor, other: Tensor, places: Iterable[int]) -> Tensor:
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


def of_two_classes(model: Any, layer: str, places: int) -> tuple[Tensor, Tensor, int]:
    """Two photos, and the class of the second one, which the first one has when all places of a
    layer are exchanged; the head of the model is centred first, so that it tells photos apart."""
    draw = torch.Generator().manual_seed(1)
    channels = 3 if layer == "blocks.0" else 2
    photos = torch.randn(40, 1, channels, SIDE, SIDE, dtype=torch.float64, generator=draw)
    x = photos[0]
    model.head.bias.data -= model(photos.flatten(0, 1)).mean(0)
    for other in photos:
        becomes = top(model, other)
        mixed = exchanged(model, layer, x, other, range(places))
        if becomes != top(model, x) and int(mixed.argmax()) == becomes:
            break
    return x, other, becomes


def transformer() -> Transformer:
    torch.manual_seed(1)
    model = Transformer(fused=True).double()
    model.head.weight.data *= 9
    return model


@pytest.mark.parametrize(
    ("model", "layer", "side"),
    [
        (mapped(0), "photo", SIDE),
        (mapped(0), "maps", SIDE),
        (mapped(1, 2), "maps", 3),
        (transformer(), "blocks.0", 3),
    ],
)
def test_places_are_exchanged_with_those_of_another_photo(
    model: nn.Module, layer: str, side: int
) -> None:
    x, other, becomes = of_two_classes(model, layer, side**2)
    options: dict[str, Any] = {} if layer == "photo" else {"layer": layer, "placement": "even"}
    fill = OtherPhoto(other)
    method = Necessary(side, fill, becomes=becomes, of_layer=layer != "photo")
    evidence = the_set(model, x, method, **options)
    places = regions_in(evidence.mask, side)
    scores = exchanged(model, layer, x, other, places)
    assert int(scores.argmax()) == becomes
    rest = exchanged(model, layer, x, other, set(range(side**2)) - places)
    expected = [some.softmax(0)[top(model, x)].item() for some in (rest, scores)]
    assert [evidence.alone, evidence.without] == pytest.approx(expected, rel=1e-9)
    among = places if side == SIDE else range(9)
    for some in itertools.combinations(among, len(places) - 1):
        assert int(exchanged(model, layer, x, other, some).argmax()) != becomes


def test_the_budget_ends_the_search_with_a_set_that_is_good_and_says_so() -> None:
    model = network(5)
    x = photo(5, model)
    samples = explain.attribute(model, x, Sufficient(SIDE, Zero())).samples
    attribution = explain.attribute(model, x, Sufficient(SIDE, Zero(), samples=samples // 2))
    (evidence,) = attribution.sets[0]
    assert evidence.proof == "found"
    assert attribution.samples <= samples // 2 + 2
    assert top(model, x * evidence.mask) == top(model, x)


def test_an_answer_that_nothing_turns_into_another_class_is_warned_of() -> None:
    model = network(0)
    x = photo(0, model)
    (becomes,) = {0, 1, 2} - {top(model, x), top(model, torch.zeros_like(x))}
    with pytest.warns(explain.ExplainWarning, match="all regions absent"):
        attribution = explain.attribute(model, x, Necessary(3, Zero(), becomes=becomes))
    assert attribution.sets[0] == ()


def test_a_set_needs_a_baseline() -> None:
    with pytest.raises(explain.MethodError, match="baseline of sufficient"):
        Sufficient(baseline=())


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
    (evidence,) = partial.sets[1]
    assert evidence.proof == "found"
    assert top(model, x[1:2] * evidence.mask) == top(model, x[1:2])
    assert partial.sets[2] == ()


def test_an_interrupt_is_raised_unless_what_was_found_is_asked_for() -> None:
    model = network(5)

    def stop(done: int, total: int) -> None:
        if done > 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        explain.attribute(model, photo(5, model), Sufficient(SIDE, Zero()), progress=stop)


def test_a_record_of_regions_of_a_layer_is_loaded_and_repeated(tmp_path: Path) -> None:
    model = mapped(0, 2, channels=3)
    draw = np.random.default_rng(0)
    picture, other_picture = draw.integers(0, 255, (2, SIDE, SIDE, 3), dtype=np.uint8)

    def to_tensor(image: Any) -> Tensor:
        return torch.from_numpy(np.array(image)).double().movedim(-1, 0) / 255

    x = to_tensor(picture)[None]
    other = to_tensor(other_picture)[None]
    model.head.bias.data -= (model(x) + model(other))[0] / 2
    method = Necessary(baseline=OtherPhoto(other), becomes=top(model, other), of_layer=True)
    explainer = explain.Explainer(model, preprocess=to_tensor, categories=[*"abc"])
    explanation = explainer(picture, methods=[method], layer="maps")
    explanation.save(tmp_path)
    loaded = explain.load(next(tmp_path.glob("*.json")))
    (evidence,) = explanation["necessary"].sets[0]
    repeated = loaded.repeat(explainer, image=picture)["necessary"]
    for (same,) in (loaded.attribution.sets[0], repeated.sets[0]):
        assert torch.equal(evidence.mask, same.mask)
        assert replace(same, mask=evidence.mask) == evidence
