"""Insight: where classes look, clusters of reasons and mistakes, against plain computations and
planted evidence."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import explain
from explain import OutputError, RunError
from explain.insight.class_statistics import class_mean_maps
from explain.insight.clusters import (
    cluster_numbers,
    distances,
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
from tests.runs.networks import as_it_is, explainer, picture, stored_run


def maps_of(places: dict[str, torch.Tensor], seed: int = 0) -> RunMaps:
    """Maps of some classes, with their evidence around places ``(n, 2)``, which are moved a
    little."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.cat([*places.values()])
    centres = centres + 0.5 * torch.randn(centres.shape, generator=generator)
    pixels = torch.cartesian_prod(torch.arange(16.0), torch.arange(16.0))
    values = torch.exp(-(torch.cdist(centres, pixels) ** 2) / 4.5)
    values = values * (0.5 + torch.rand(values.shape, generator=generator))
    values = (values / values.sum(1, keepdim=True)).reshape(-1, 16, 16)
    targets = [target for target, of_class in places.items() for _ in of_class]
    names = [f"{target} {number}" for number, target in enumerate(targets)]
    unknown = torch.full((len(values),), float("nan"))
    findings = ("",) * len(names)
    return RunMaps(
        "gradcam", tuple(names), tuple(targets), values, unknown, unknown, unknown, findings
    )


def random_places(count: int, seed: int) -> torch.Tensor:
    return 3 + 8 * torch.rand(count, 2, generator=torch.Generator().manual_seed(seed))


def with_shortcut(seed: int = 0) -> RunMaps:
    """40 maps of each of five classes, of which the first ten of "c" lie in a corner."""
    places = {name: random_places(40, 10 * seed + number) for number, name in enumerate("abcde")}
    places["c"][:10] = torch.tensor([13.5, 2.0])
    return maps_of(places, seed)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> explain.Run:
    """Twelve photos with boxes, two of which are the same, explained by a small network."""
    folder = tmp_path_factory.mktemp("insight")
    lines = ["path,label,x0,y0,x1,y1"]
    for number in range(12):
        picture(number % 11).save(folder / f"{number:02}.png")
        lines.append(f"{number:02}.png,{number % 5},2,3,{14 + number % 5},17")
    (folder / "list.csv").write_text("\n".join(lines))
    network = explainer(categories=list("abcde"))
    return stored_run(folder, folder / "list.csv", network, metrics=["energypointinggame"])


def test_shares_on_the_object_are_those_of_the_metric(run: explain.Run) -> None:
    maps = read_maps(run, "gradcam")
    rows = {row.name: row for row in run.rows("gradcam")}
    assert (len(maps), maps.repeated) == (11 - maps.empty, 1)
    for number, name in enumerate(maps.names):
        x0, y0, x1, y1 = rows[name].boxes[0]
        assert maps.object_size[number].item() == pytest.approx((x1 - x0) * (y1 - y0) / (24 * 20))
        share = rows[name].metrics["energypointinggame"]
        assert maps.on_object[number].item() == pytest.approx(share, rel=2e-3)


def test_the_figures_of_a_class_are_those_of_its_maps() -> None:
    maps = maps_of({"a": random_places(6, 1), "b": random_places(7, 2), "c": random_places(2, 3)})
    statistics = {look.target: look for look in class_mean_maps(maps)}
    assert set(statistics) == {"a", "b"}  # there are too few of c
    values = maps.values[6:13]
    of_class = statistics["b"]
    torch.testing.assert_close(of_class.mean, values.mean(0))
    torch.testing.assert_close(of_class.spread, values.std(0))
    middle = values[:, 2:14, 2:14].sum().item() / 7
    assert of_class.at_border.value == pytest.approx(1 - middle, rel=1e-5)
    entropy = -(values * values.log()).sum((1, 2)) / math.log(256)
    assert of_class.entropy.value == pytest.approx(entropy.mean().item(), rel=1e-5)
    assert of_class.entropy.error == pytest.approx(entropy.std().item() / math.sqrt(7), rel=1e-4)


def test_the_class_with_the_least_on_its_object_comes_first_unless_by_chance() -> None:
    maps = maps_of({name: random_places(8, number) for number, name in enumerate("abcd")})
    # of c the least, but by chance; and the object fills the photos of d
    on_object = torch.tensor([0.6, 0.7] * 4 + [0.3, 0.4] * 4 + [0.0, 0.6] * 4 + [0.97] * 8)
    size = torch.tensor([0.5] * 24 + [0.97] * 8)
    looks = class_mean_maps(replace(maps, on_object=on_object, object_size=size))
    assert [looks[0].target, looks[-1].target] == ["b", "d"]
    assert looks[0].excess.value == pytest.approx((0.35 - 0.5) / (1 - 0.5))
    assert looks[0].striking > 0 > looks[1].striking
    assert math.isnan(looks[-1].excess.value)


def test_distances_are_those_of_hellinger_and_silhouettes_those_of_the_definition() -> None:
    values = torch.rand(9, 3, 3, generator=torch.Generator().manual_seed(0))
    values = values / values.sum((1, 2), keepdim=True)
    apart = distances(values)
    roots = values.double().sqrt().flatten(1)
    expected = (roots[:, None] - roots).square().sum(2).div(2).sqrt()
    torch.testing.assert_close(apart.double(), expected, rtol=0, atol=1e-3)
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 0])
    for row, fit in enumerate(silhouettes(apart, groups).tolist()):
        rest = torch.arange(9) != row
        means = [apart[row, rest & (groups == group)].mean().item() for group in range(3)]
        within = means.pop(int(groups[row]))
        nearest = min(means)
        alone = math.isnan(within)
        assert fit == pytest.approx(0 if alone else (nearest - within) / max(nearest, within))


def test_a_graph_in_k_parts_has_k_eigenvalues_of_zero_and_a_gap_behind_them() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = torch.arange(3).repeat_interleave(15)
    points = torch.randn(45, 2, generator=generator, dtype=torch.float64) + 50 * parts[:, None]
    values, vectors = spectrum(torch.cdist(points, points), 6)
    assert (values < 1e-9).tolist() == [True] * 3 + [False] * 4
    assert number_of_groups(values) == (3, pytest.approx(float(values[3]) / 1e-3 + 1))
    groups = cluster_numbers(vectors, 3)
    assert torch.equal(groups[:, None] == groups, parts[:, None] == parts)


def test_mistakes_are_counted_and_the_difference_says_what_spoke_for_either(
    run: explain.Run, tmp_path: Path
) -> None:
    rows = [*run.rows("gradcam")]
    wrong = Counter((row.label, row.prediction) for row in rows if row.label != row.prediction)
    network = explainer(categories=list("abcde"))
    insight = run.insight(explainer=network)
    assert {(pair.label, pair.prediction): pair.count for pair in insight.pairs} == wrong
    first = insight.pairs[0]
    assert first.count == max(wrong.values())
    assert first.of == sum(row.label == first.label for row in rows)
    evidence = first.spoken[0]
    x = as_it_is(Image.open(evidence.row.path))[None]  # type: ignore[arg-type]
    prediction = ClassTarget(first.prediction_class)
    label = ClassTarget(first.label_class)
    lead = Difference(prediction, label)
    for_wrong = explain.attribute(network.model, x, "gradcam", target=lead)
    torch.testing.assert_close(evidence.wrong, for_wrong.heatmap[0])
    assert evidence.lead == pytest.approx(for_wrong.score.item(), rel=1e-4)
    for_right = explain.attribute(network.model, x, "gradcam", target=Difference(label, prediction))
    torch.testing.assert_close(evidence.right, for_right.heatmap[0])
    names = ["looks.png", "mistakes.png", "insight.json", "insight.html"]
    assert [path.name for path in insight.save(tmp_path)] == names
    document = json.loads((tmp_path / "insight.json").read_text())
    assert document == json.loads(json.dumps(insight.to_dict()))
    with pytest.raises(OutputError, match="exist"):
        insight.save(tmp_path)


def test_photos_whose_smallest_evidence_is_off_the_object_are_listed(tmp_path: Path) -> None:
    """A model that looks at the upper left quarter, on photos with the object there, elsewhere, and
    of nothing."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 20 * 24, 2))
    quarter = torch.zeros(3, 20, 24)
    quarter[:, :10, :12] = 1
    model[1].weight.data = torch.stack([quarter, quarter * 0]).flatten(1)
    model[1].bias.data = torch.tensor([0.0, 20.0])
    dark = Image.new("RGB", (24, 20))
    dark.paste("gray", (20, 16, 24, 20))  # where the model does not look
    lines = ["path,x0,y0,x1,y1", "on.png,0,0,12,10", "off.png,12,10,24,20", "dark.png,,,,"]
    (tmp_path / "list.csv").write_text("\n".join(lines))
    for name, image in {"on": picture(2), "off": picture(1), "dark": dark}.items():
        image.save(tmp_path / f"{name}.png")
    methods = [Sufficient(4, "zero"), Necessary(4, "zero")]  # type: ignore[arg-type]
    network = explainer(model, categories=["left", "blank"])
    insight = stored_run(tmp_path, tmp_path / "list.csv", network, methods).insight()
    assert [(odd.photo, odd.finding, odd.on_object == 0) for odd in insight.evidence] == [
        ("off.png", "enough is off the object", True),
        ("off.png", "needs nothing of the object", True),
        ("dark.png", "needs nothing of the photo", False),
    ]
    assert "Evidence off the object" in str(insight)


def test_insight_is_plain_values_and_tables(run: explain.Run) -> None:
    insight = explain.open_run(run.path).insight()
    document = json.loads(json.dumps(insight.to_dict(), allow_nan=False))
    assert document["maps"] == len(insight.maps)
    first, *_ = str(insight).splitlines()
    assert first.endswith("maps of gradcam; left out: 1 of photos that were there twice")
    assert list(insight.pictures(photos=False)) == ["looks"]
    with pytest.raises(RunError, match="did you mean"):
        run.insight("gradcan")


def test_photos_are_looked_at_with_the_explainer_of_their_run(run: explain.Run) -> None:
    options: Any = {"preprocess": lambda photo: as_it_is(photo) + 0.1, "categories": [*"abcde"]}
    brighter = explain.Explainer(settled(TinyNet()).eval(), **options)
    other_model = explainer(settled(TinyNet(), seed=1).eval())
    for other, message in ((other_model, "explainer must"), (brighter, "preprocess")):
        with pytest.raises(RunError, match=message):
            RunPhotos(run, other)


def test_what_stands_out_is_said_first_and_what_does_not_is_said_to(run: explain.Run) -> None:
    insight = run.insight()
    maps = with_shortcut()
    clusters = map_clusters(maps)
    looks = class_mean_maps(maps)
    on_object = torch.tensor([0.6, 0.7] * 20 + [0.2, 0.3] * 20 + [0.6] * 120)
    boxed = replace(maps, on_object=on_object, object_size=torch.full((200,), 0.5))
    weak = [replace(cluster, stands_out=0.4) for cluster in clusters]
    frequent = [replace(insight.pairs[0], of=count) for count in (4, 5)]  # four are too few
    fine = replace(insight, maps=replace(insight.maps, resolution=(6, 6)), looks=[], pairs=[])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"looks": looks}, f"The maps of {looks[0].target} differ most"),
        ({"reasons": weak}, "No cluster of reasons stands out: by 0.40 at most"),
        ({"reasons": clusters}, "10 photos of c have a reason of their own (25 % of the class)"),
        ({"looks": class_mean_maps(boxed)}, "The maps of b are on the object least"),
        ({"pairs": frequent}, " of 5 photos."),
        ({"maps": replace(insight.maps, resolution=(5, 9))}, "5 × 9"),
    ]
    for changed, words in cases:
        assert words in replace(fine, **changed).headlines[0]
