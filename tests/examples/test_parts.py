"""Scenes whose parts can be removed, and the dimensions of FunnyBirds on them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.hooks.test_tour import example, scripts_of


@pytest.fixture
def script() -> Iterator[Any]:
    """Load a script of the folder by its name."""
    with scripts_of("benchmarks/parts"):
        yield lambda name: example(f"benchmarks/parts/{name}")


def test_scenes_are_the_same_each_time_and_show_their_class(script: Any) -> None:
    scenes = script("scenes")
    scene = scenes.draw(3, 7)
    assert np.array_equal(scenes.render(scene), scenes.render(scenes.draw(3, 7)))
    assert not np.array_equal(scenes.render(scene), scenes.render(scenes.draw(3, 8)))
    assert scenes.consistent(scene.parts) == [3]
    assert scene.before((1, 2)).parts == scene.parts == scenes.classes()[3]
    for one, other in itertools.combinations(scenes.classes(), 2):
        assert sum(a == b for a, b in zip(one, other, strict=True)) <= 2


def test_what_is_removed_or_exchanged_changes_pixels_of_its_masks_only(script: Any) -> None:
    scenes = script("scenes")
    nothing = np.zeros((64, 64), bool)
    for label in (0, 7, 13):
        scene = scenes.draw(label, 40 + label)
        whole = scenes.render(scene)
        seen = scenes.masks(scene)
        for name in scenes.ELEMENTS:
            changed = (scenes.render(scene.without(name)) != whole).any(-1)
            assert not (changed & ~seen.get(name, nothing)).any(), (label, name)
        assert all((scenes.render(scene.without(part)) != whole).any() for part in scenes.PARTS)
        other = scene.exchanged("tail", (scene.parts[0] + 1) % 4)
        changed = (scenes.render(other) != whole).any(-1)
        assert not (changed & ~seen["tail"] & ~scenes.masks(other)["tail"]).any()
        changed = (scenes.render(scene.before((9, 5))) != whole).any(-1)
        assert not (changed & ~seen["background"]).any()
        assert np.allclose(sum(scenes.visible(scene).values()), 1, atol=1e-4)


def test_sufficient_parts_are_those_that_no_other_class_has(script: Any) -> None:
    scenes = script("scenes")
    for label in (0, 9):
        found = scenes.sufficient(label)
        for chosen in found:
            for size, wanted in ((len(chosen), 1), (len(chosen) - 1, 2)):
                for names in itertools.combinations(chosen, size):
                    rows = [scenes.PARTS.index(name) for name in names]
                    like = [
                        c
                        for c in scenes.classes()
                        if all(c[i] == scenes.classes()[label][i] for i in rows)
                    ]
                    assert (len(like) == 1) == (wanted == 1)


def facts(scenes: Any, values: list[float], label: int = 0) -> dict[str, Any]:
    """What a network answers that adds up so much for each part of class 0, and answers it from 3
    on."""
    scores = [sum(v for i, v in enumerate(values) if kept >> i & 1) for kept in range(32)]
    answers = [label if score >= 3 else label + 1 for score in scores]
    return {
        "label": label,
        "scores": scores,
        "answers": answers,
        "objects": [scores[31]] * 3,
        "exchanged": values,
    }


def test_true_importances_are_perfect_where_they_must_be(script: Any) -> None:
    scenes = script("scenes")
    dimensions = script("dimensions")
    pages = script("pages")
    values = [0.0, 4.0, 1.0, 0.5, 2.0]
    scene = facts(scenes, values) | {"methods": {}}
    one, other = ({"parts": each, "scores": []} for each in (["tail"], ["eye", "feet"]))
    one["scores"] = [float(kept & 1) + 0.1 * kept.bit_count() for kept in range(32)]
    other["scores"] = [float(kept >> 4 & 1) + 0.1 * kept.bit_count() for kept in range(32)]
    scene["rivals"] = [one, other]
    assert np.allclose(dimensions.drops(scene["scores"]), values)
    assert np.allclose(dimensions.shapley(scene["scores"]), values)  # a sum has no interactions
    assert dimensions.irrelevant(scene["scores"], scene["objects"]) == ["tail", *scenes.OBJECTS]
    assert dimensions.expected(scene)
    found = pages.judged([scene])
    truth = found["each part removed"]
    assert truth["correctness"]["mean"] == truth["contrastivity"]["mean"] == 1
    assert truth["with Shapley"]["mean"] == found["each part exchanged"]["correctness"]["mean"] == 1
    assert truth["completeness"]["not distracted"] == truth["completeness"]["preserved"] == 1
    assert truth["completeness"]["deleted"] == 1
    wrong = pages.judged(
        [
            scene
            | {
                "methods": {
                    "w": {"sums": [-v for v in values] + [0] * 3, "positive": 1, "rivals": []}
                }
            }
        ]
    )
    assert wrong["w"]["correctness"]["mean"] == -1
    assert wrong["w"]["completeness"]["deleted"] == 0


def test_shapley_values_are_means_over_all_orders(script: Any) -> None:
    dimensions = script("dimensions")
    scores = np.random.default_rng(0).normal(size=32).tolist()
    found = np.zeros(5)
    for order in itertools.permutations(range(5)):
        kept = 0
        for part in order:
            found[part] += (scores[kept | 1 << part] - scores[kept]) / math.factorial(5)
            kept |= 1 << part
    assert np.allclose(dimensions.shapley(scores), found)


def test_the_floor_is_what_a_plain_computation_gives(script: Any) -> None:
    scenes = script("scenes")
    measure = script("measure")
    dimensions = script("dimensions")
    scene = scenes.draw(2, 5)
    seen = scenes.masks(scene)
    x = measure.as_input(scenes.render(scene)[None])
    where = measure.wider(seen)
    uniform = measure.sums(measure.blind(x, 0)["uniform"][0], where)
    distance = measure.sums(measure.blind(x, 0)["mean colour"][0], where)
    picture = (scenes.render(scene).astype(np.float64) / 255 - 0.5) / 0.25
    far = np.sqrt(((picture - picture.mean((0, 1))) ** 2).sum(-1))
    for number, name in enumerate(scenes.ELEMENTS):
        near = set()
        for row, column in zip(*np.nonzero(seen.get(name, np.zeros((64, 64)))), strict=True):
            near |= {(row + a, column + b) for a in (-1, 0, 1) for b in (-1, 0, 1)}
        inside = [(r, c) for r, c in near if 0 <= r < 64 and 0 <= c < 64]
        assert uniform[number] == len(inside)
        assert distance[number] == pytest.approx(sum(far[place] for place in inside), rel=1e-4)
    truth = [0.3, 0.3, 2.0, -1.0, 0.0]
    ranks = [
        [sum(o < v for o in each) + (each.count(v) + 1) / 2 for v in each]
        for each in (truth, uniform[:5])
    ]
    assert dimensions.rank_correlation(truth, uniform[:5]) == pytest.approx(
        np.corrcoef(*ranks)[0, 1]
    )
    assert dimensions.rank_correlation(truth, [1.0] * 5) == 0


class Reader(nn.Module):
    """Adds up a picture times weights for each class, and nothing else."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(weights[0].numel(), len(weights), bias=False)
        with torch.no_grad():
            self.fc.weight.copy_(weights.flatten(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.fc(x.flatten(1))
        return found


def test_a_line_of_the_output_has_what_interventions_and_maps_say(script: Any) -> None:
    scenes = script("scenes")
    measure = script("measure")
    train = script("train")
    scene = scenes.draw(2, 5, train.background_of_class(2))
    weights = torch.randn(16, 3, 64, 64, generator=torch.Generator().manual_seed(0)) / 100
    model = Reader(weights).eval()
    _, x = measure.pictures(scene, 1)
    record = measure.record_of("resnet", model, scene, x, ["inputxgradient"], 1)
    picture, without = (
        measure.as_input(scenes.render(each)[None])[0]
        for each in (scene, scene.without("crest", "eye"))
    )
    assert record["scores"][31] == pytest.approx(float((weights[2] * picture).sum()), abs=1e-3)
    assert record["scores"][0b01101] == pytest.approx(float((weights[2] * without).sum()), abs=1e-3)
    values = (weights[2] * picture).sum(0)
    inside = measure.wider(scenes.masks(scene))[0].bool()
    assert record["methods"]["inputxgradient"]["sums"][0] == pytest.approx(
        float(values[inside].sum()), abs=1e-3
    )
    assert len(record["methods"]["inputxgradient"]["rivals"]) == 2


def test_covering_squares_and_adding_up_maps_on_them_agree(script: Any) -> None:
    domain = script("in_domain")
    weights = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    model = Reader(weights).eval()
    contributions = (weights[1] * x[0]).sum(0)  # of a linear model, a square's drop is its sum
    plain = [
        float(contributions[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].sum())
        for i in range(4)
        for j in range(4)
    ]
    assert domain.squares(contributions) == pytest.approx(plain, abs=1e-5)
    assert domain.drops(model, x, 1) == pytest.approx(plain, abs=1e-4)
    scores = domain.score(model, x, 1, ["inputxgradient"], 0)
    assert scores["inputxgradient"] == pytest.approx(1)
    assert scores["uniform"] == 0


def test_training_and_measuring_go_on_where_they_stopped(
    script: Any, tmp_path: Path, capsys: Any
) -> None:
    train = script("train")
    measure = script("measure")
    train.main([str(tmp_path), "--models", "resnet", "--small"])
    facts = json.loads((tmp_path / "resnet.json").read_text("utf-8"))
    assert set(facts) == {"accuracy", "one part missing", "another background", "minutes"}
    arguments = [str(tmp_path), "--models", "resnet", "--seeds", "1", "--costly-from", "1"]
    output = tmp_path / "parts.jsonl"
    for count in (1, 1):
        measure.main([*arguments, "--scenes", str(count), "--costly", "0", "--output", str(output)])
        found = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
        assert [line["scene"] for line in found] == list(range(count))
    assert "one part missing" in capsys.readouterr().out
