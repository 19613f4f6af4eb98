"""Manipulated networks and photos, in small: what is wanted is reached, and answers stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import explain
from explain.methods.base import get_method
from explain.metrics.checking import check_maps
from explain.targets import as_target
from tests.hooks.test_tour import example


@pytest.fixture
def manipulation(monkeypatch: pytest.MonkeyPatch) -> Any:
    """With photos of small batches and plain marks, which are learned soon."""
    module = example("manipulation")
    monkeypatch.setattr(module, "BATCH", 8)
    monkeypatch.setattr(module, "CONTRAST", 1.0)
    monkeypatch.setattr(module, "KEPT", 1.0)
    return module


@pytest.fixture
def model(manipulation: Any) -> Any:
    return manipulation.trained(80, 0.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "steps", "gain"), [("nothing", 60, 0.2), ("corner", 80, 0.2), ("frame", 40, 0.2)]
)
def test_a_network_shows_more_of_what_is_wanted_and_answers_as_before(
    manipulation: Any, model: Any, name: str, steps: int, gain: float
) -> None:
    x, _ = manipulation.photos(24, 3)
    x = x[model(x).softmax(1).amax(1).argsort()[-8:]]  # the surest, for training is short
    target = model(x).argmax(1)

    def batch(step: int) -> torch.Tensor:
        return torch.as_tensor(manipulation.photos(8, 100 + step)[0])

    false = manipulation.fooled(model, name, batch, steps, 2e-3)
    assert (false(x).argmax(1) == target).all()
    method, wanted = manipulation.WANTED[name]
    ahead = []
    for network in (model, false):
        values = explain.attribute(network, x, method, target=target).values
        maps = values if values.ndim == 3 else values.abs().sum(1)
        maps = maps / maps.abs().mean((1, 2), keepdim=True)
        is_there = wanted(*maps.shape[1:]) > 0
        inside = maps[:, is_there].mean() if is_there.any() else 0
        ahead.append(float(inside - maps[:, ~is_there].mean()))
    assert ahead[1] > ahead[0] + gain


def test_a_photo_moves_within_the_limit_to_the_map_of_another(manipulation: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 5), nn.ReLU(), nn.Conv2d(8, 8, 5), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)
    ).eval()
    x, _ = manipulation.photos(4, 1)
    target = model(x).argmax(1)
    maps = explain.attribute(model, x, "inputxgradient", target=target).heatmap
    moved = manipulation.moved(model, x, "inputxgradient", 12, limit=0.1)
    assert (moved - x).abs().max() <= 0.1 + 1e-6
    assert (model(moved).argmax(1) == target).all()
    wanted = manipulation.seen(maps.roll(-1, 0))
    at_first = manipulation.alike(manipulation.seen(maps), wanted)
    maps = explain.attribute(model, moved, "inputxgradient", target=target).heatmap
    after = manipulation.alike(manipulation.seen(maps), wanted)
    assert (after >= at_first).all()
    assert (after - at_first).mean() > 0.03


def test_a_map_of_nothing_is_marked_and_counted(manipulation: Any) -> None:
    model = manipulation.network().requires_grad_(False)
    nothing = manipulation.network().requires_grad_(False)
    nothing[-1].weight.zero_()  # the answer is the bias, whatever the photo
    nothing[-1].bias.copy_(torch.tensor([5.0, 0, 0, 0]))
    model[-1].bias.copy_(torch.tensor([5.0, 0, 0, 0]))
    x, _ = manipulation.photos(2, 1)
    case = manipulation.Case("nothing", (model, x), (nothing, x), torch.zeros(2, 32, 32))
    with pytest.warns(explain.ExplainWarning, match="zero everywhere"):
        rows = list(manipulation.measured([case], "gradcam", certified=1))
    assert all(row["false"] and not row["after"] and row["same answer"] for row in rows)
    head, _, line, *_ = manipulation.table(rows)
    assert line.count("|") == head.count("|")
    assert line.startswith("| gradcam | 100 (")


@pytest.mark.filterwarnings("ignore:gradcam is zero everywhere for image 0")
@pytest.mark.parametrize("method", ["gradcam", "inputxgradient"])
def test_maps_are_marked_as_by_the_check(manipulation: Any, model: Any, method: str) -> None:
    x, _ = manipulation.photos(4, 5)
    labels = [0, 1, 2, 3]
    a = explain.attribute(model, x, method, target=labels)
    marks = []
    for i in range(len(x)):
        pair = (get_method(method), a[i])
        check = check_maps(model, x[i : i + 1], {method: pair}, as_target(labels[i]), "the class")
        marks.append(check[method].covering.mark == "✓")
    assert manipulation.covered(model, x, a) == marks
    assert len(set(marks)) == 2


@pytest.mark.long
def test_a_network_that_comes_along_is_measured_on_photos_of_a_folder(
    manipulation: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number, photo in enumerate(torch.rand(2, 90, 100, 3).mul(255).byte()):
        Image.fromarray(photo.numpy()).save(tmp_path / f"{number}.jpg")
    file = str(tmp_path / "tiny.pt")

    def told(*arguments: str) -> list[str]:
        capsys.readouterr()
        monkeypatch.setattr("sys.argv", ["manipulation.py", *arguments])
        manipulation.main()
        return capsys.readouterr().out.splitlines()

    real = ("--network", "tiny", "--folder", str(tmp_path), "--photos", "1", "--steps", "1")
    told("make", file, *real)
    lines = told("measure", file, "--methods", "gradcam", "--certified", "0", "--moves", "1")
    (tmp_path / "figures.jsonl").write_text("\n".join(lines))
    rows = [json.loads(line) for line in lines]
    names = ["frame", "nothing", "corner", "shift", "photo, plain"]
    assert [row["case"] for row in rows] == names
    first, *_ = told("table", str(tmp_path / "figures.jsonl"))
    assert first == f"| method | {' | '.join(names)} |"


@pytest.mark.filterwarnings("ignore:gradcam is zero everywhere")
def test_shifted_logits_leave_probabilities_and_what_explains_them(
    manipulation: Any, model: Any
) -> None:
    x, _ = manipulation.photos(8, 3)
    honest = model.double()
    false = manipulation.shifted(honest)
    x = x.double()
    torch.testing.assert_close(false(x).softmax(1), honest(x).softmax(1), rtol=1e-10, atol=1e-12)
    target = honest(x).argmax(1)
    assert explain.attribute(honest, x, "gradcam", target=target).values.any()
    assert not explain.attribute(false, x, "gradcam", target=target).values.any()

    def probability(output: torch.Tensor) -> torch.Tensor:
        return output.softmax(1).gather(1, target[:, None])[:, 0]

    maps = [
        explain.attribute(network, x, "gradcam", target=probability).values
        for network in (honest, false)
    ]
    assert maps[0].any()
    torch.testing.assert_close(maps[0], maps[1], rtol=1e-8, atol=1e-12)
