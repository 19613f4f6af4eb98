"""Insight: where classes look, clusters of reasons and mistakes, against plain computations and
planted evidence."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import explain
from explain import OutputError, RunError
from explain.insight.class_statistics import MeanWithError, class_mean_maps
from explain.insight.clusters import (
    distances,
    grouped,
    map_clusters,
    number_of_groups,
    silhouettes,
    spectrum,
)
from explain.insight.maps import RunMaps, read_maps
from explain.insight.reattribution import RunPhotos
from explain.methods import Necessary, Sufficient
from explain.targets import ClassTarget, Difference
from tests.conftest import TinyNet, settled
from tests.runs.networks import as_it_is, explainer, picture


def blob(place: tuple[float, float], width: float, generator: torch.Generator) -> torch.Tensor:
    """A map with its evidence around a place, which is moved a little."""
    y, x = (torch.tensor(place) + 0.5 * torch.randn(2, generator=generator)).tolist()
    steps = torch.arange(16.0)
    values = torch.exp(-((steps[:, None] - y) ** 2 + (steps - x) ** 2) / (2 * width**2))
    values = values * (0.5 + torch.rand(16, 16, generator=generator))
    return values / values.sum()


def maps_of(
    places: dict[str, list[tuple[float, float]]], seed: int = 0, width: float = 2.0
) -> RunMaps:
    """Maps of some classes, whose evidence lies around given places."""
    generator = torch.Generator().manual_seed(seed)
    targets = [target for target, each in places.items() for _ in each]
    values = torch.stack(
        [blob(place, width, generator) for each in places.values() for place in each]
    )
    unknown = torch.full((len(values),), float("nan"))
    names = tuple(f"{target} {number}" for number, target in enumerate(targets))
    return RunMaps("gradcam", names, tuple(targets), values, unknown, unknown, unknown)


def random_places(count: int, seed: int) -> list[tuple[float, float]]:
    drawn = 3 + 8 * torch.rand(count, 2, generator=torch.Generator().manual_seed(seed))
    return [(float(y), float(x)) for y, x in drawn]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> explain.Run:
    """Twelve photos with boxes, two of which are the same, explained by a small network."""
    folder = tmp_path_factory.mktemp("insight")
    rows = []
    for number in range(12):
        picture(number % 11).save(folder / f"{number:02}.png")
        rows.append(
            {
                "path": f"{number:02}.png",
                "label": number % 5,
                "boxes": [[2, 3, 14 + number % 5, 17]],
            }
        )
    (folder / "list.json").write_text(json.dumps(rows))
    return explain.run(
        folder / "list.json",
        explainer(categories=list("abcde")),
        ["gradcam", "inputxgradient"],
        output=folder / "run.sqlite",
        metrics=["energypointinggame"],
        workers=0,
    )


@pytest.mark.parametrize("method", ["gradcam", "inputxgradient"])
def test_shares_on_the_object_are_those_of_the_metric(run: explain.Run, method: str) -> None:
    maps = read_maps(run, method)
    metric = {row.name: row.metrics["energypointinggame"] for row in run.rows(method)}
    boxes = {row.name: row.boxes[0] for row in run.rows(method)}
    assert len(maps) == 11 - maps.empty
    assert maps.repeated == 1
    torch.testing.assert_close(maps.values.sum((1, 2)), torch.ones(len(maps)))
    for name, share, size in zip(
        maps.names, maps.on_object.tolist(), maps.object_size.tolist(), strict=True
    ):
        x0, y0, x1, y1 = boxes[name]
        assert size == pytest.approx((x1 - x0) * (y1 - y0) / (24 * 20))
        # of signed maps, the metric has the positive values, and a heatmap their sizes
        if method == "gradcam":
            assert share == pytest.approx(metric[name], rel=2e-3)


def test_the_figures_of_a_class_are_those_of_its_maps() -> None:
    maps = maps_of({"a": random_places(6, 1), "b": random_places(7, 2), "c": random_places(2, 3)})
    found = {look.target: look for look in class_mean_maps(maps)}
    assert set(found) == {"a", "b"}  # there are too few of c
    rows = [number for number, target in enumerate(maps.targets) if target == "b"]
    own = [maps.values[number] for number in rows]
    assert found["b"].photos == 7
    torch.testing.assert_close(found["b"].mean, torch.stack(own).mean(0))
    torch.testing.assert_close(found["b"].spread, torch.stack(own).std(0))
    border = [
        float(
            sum(
                one[y, x] for y in range(16) for x in range(16) if not (2 <= y < 14 and 2 <= x < 14)
            )
        )
        for one in own
    ]
    assert found["b"].at_border.value == pytest.approx(sum(border) / 7, rel=1e-5)
    entropy = [-float((one * one.log()).sum()) / math.log(256) for one in own]
    assert found["b"].entropy.value == pytest.approx(sum(entropy) / 7, rel=1e-5)
    assert found["b"].entropy.error == pytest.approx(
        torch.tensor(entropy).std().item() / math.sqrt(7), rel=1e-4
    )
    assert math.isnan(found["b"].on_object.value)


def test_an_even_map_has_known_figures() -> None:
    maps = maps_of({"a": random_places(5, 1)})
    even = torch.full((5, 16, 16), 1 / 256)
    object.__setattr__(maps, "values", even)
    (look,) = class_mean_maps(maps)
    assert (look.at_border.value, look.entropy.value, look.apart) == pytest.approx(
        (7 / 16, 1, 0), abs=1e-6
    )
    assert look.spread.abs().max() < 1e-8


@pytest.mark.parametrize("seed", range(3))
def test_the_class_that_looks_elsewhere_comes_first(seed: int) -> None:
    places = {name: random_places(20, 10 * seed + number) for number, name in enumerate("abcdef")}
    places["d"] = [(14.0, 14.0)] * 20
    found = class_mean_maps(maps_of(places, seed))
    assert found[0].target == "d"
    assert found[0].apart > 3 * found[1].apart


def test_the_class_with_the_least_on_its_object_comes_first_unless_by_chance() -> None:
    maps = maps_of({name: random_places(8, number) for number, name in enumerate("abc")})
    # of c the least, but by chance
    on_object = torch.tensor([0.6, 0.7] * 4 + [0.3, 0.4] * 4 + [0.0, 0.6] * 4)
    object.__setattr__(maps, "on_object", on_object)
    object.__setattr__(maps, "object_size", torch.full((24,), 0.5))
    found = class_mean_maps(maps)
    assert found[0].target == "b"
    assert found[0].excess.value == pytest.approx((0.35 - 0.5) / (1 - 0.5))
    assert found[0].striking > 0 > found[1].striking


def test_photos_that_the_object_fills_say_nothing_of_where_a_class_looks() -> None:
    maps = maps_of({name: random_places(6, number) for number, name in enumerate("ab")})
    object.__setattr__(maps, "on_object", torch.tensor([0.97] * 6 + [0.6] * 6))
    object.__setattr__(maps, "object_size", torch.tensor([0.97] * 6 + [0.5] * 6))
    first, second = class_mean_maps(maps)
    assert (first.target, second.target) == ("b", "a")
    assert first.excess.value == pytest.approx(0.2)
    assert math.isnan(second.excess.value)
    assert second.on_object.value == pytest.approx(0.97)


def test_a_mean_leaves_out_what_is_not_known() -> None:
    found = MeanWithError.of(torch.tensor([float("nan"), 2.0]))
    assert found.value == 2
    assert math.isnan(found.error)
    assert found.to_dict() == {"mean": 2.0, "error": None}


def test_distances_are_those_of_hellinger() -> None:
    maps = torch.rand(4, 3, 3, generator=torch.Generator().manual_seed(0))
    maps = maps / maps.sum((1, 2), keepdim=True)
    found = distances(maps)
    for i in range(4):
        for j in range(4):
            expected = (maps[i].sqrt() - maps[j].sqrt()).square().sum().div(2).sqrt()
            assert found[i, j].item() == pytest.approx(expected.item(), abs=1e-3)


def test_a_graph_in_k_parts_has_k_eigenvalues_of_zero_and_a_gap_behind_them() -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.cat(
        [torch.randn(15, 2, generator=generator, dtype=torch.float64) + 50 * k for k in range(3)]
    )
    values, vectors = spectrum(torch.cdist(points, points), 6)
    assert (values < 1e-9).tolist() == [True] * 3 + [False] * 4
    assert number_of_groups(values) == (3, pytest.approx(float(values[3]) / 1e-3 + 1))
    groups = grouped(vectors, 3)
    assert [len(set(groups[15 * k : 15 * k + 15].tolist())) for k in range(3)] == [1, 1, 1]
    assert len(set(groups.tolist())) == 3


def test_silhouettes_are_those_of_the_definition() -> None:
    points = torch.randn(9, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    apart = torch.cdist(points, points)
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 0])
    expected = []
    for i in range(9):
        means = {
            k: [apart[i, j].item() for j in range(9) if groups[j] == k and j != i] for k in range(3)
        }
        own = means.pop(int(groups[i]))
        near = min(sum(each) / len(each) for each in means.values())
        inside = sum(own) / len(own) if own else 0
        expected.append((near - inside) / max(near, inside) if own else 0.0)
    torch.testing.assert_close(
        silhouettes(apart, groups), torch.tensor(expected, dtype=torch.float64)
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_shortcut_comes_out_first_without_being_told(seed: int) -> None:
    """A quarter of the photos of one class are told by a mark in a corner."""
    places = {name: random_places(40, 10 * seed + number) for number, name in enumerate("abcde")}
    places["c"][:10] = [(13.5, 2.0)] * 10
    found = map_clusters(maps_of(places, seed, width=1.5), seed=seed)
    first = found[0]
    assert first.target == "c"
    assert sorted(first.rows.tolist()) == list(range(80, 90))
    assert first.share == 0.25
    assert set(first.photos) <= {f"c {number}" for number in range(80, 90)}
    assert first.stands_out > 0.5
    assert all(cluster.stands_out < first.stands_out for cluster in found[1:])


def test_groups_that_show_the_same_places_have_no_reason_of_their_own() -> None:
    """Two tight groups whose mean maps are nearly equal stand out by their silhouettes; and the
    same far apart."""
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    noise = 0.001 * torch.rand(40, 16, 16, generator=torch.Generator().manual_seed(0))
    for shift, expected in ((0.5, 0), (6.0, 2)):
        centres = torch.tensor([5.0, 5.0 + shift]).repeat_interleave(20)[:, None, None]
        values = torch.exp(-((rows - centres) ** 2 + (columns - 6) ** 2) / 8) + noise
        values = values / values.sum((1, 2), keepdim=True)
        maps = replace(maps_of({"a": [(5.0, 5.0)] * 40}), values=values)
        assert silhouettes(distances(values), torch.arange(40) // 20).mean() > 0.5
        assert len(map_clusters(maps)) == expected


def test_coarse_maps_are_said(run: explain.Run) -> None:
    insight = run.insight()
    shapes = {tuple(row.values.shape[-2:]) for row in run.rows(insight.method)}
    assert insight.maps.resolution == min(shapes, key=min)
    for resolution, is_coarse in (((2, 2), True), ((5, 9), True), ((6, 6), False)):
        headlines = replace(insight, maps=replace(insight.maps, resolution=resolution)).headlines
        assert any("explain layers" in line for line in headlines) == is_coarse


def test_mistakes_are_counted_and_the_difference_says_what_spoke_for_either(
    run: explain.Run,
) -> None:
    rows = {row.name: row for row in run.rows("gradcam")}
    wrong = [(row.label, row.prediction) for row in rows.values() if row.label != row.prediction]
    assert wrong
    made = explainer(categories=list("abcde"))
    found = run.insight(explainer=made)
    assert {(pair.label, pair.prediction): pair.count for pair in found.pairs} == {
        pair: wrong.count(pair) for pair in wrong
    }
    assert [pair.count for pair in found.pairs] == sorted(
        (pair.count for pair in found.pairs), reverse=True
    )
    first = found.pairs[0]
    assert first.of == sum(row.label == first.label for row in rows.values())
    assert [each.row.name for each in first.spoken] == list(first.photos)
    one = first.spoken[0]
    x = as_it_is(explain.data.images.load_image(one.row.path))[None]
    classes = ClassTarget(first.prediction_class), ClassTarget(first.label_class)
    for these, seen in ((classes, one.wrong), (classes[::-1], one.right)):
        expected = explain.attribute(made.model, x, "gradcam", target=Difference(*these))
        torch.testing.assert_close(seen, expected.heatmap[0])
    logits = made.model(x)[0].detach()
    assert one.lead == pytest.approx(
        float(logits[first.prediction_class] - logits[first.label_class]), rel=1e-4
    )
    assert one.lead > 0


def test_photos_whose_smallest_evidence_is_off_the_object_are_listed(tmp_path: Path) -> None:
    """A model that looks at the upper left quarter, on photos with the object there, elsewhere, and
    of nothing."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 20 * 24, 2))
    with torch.no_grad():
        quarter = torch.zeros(3, 20, 24)
        quarter[:, :10, :12] = 1
        model[1].weight[:] = torch.stack([quarter.flatten(), torch.zeros(quarter.numel())])
        model[1].bias[:] = torch.tensor([0.0, 20.0])
    rows = []
    for name, box in (
        ("on", [0, 0, 12, 10]),
        ("off", [12, 10, 24, 20]),
        ("unknown", None),
        ("black", None),
    ):
        (picture(1) if name != "black" else Image.new("RGB", (24, 20))).save(
            tmp_path / f"{name}.png"
        )
        rows.append({"path": f"{name}.png", **({} if box is None else {"boxes": [box]})})
    picture(2).save(tmp_path / "on.png")
    (tmp_path / "list.json").write_text(json.dumps(rows))
    methods = [Sufficient(4, "zero"), Necessary(4, "zero")]  # type: ignore[arg-type]
    made = explainer(model, categories=["left", "blank"])
    run = explain.run(
        tmp_path / "list.json", made, methods, output=tmp_path / "run.sqlite", workers=0
    )
    for row in run.rows():
        if row.name == "black.png":
            continue
        x = as_it_is(Image.open(row.path))[None]  # type: ignore[arg-type]
        (one,) = explain.attribute(model, x, methods[row.method == "necessary"]).sets[0]
        figures = {"set_size": one.size, "set_alone": one.alone, "set_without": one.without}
        assert row.metrics == pytest.approx(figures, rel=1e-5)
    found = run.insight()
    assert [(each.photo, each.finding, each.on_object) for each in found.evidence[:2]] == [
        ("off.png", "enough is off the object", 0),
        ("off.png", "needs nothing of the object", 0),
    ]
    (black,) = found.evidence[2:]
    assert (black.photo, black.target, black.finding) == (
        "black.png",
        "blank",
        "needs nothing of the photo",
    )
    assert found.to_dict()["evidence"][0]["size"] == pytest.approx(found.evidence[0].size, abs=1e-6)
    assert "Evidence off the object" in str(found)


def test_another_model_than_that_of_the_run_is_refused(run: explain.Run) -> None:
    with pytest.raises(RunError, match="explainer must"):
        RunPhotos(run, explainer(settled(TinyNet(), seed=1).eval()))


def test_insight_is_plain_values_and_tables(run: explain.Run, tmp_path: Path) -> None:
    found = explain.open_run(run.path).insight()
    document: Any = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert document["maps"] == len(found.maps)
    assert [each["target"] for each in document["looks"]] == [look.target for look in found.looks]
    lines = str(found).splitlines()
    assert lines[0].endswith(
        f"{len(found.maps)} maps of gradcam; left out: 1 of photos that were there twice"
    )
    assert [line for line in lines if line and not line.startswith(" ")][1:] == [
        "Where each class looks",
        "Clusters of reasons",
        "Mistakes",
    ]
    assert "  no class has enough photos" in lines
    with pytest.raises(RunError, match="did you mean"):
        run.insight("gradcan")


def test_what_stands_out_is_said_first_and_what_does_not_is_said_to(run: explain.Run) -> None:
    found = run.insight()
    places = {name: random_places(40, number) for number, name in enumerate("abc")}
    maps = maps_of(places, width=1.5)
    weak = [replace(each, stands_out=0.6 * each.stands_out) for each in map_clusters(maps)]
    plain = replace(found, maps=maps, looks=class_mean_maps(maps), reasons=weak, pairs=[])
    (elsewhere, nothing) = plain.headlines
    first = plain.looks[0]
    assert elsewhere == (
        f"The maps of {first.target} differ most from those of the other classes: their mean maps "
        "are apart by "
        f"{first.apart:.2f}."
    )
    assert nothing == (
        f"No cluster of reasons stands out: by {plain.reasons[0].stands_out:.2f} at most, where "
        "0.5 is worth a look."
    )
    places["c"][:10] = [(13.5, 2.0)] * 10
    maps = maps_of(places, width=1.5)
    # four photos are too few for a sentence
    few, many = (replace(found.pairs[0], of=count) for count in (4, 5))
    marked = replace(found, maps=maps, looks=[], reasons=map_clusters(maps), pairs=[few, many])
    assert marked.headlines[0].startswith(
        "10 photos of c have a reason of their own (25% of the class): they stand"
    )
    assert marked.headlines[1] == (
        f"{many.label} is taken for {many.prediction} most often: {many.count} of 5 photos."
    )
    object.__setattr__(
        maps, "on_object", torch.tensor([0.6, 0.7] * 20 + [0.2, 0.3] * 20 + [0.6] * 40)
    )
    object.__setattr__(maps, "object_size", torch.full((120,), 0.5))
    away = replace(found, maps=maps, looks=class_mean_maps(maps), reasons=[], pairs=[])
    assert away.headlines == [
        "The maps of b are on the object least, relative to its size: 25% of the evidence is on "
        "it, and it covers "
        "50% of the photo."
    ]
    assert away.lines()[1] == f"  {away.headlines[0]}"


def test_pictures_without_photos_read_none(
    run: explain.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a photo was read")

    monkeypatch.setattr("explain.store.reading.load_image", refuse)
    found = run.insight()
    assert list(found.pictures(photos=False)) == ["looks"]
    with pytest.raises(AssertionError, match="a photo was read"):
        found.pictures()


def test_pictures_and_a_page_are_written(run: explain.Run, tmp_path: Path) -> None:
    found = run.insight(explainer=explainer(categories=list("abcde")))
    written = found.save(tmp_path / "out")
    assert [path.name for path in written] == [
        "looks.png",
        "mistakes.png",
        "insight.json",
        "insight.html",
    ]
    assert json.loads((tmp_path / "out/insight.json").read_text()) == json.loads(
        json.dumps(found.to_dict())
    )
    page = (tmp_path / "out/insight.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "<script" not in page
    assert f"<td>{found.pairs[0].label}</td><td>{found.pairs[0].prediction}</td>" in page
    with pytest.raises(OutputError, match="exist"):
        found.save(tmp_path / "out")
