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
from torch.utils._python_dispatch import TorchDispatchMode

import explain
from explain.attribution.pictures import sentence
from explain.baselines import Noise, OtherPhoto, Zero
from explain.methods import Necessary, Sufficient
from explain.methods import evidence as search

SIDE = 6


def to_tensor(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture.resize((SIDE, SIDE)))).double().movedim(-1, 0) / 255


def network(seed: int, classes: int = 3) -> nn.Module:
    """Convolutions and products of places, so that regions depend on each other."""
    torch.manual_seed(seed)
    head = nn.Linear(96, classes)
    with torch.no_grad():
        head.weight *= 8  # so that probabilities differ
    layers = [
        nn.Conv2d(2, 5, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(5, 6, 3),
        nn.SiLU(),
        nn.Flatten(),
        head,
    ]
    return nn.Sequential(*layers).double()


def photo(seed: int, model: nn.Module | None = None) -> Tensor:
    """A photo ``(1, 2, 6, 6)``; one whose top class is not that of a blank one, if there is a
    model."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(1, 2, SIDE, SIDE, dtype=torch.float64, generator=draw)
        if model is None or int(model(x).argmax()) != int(model(torch.zeros_like(x)).argmax()):
            return x


def covered(x: Tensor, visible: Iterable[int], across: int) -> Tensor:
    """The photo with all but these squares set to zero, pixel by pixel."""
    found = torch.zeros_like(x)
    width = SIDE // across
    for number in visible:
        row, column = divmod(number, across)
        for i, j in itertools.product(range(width), repeat=2):
            found[..., row * width + i, column * width + j] = x[
                ..., row * width + i, column * width + j
            ]
    return found


def regions_in(mask: Tensor, across: int) -> set[int]:
    """The squares that a mask ``(H, W)`` consists of; it has no parts of others."""
    width = SIDE // across
    cells = mask.reshape(across, width, across, width).double().mean((1, 3)).flatten()
    assert set(cells.tolist()) <= {0.0, 1.0}
    return set(cells.nonzero()[:, 0].tolist())


def stays(model: nn.Module, x: Tensor, visible: Iterable[int], across: int, target: int) -> bool:
    with torch.no_grad():
        return int(model(covered(x, visible, across)).argmax()) == target


@pytest.mark.parametrize("seed", range(4))
def test_of_few_regions_no_smaller_set_exists(seed: int) -> None:
    model = network(seed)
    x = photo(seed, network(seed))
    across = 3
    target = int(model(x).argmax())
    everything = set(range(across**2))
    subsets = [set(each) for n in range(10) for each in itertools.combinations(everything, n)]
    enough = [each for each in subsets if stays(model, x, each, across, target)]
    needed = [each for each in subsets if not stays(model, x, everything - each, across, target)]
    for method, sets in ((Sufficient(across, Zero()), enough), (Necessary(across, Zero()), needed)):
        a = explain.attribute(model, x, method)
        (found,) = a.sets[0]
        assert found.proof == "smallest"
        assert regions_in(found.mask, across) in [
            each for each in sets if len(each) == len(min(sets, key=len))
        ]


@pytest.mark.parametrize("seed", range(3))
def test_a_minimal_set_loses_its_property_without_any_of_its_regions(seed: int) -> None:
    model = network(seed)
    x = photo(seed + 10, network(seed))
    across = SIDE
    target = int(model(x).argmax())
    everything = set(range(across**2))
    (enough,) = explain.attribute(model, x, Sufficient(across, Zero())).sets[0]
    kept = regions_in(enough.mask, across)
    assert enough.proof == "minimal" or not kept
    assert stays(model, x, kept, across, target)
    assert not any(stays(model, x, kept - {each}, across, target) for each in kept)
    for needed in explain.attribute(model, x, Necessary(across, Zero())).sets[0]:
        lost = regions_in(needed.mask, across)
        assert not stays(model, x, everything - lost, across, target)
        assert all(stays(model, x, everything - lost | {each}, across, target) for each in lost)


class Wild(nn.Module):
    """About 0.4 of the pixels are enough, and waves of all of them say which: what can be left out
    keeps changing."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wave, self.head = nn.Linear(SIDE**2, 40), nn.Linear(40, 1)

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
        (found,) = explain.attribute(model, x, Sufficient(SIDE, Zero())).sets[0]
        kept = regions_in(found.mask, SIDE)
        assert found.proof == "minimal"
        assert stays(model, x, kept, SIDE, 0)
        assert not any(stays(model, x, kept - {each}, SIDE, 0) for each in kept)
        sizes.append(len(kept))
    assert max(sizes) > 2


def test_the_probability_with_a_set_and_without_it_and_the_share_that_is_to_stay() -> None:
    model = network(1)
    x = torch.cat([photo(3, model), photo(4, model)])
    target = model(x).argmax(1)
    a = explain.attribute(model, x, Sufficient(3, Zero(), keep=0.8), target=target)
    wanted = model(x).softmax(1).amax(1)
    for image in range(2):
        (found,) = a.sets[image]
        alone, without = (
            model(x[image : image + 1] * mask).softmax(1)[0, target[image]]
            for mask in (found.mask, ~found.mask)
        )
        assert found.alone == pytest.approx(alone.item(), rel=1e-12)
        assert found.without == pytest.approx(without.item(), rel=1e-12)
        assert found.alone >= 0.8 * wanted[image].item() * (1 - 1e-5)
        assert found.size == pytest.approx(float(found.mask.double().mean()))
        single = explain.attribute(
            model, x[image : image + 1], Sufficient(3, Zero(), keep=0.8), target=int(target[image])
        )
        assert torch.equal(single.sets[0][0].mask, found.mask)
        assert torch.equal(a[image].sets[0][0].mask, found.mask)


class Marks(nn.Module):
    """Says class 1 where one of two places is bright."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.stack([x[:, :, :2, :2].mean((1, 2, 3)), x[:, :, 4:, 4:].mean((1, 2, 3))])
        return torch.stack([torch.full_like(places[0], 0.5), places.amax(0)], 1)


def test_two_marks_of_which_either_is_enough_are_two_reasons_and_both_are_needed() -> None:
    x = torch.ones(1, 3, SIDE, SIDE).double()
    marks = torch.zeros(2, SIDE, SIDE, dtype=torch.bool)
    marks[0, :2, :2] = marks[1, 4:, 4:] = True
    a = explain.attribute(Marks(), x, Sufficient(3, Zero(), reasons=4))
    assert sorted(each.mask.tolist() for each in a.sets[0]) == sorted(marks.tolist())
    first, second = (a.values[0][each.mask] for each in a.sets[0])
    assert float(first.min()) > float(second.max()) > 0
    assert not a.values[0][~marks.any(0)].any()
    (needed,) = explain.attribute(Marks(), x, Necessary(3, Zero())).sets[0]
    assert torch.equal(needed.mask, marks.any(0))


def test_a_set_is_enough_with_each_of_several_baselines() -> None:
    model = network(2)
    x = photo(2, network(2))
    target = int(model(x).argmax())
    baselines = (Zero(), Noise(seed=3), OtherPhoto(photo(9)[0]))
    (found,) = explain.attribute(model, x, Sufficient(SIDE, baselines)).sets[0]
    for each in baselines:
        assert int(model(each(x, found.mask[None, None].double())).argmax()) == target


def test_what_turns_the_answer_into_another_class() -> None:
    model = network(0)
    x = photo(0, network(0))
    scores = model(torch.cat([photo(seed) for seed in range(30)])).argmax(1)
    answer = int(model(x).argmax())
    other = int((scores != answer).nonzero()[0, 0])
    becomes = int(scores[other])
    # a batch of one, as it is given to the model
    method = Necessary(3, OtherPhoto(photo(other)), becomes=becomes)
    (found,) = explain.attribute(model, x, method).sets[0]
    mixed = torch.where(found.mask, photo(other), x)
    assert int(model(mixed).argmax()) == becomes
    subsets = [
        set(each)
        for n in range(len(regions_in(found.mask, 3)))
        for each in itertools.combinations(range(9), n)
    ]
    for each in subsets:
        inside = covered(torch.ones_like(x), each, 3).bool()
        assert int(model(torch.where(inside, photo(other), x)).argmax()) != becomes


def exchanged(
    model: nn.Module, layer: str, x: Tensor, other: Tensor, places: Iterable[int], first: int = 0
) -> Tensor:
    """The scores of a photo with some places of a layer's map from another photo, by a plain hook.

    Maps are ``(1, C, h, w)``; tokens ``(1, T, C)`` have those of places from the ``first`` on.
    """
    kept: list[Tensor] = []
    module = model.get_submodule(layer)
    with torch.no_grad():
        handle = module.register_forward_hook(
            lambda module, args, output: kept.append(output.clone())
        )
        model(other)
        handle.remove()

        def exchange(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            found = output.clone()
            for place in places:
                if output.ndim == 4:
                    row, column = divmod(place, output.shape[3])
                    found[0, :, row, column] = kept[0][0, :, row, column]
                else:
                    found[0, first + place] = kept[0][0, first + place]
            return found

        handle = module.register_forward_hook(exchange)
        scores: Tensor = model(x)
        handle.remove()
    return scores[0]


def places_in(mask: Tensor, side: int) -> set[int]:
    """The places of a map, ``side`` of them across, that a mask ``(H, W)`` consists of."""
    width = len(mask) // side
    return set(mask[::width, ::width].flatten().nonzero()[:, 0].tolist())


class Halved(nn.Module):
    """A map of 3 x 3 or 6 x 6 places, which a head multiplies with each other."""

    def __init__(self, seed: int, stride: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.maps = nn.Sequential(
            nn.Conv2d(2, 5, 3, stride, padding=1), nn.Tanh(), nn.Conv2d(5, 4, 3, padding=1)
        )
        side = SIDE // stride
        self.behind = nn.Sequential(nn.SiLU(), nn.Flatten(), nn.Linear(4 * side**2, 9), nn.SiLU())
        self.head = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.behind(self.maps(x)))  # type: ignore[no-any-return]


def two_classes(
    model: nn.Module, layer: str, shape: tuple[int, ...] = (2, SIDE, SIDE)
) -> tuple[Tensor, Tensor, int]:
    """Two photos, and the class of the second one, which the first one has when all places of a
    layer are exchanged.

    The head of the model is centred first, so that it tells photos apart.
    """
    draw = torch.Generator().manual_seed(1)
    photos = torch.randn(40, *shape, dtype=torch.float64, generator=draw)
    with torch.no_grad():
        model.get_submodule("head").get_parameter("bias").sub_(model(photos).mean(0))
        answers = model(photos).argmax(1)
    x = photos[:1]
    for other, becomes in zip(photos[:, None], answers.tolist(), strict=True):
        mixed = exchanged(model, layer, x, other, range(9), first=1)
        if becomes != answers[0] and (layer == "maps" or int(mixed.argmax()) == becomes):
            return x, other, becomes
    raise AssertionError("no such photos")


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_places_of_feature_maps_are_exchanged_with_those_of_another_photo(
    seed: int, stride: int
) -> None:
    model = Halved(seed, stride).double()
    side = SIDE // stride
    x, other, becomes = two_classes(model, "maps")
    own = int(model(x).argmax())
    method = Necessary(baseline=OtherPhoto(other), becomes=becomes, of_layer=True)
    a = explain.attribute(model, x, method, layer="maps")
    (found,) = a.sets[0]
    places = places_in(found.mask, side)
    everything = range(side**2)
    assert a.layer == "maps"
    assert found.size == pytest.approx(len(places) / side**2)
    scores = exchanged(model, "maps", x, other, places)
    assert int(scores.argmax()) == becomes
    assert found.without == pytest.approx(scores.softmax(0)[own].item(), rel=1e-9)
    rest = exchanged(model, "maps", x, other, set(everything) - places)
    assert found.alone == pytest.approx(rest.softmax(0)[own].item(), rel=1e-9)
    if stride == 2:
        assert found.proof == "smallest"
        smaller = [
            each for n in range(len(places)) for each in itertools.combinations(everything, n)
        ]
    else:
        assert found.proof == "minimal"
        smaller = [tuple(places - {each}) for each in places]
    assert not any(
        int(exchanged(model, "maps", x, other, each).argmax()) == becomes for each in smaller
    )


class Convolutions(TorchDispatchMode):
    """Counts convolutions that are computed, and not replayed."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "convolution" in str(func)
        return func(*args, **(kwargs or {}))


def test_what_lies_before_the_layer_is_run_no_more_often_for_more_sets() -> None:
    model = Halved(1, 1).double()
    x, other, becomes = two_classes(model, "maps")
    counts = {}
    for across in (2, SIDE):
        with Convolutions() as convolutions:
            method = Necessary(across, OtherPhoto(other), becomes=becomes, of_layer=True)
            a = explain.attribute(model, x, method, layer="maps")
        counts[a.samples] = convolutions.count
    assert max(counts) > 10 * min(counts)
    assert len(set(counts.values())) == 1


def test_scores_that_are_no_class_keep_a_share_of_the_score() -> None:
    model = network(4)
    x = photo(4)

    blank = model(torch.zeros_like(x)).detach()

    def energy(output: Tensor) -> Tensor:
        return (output - blank).square().sum(1)

    (found,) = explain.attribute(model, x, Sufficient(3, Zero(), keep=0.5), target=energy).sets[0]
    assert energy(model(x * found.mask)).item() >= 0.5 * energy(model(x)).item() * (1 - 1e-9)


def test_the_budget_ends_the_search_with_a_set_that_is_good_and_says_so() -> None:
    model = network(5)
    x = photo(5, network(5))
    whole = explain.attribute(model, x, Sufficient(SIDE, Zero()))
    assert whole.stopped == ""
    a = explain.attribute(model, x, Sufficient(SIDE, Zero(), samples=whole.samples // 2))
    (found,) = a.sets[0]
    assert found.proof == "found"
    assert a.samples <= whole.samples // 2 + 2
    assert int(model(x * found.mask).argmax()) == int(model(x).argmax())


def test_an_interrupt_keeps_the_sets_of_earlier_images_and_leaves_later_ones_empty() -> None:
    model = network(5)
    x = torch.cat([photo(seed, model) for seed in (5, 6, 7)])
    method = Sufficient(SIDE, Zero())

    def stop(done: int, total: int) -> None:
        if done > method.samples + 40:  # in the second image
            raise KeyboardInterrupt

    alone = explain.attribute(model, x[:1], method)
    with pytest.warns(explain.ExplainWarning, match="image 2"):
        a = explain.attribute(model, x, method, progress=stop, keep_partial=True)
    assert torch.equal(a.values[:1], alone.values)
    assert [len(a.sets[image]) for image in range(3)] == [1, 1, 0]
    (found,) = a.sets[1]
    assert found.proof == "found"
    assert int(model(x[1:2] * found.mask).argmax()) == int(model(x[1:2]).argmax())
    assert a.finished.tolist() == [True, False, False]


def test_an_answer_that_nothing_turns_into_another_class_is_warned_of() -> None:
    model = network(0)
    x = photo(0, network(0))
    answer = int(model(x).argmax())
    becomes = next(
        each for each in range(3) if each not in (answer, int(model(torch.zeros_like(x)).argmax()))
    )
    with pytest.warns(
        explain.ExplainWarning, match="not the other class either with all regions absent"
    ):
        a = explain.attribute(model, x, Necessary(3, Zero(), becomes=becomes))
    assert a.sets[0] == ()


def test_a_record_has_the_sets(tmp_path: Path) -> None:
    explainer = explain.Explainer(Marks(), preprocess=to_tensor, size=SIDE)
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    explanation = explainer(picture, methods=[Sufficient(3, Zero(), reasons=2)])
    explanation.save(tmp_path)
    (record,) = tmp_path.glob("*.json")
    made = explanation["sufficient"].sets[0]
    loaded = explain.load(record).attribution.sets[0]
    assert len(made) == 2
    for one, other in zip(made, loaded, strict=True):
        assert torch.equal(one.mask, other.mask)
        assert (one.alone, one.without, one.proof) == (other.alone, other.without, other.proof)


def test_a_record_of_regions_of_a_layer_is_loaded_and_repeated(tmp_path: Path) -> None:
    model = Halved(0, 2).double()
    model.maps[0] = nn.Conv2d(3, 5, 3, 2, padding=1).double()
    draw = np.random.default_rng(0)
    pictures = [
        Image.fromarray(draw.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)) for _ in range(2)
    ]
    x, other = (to_tensor(each)[None] for each in pictures)
    with torch.no_grad():
        model.head.bias.sub_((model(x) + model(other))[0] / 2)
    becomes = int(model(other).argmax())
    explainer = explain.Explainer(
        model, preprocess=to_tensor, size=SIDE, categories=["cup", "pot", "pan"]
    )
    method = Necessary(baseline=OtherPhoto(other), becomes=becomes, of_layer=True)
    explanation = explainer(pictures[0], methods=[method], layer="maps")
    explanation.save(tmp_path)
    (file,) = tmp_path.glob("*.json")
    loaded = explain.load(file)
    (made,) = explanation["necessary"].sets[0]
    (read,) = loaded.attribution.sets[0]
    assert made.mask.any()
    assert torch.equal(made.mask, read.mask)
    assert loaded.attribution.layer == "maps"
    again = loaded.repeat(explainer, image=pictures[0])
    assert torch.equal(again["necessary"].sets[0][0].mask, made.mask)
    assert again["necessary"].sets[0][0].without == made.without
    page = explanation.to_html(tmp_path / "page.html").read_text("utf-8")
    assert (
        f"of maps keep {explainer.categories[int(model(x).argmax())]} from being "
        f"{explainer.categories[becomes]}" in page
    )


def test_a_caption_says_what_is_proved_and_what_turns_the_answer() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False)).double()
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[3.0, 0, 0, 1], [0, 2, 1, 0]]))
    x = torch.ones(1, 1, 2, 2).double()
    other = torch.tensor([[[0.0, 1], [1, 0]]]).double()
    told = {
        Sufficient(
            2, Zero()
        ): "25 % of the photo are enough for cup (0.95 alone, 0.12 without; no smaller set exists)",
        Sufficient(
            2, Zero(), samples=2
        ): "100 % of the photo are enough for cup (0.73 alone, 0.50 without; "
        "some of it may not be needed)",
        Necessary(
            2, OtherPhoto(other), becomes=1
        ): "25 % of the photo keep cup from being class 1 (0.50 alone, "
        "0.12 without; no smaller set exists)",
    }
    for method, words in told.items():
        a = explain.attribute(model, x, method, target=0)
        assert sentence(a, "cup") == f"These {words}"
        assert sentence(a, "cup", ["cup", "pot"]) == f"These {words}".replace("class 1", "pot")
