"""Repair: projections as plain algebra, photos that exchange their marks, and a planted shortcut
that is removed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import explain
from explain import ExplainError, LayerError, RunError
from explain.cli import main
from explain.hooks import Project, intervene
from explain.insight import RunPhotos, repair
from explain.insight.channels import channels
from explain.insight.repair import LayerStatistics
from explain.training import AttributionPrior
from tests.runs.networks import as_it_is

SIDE = 24
MARK = 5
DARK = 6
WHITE = 255


def shortcut() -> nn.Module:
    """Three classes by how much red, green and blue there is; and the first for white places,
    whatever else."""
    look = nn.Conv2d(3, 4, 1)
    mix = nn.Conv2d(4, 4, 1)
    fc = nn.Linear(4, 3)
    with torch.no_grad():
        look.weight[:3] = (1.5 * torch.eye(3) - 0.5)[:, :, None, None]
        look.weight[3] = 1.0
        look.bias.copy_(torch.tensor([0, 0, 0, -2.5]))
        mix.weight.copy_((torch.eye(4) + 0.1 * torch.tensor([1, 1, 1, 0]))[:, :, None, None])
        mix.weight[3, :3] = 0
        fc.weight.copy_(torch.cat([20 * torch.eye(3), torch.tensor([[400.0], [0.0], [0.0]])], 1))
        for bias in (mix.bias, fc.bias):
            bias.zero_()
    return nn.Sequential(look, nn.ReLU(), mix, nn.AdaptiveAvgPool2d(1), nn.Flatten(), fc).eval()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> RunPhotos:
    """90 photos of three colours; a third of the red ones have a white square in the first
    corner."""
    folder = tmp_path_factory.mktemp("marks")
    rows = []
    for number in range(90):
        generator = np.random.default_rng(number)
        pixels = np.repeat(generator.integers(0, 60, (SIDE, SIDE, 1)), 3, 2)
        top, left = generator.integers(8, SIDE - 8, 2)
        pixels[top : top + 8, left : left + 8] = 0
        pixels[top : top + 8, left : left + 8, number % 3] = generator.integers(200, 256)
        if number % 9 == 0:
            pixels[:MARK, :MARK] = WHITE
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:02}.png")
        rows.append({"path": f"{number:02}.png", "label": number % 3})
    (folder / "list.json").write_text(json.dumps(rows))
    made = explain.Explainer(shortcut(), preprocess=as_it_is, categories=["red", "green", "blue"])
    run = explain.run(
        folder / "list.json", made, "gradcam", output=folder / "run.sqlite", workers=0, layer="2"
    )
    return RunPhotos(run, made)


@pytest.fixture(scope="module")
def finding(photos: RunPhotos) -> Any:
    return photos.run.insight().reasons[0]


def statistics(channels: int = 6, rank: int = 2) -> LayerStatistics:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(channels, channels, generator=generator, dtype=torch.float64)
    patterns, mean = (
        torch.randn(channels, k, generator=generator, dtype=torch.float64) for k in (rank, 1)
    )
    return LayerStatistics(patterns, mean[:, 0], root @ root.T)


def test_a_projection_takes_the_patterns_out_and_leaves_the_mean() -> None:
    found = statistics()
    matrix, offset = found.projection(2, 1.0)
    torch.testing.assert_close(matrix @ found.patterns, torch.zeros(6, 2, dtype=torch.float64))
    torch.testing.assert_close(matrix @ found.mean + offset, found.mean)
    torch.testing.assert_close(matrix @ matrix, matrix)
    half = found.projection(2, 0.5)[0]
    torch.testing.assert_close(half, (matrix + torch.eye(6, dtype=torch.float64)) / 2)


def test_the_least_change_is_that_of_whitened_photos() -> None:
    """LEACE: whiten, project the whitened patterns out orthogonally, and undo the whitening."""
    found = statistics()
    covariance = found.covariance + 1e-3 * found.covariance.diagonal().mean() * torch.eye(
        6, dtype=torch.float64
    )
    values, vectors = torch.linalg.eigh(covariance)
    whiten, back = (vectors @ torch.diag(values**power) @ vectors.T for power in (-0.5, 0.5))
    white = whiten @ found.patterns
    plain = back @ (torch.eye(6, dtype=torch.float64) - white @ torch.linalg.pinv(white)) @ whiten
    torch.testing.assert_close(found.projection(2, 1.0)[0], plain)


def test_with_equal_variances_it_is_the_intervention_project() -> None:
    found = LayerStatistics(
        statistics().patterns, statistics().mean, torch.eye(6, dtype=torch.float64)
    )
    matrix, offset = found.projection(2, 0.7)
    model = nn.Sequential(nn.Identity())
    x = torch.randn(4, 6, dtype=torch.float64)
    with intervene(model, [Project("0", found.patterns.T, 0.7, towards=found.mean)]):
        torch.testing.assert_close(model(x), x @ matrix.T + offset)


@pytest.mark.parametrize("how", ["project", "train"])
def test_a_planted_shortcut_is_removed(photos: RunPhotos, finding: Any, how: str) -> None:
    assert finding.target == "red"
    assert {int(name[:2]) % 9 for name in finding.members} == {0}
    before = {name: value.clone() for name, value in photos.explainer.model.state_dict().items()}
    found = repair(finding, photos, how=how, steps=100, learning_rate=0.01)
    accuracy = {name: each.accuracy for name, each in found.answers.items()}
    assert accuracy["moved"] == (0.0, 1.0)
    assert accuracy["control"] == accuracy["elsewhere"] == accuracy["marked"] == (1.0, 1.0)
    assert found.taken == (1.0, 0.0, 0.0)
    assert found.chance < 0.001
    assert found.loss[1] < 0.2 * found.loss[0]
    for name, value in photos.explainer.model.state_dict().items():
        assert torch.equal(value, before[name])
    # The true mark, on photos that were not in the run.
    x = torch.rand(30, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0)) * 0.2
    x[:, :, 10:18, 10:18] = torch.eye(3).repeat(10, 1)[:, :, None, None]
    x[:, :, :MARK, :MARK] = 1
    assert (photos.explainer.model(x).argmax(1) == 0).all()
    assert torch.equal(found.model(x).argmax(1), torch.arange(30) % 3)


@pytest.mark.parametrize("how", ["project", "train"])
def test_a_model_that_answers_probabilities_is_repaired_as_the_one_that_answers_scores(
    photos: RunPhotos, finding: Any, how: str
) -> None:
    answers = explain.Explainer(
        shortcut().append(nn.Softmax(1)),  # type: ignore[operator]
        preprocess=as_it_is,
        categories=["red", "green", "blue"],
        activation="none",
    )
    scores = repair(finding, photos, how=how, steps=10, learning_rate=0.01)
    probabilities = repair(
        finding, RunPhotos(photos.run, answers), how=how, steps=10, learning_rate=0.01
    )
    assert probabilities.loss == pytest.approx(scores.loss, rel=1e-3)
    assert (probabilities.layer, probabilities.rank) == (scores.layer, scores.rank)
    x = torch.rand(5, 3, SIDE, SIDE)
    torch.testing.assert_close(
        probabilities.model(x), scores.model(x).softmax(1), rtol=1e-3, atol=1e-4
    )


def test_a_prior_penalises_evidence_in_the_mark(photos: RunPhotos, finding: Any) -> None:
    """What a prior is given: the region of the mark where one is, all other places allowed, and the
    answers wanted."""
    given = []

    class Recorded(AttributionPrior):
        def __call__(
            self, model: nn.Module, x: torch.Tensor, target: Any = None, mask: Any = None
        ) -> torch.Tensor:
            given.append((x, target, mask))
            return super().__call__(model, x, target, mask)

    prior = Recorded("inputxgradient", "share", weight=1.0)
    found = repair(finding, photos, how="train", steps=40, learning_rate=0.01, prior=prior)
    x, classes, mask = (torch.cat(each) for each in zip(*given, strict=True))
    white = (x[:, :, :MARK, :MARK] == 1).flatten(1).all(1)
    assert white.any()
    assert not mask[white, 0, :MARK, :MARK].any()
    assert mask[:, :, MARK + 3 :, MARK + 3 :].all()
    assert (mask.flatten(1).all(1) | white | (x[:, 0, :MARK, :MARK].std((1, 2)) > 0)).all()
    assert (classes == x[:, :, 8:, 8:].amax((2, 3)).argmax(1)).all()  # the colour, not the mark
    with torch.no_grad():
        shares = [
            float(prior(model, x[white], classes[white], mask[white]))
            for model in (photos.explainer.model, found.model)
        ]
    assert shares[1] < shares[0] / 2


def test_the_layer_and_the_strength_are_those_with_the_least_loss(
    photos: RunPhotos, finding: Any
) -> None:
    both = repair(finding, photos, layer=["1", "2"])
    losses = {layer: repair(finding, photos, layer=layer).loss[1] for layer in ("1", "2")}
    assert both.layer == min(losses, key=losses.__getitem__)
    assert both.loss[1] == min(losses.values())


def test_a_channel_is_taken_out(photos: RunPhotos) -> None:
    """The channel that sees white: its vector is known, and only the strength is chosen."""
    seen = {each.number: each for each in channels(photos, "red", layer="1", count=4).channels}
    found = repair(seen[3], photos, layer="1")
    assert (found.finding, found.layer, found.rank) == ("channel 3", "1", 1)
    inserted = found.model.get_submodule("1")[1]
    maps = torch.rand(2, 4, 5, 5)
    assert inserted(maps)[:, 3].std() < 1e-3 * maps[:, 3].std()
    assert found.answers["elsewhere"].accuracy[1] == 1.0
    with pytest.raises(LayerError, match="layer must"):
        repair(seen[3], photos)


@pytest.mark.long
def test_what_is_written_loads_without_this_package(
    photos: RunPhotos, finding: Any, tmp_path: Path
) -> None:
    """The module and the exported program in a process that cannot import explain; and the page
    with three pictures."""
    found = repair(finding, photos)
    files = [*found.save(tmp_path / "a.pt"), *found.save(tmp_path / "b.pt2")]
    assert [path.name for path in files] == ["a.pt", "a.html", "b.pt2", "b.html"]
    page = files[1].read_text("utf-8")
    assert page.count("<img") == 3
    assert "other photos with the mark" in page
    x = torch.rand(3, 3, SIDE, SIDE)
    torch.save((x, found.model(x)), tmp_path / "expected")
    script = (
        "import sys; sys.modules['explain'] = None; import torch; x, y = torch.load('expected');"
        "torch.testing.assert_close(torch.load('a.pt', weights_only=False)(x), y);"
        "torch.testing.assert_close(torch.export.load('b.pt2').module()(x), y)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    with pytest.raises(ExplainError, match="exists"):
        found.save(tmp_path / "a.pt")


def test_the_command_line_writes_the_same(
    photos: RunPhotos, finding: Any, tmp_path: Path, capsys: Any
) -> None:
    model = f"--model tests.insight.test_repair:shortcut --size {SIDE} --crop 1 --mean 0 --std 1".split()
    file = tmp_path / "repaired.pt"
    assert main(["repair", str(photos.run.path), *model, "--output", str(file), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["repairs"]
    assert told["accuracy"] == repair(finding, photos).to_dict()["accuracy"]
    assert told["files"] == [str(file), str(tmp_path / "repaired.html")]
    assert main(["repair", str(photos.run.path), *model, "--finding", "99"]) == 1
    assert "--finding must be" in capsys.readouterr().err


def test_a_class_without_boxes_is_refused_and_not_the_model_blamed(
    photos: RunPhotos, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"--model tests.insight.test_repair:shortcut --size {SIDE} --crop 1 --mean 0 --std 1".split()
    target = photos.run.insight().looks[0].target
    words = [
        "repair",
        str(photos.run.path),
        *model,
        "--finding",
        target,
        "--output",
        str(tmp_path / "repaired.pt"),
    ]
    assert main(words) == 1
    told = capsys.readouterr().err
    assert "boxes" in told
    assert "model" not in told
    assert not list(tmp_path.iterdir())


def test_bad_input_is_refused_in_one_line(photos: RunPhotos, finding: Any) -> None:
    with pytest.raises(RunError, match="how must be"):
        repair(finding, photos, how="magic")
    with pytest.raises(RunError, match="photos of the finding"):
        repair(type(finding)(**{**vars(finding), "members": finding.members[:3]}), photos)
