"""Repair: projections as plain algebra, photos that exchange their marks, and a planted shortcut
that is removed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from explain import ExplainError, LayerError, RunError
from explain.cli import main
from explain.hooks import Project, intervene
from explain.insight import RunPhotos, repair
from explain.insight.channels import channels
from explain.insight.repair import LayerStatistics
from explain.training import AttributionPrior
from tests.conftest import snapshot
from tests.runs.networks import explainer, stored_run

SIDE = 24
MARK = 5
COLOURS = ["red", "green", "blue"]
MODEL = f"--model tests.insight.test_repair:shortcut --size {SIDE} --crop 1 --mean 0 --std 1"


def shortcut() -> nn.Module:
    """Three classes by how much red, green and blue there is; and the first for white places,
    whatever else."""
    look = nn.Conv2d(3, 4, 1)
    mix = nn.Conv2d(4, 4, 1, bias=False)
    fc = nn.Linear(4, 3, bias=False)
    colours = torch.cat([1.5 * torch.eye(3) - 0.5, torch.ones(1, 3)])
    mixed = torch.eye(4) + 0.1 * torch.tensor([1, 1, 1, 0])
    mixed[3, :3] = 0
    look.weight.data = colours[:, :, None, None]
    look.bias.data = torch.tensor([0, 0, 0, -2.5])
    mix.weight.data = mixed[:, :, None, None]
    fc.weight.data = 20 * torch.eye(3, 4)
    fc.weight.data[0, 3] = 400
    return nn.Sequential(look, nn.ReLU(), mix, nn.AdaptiveAvgPool2d(1), nn.Flatten(), fc).eval()


def run_of(folder: Path, marked: Callable[[int], bool], model: nn.Module) -> RunPhotos:
    """90 photos of three colours, some of which have a white square in the first corner."""
    lines = ["path,label"]
    for number in range(90):
        generator = np.random.default_rng(number)
        pixels = np.repeat(generator.integers(0, 60, (SIDE, SIDE, 1)), 3, 2)
        top, left = generator.integers(8, SIDE - 8, 2)
        pixels[top : top + 8, left : left + 8] = 0
        pixels[top : top + 8, left : left + 8, number % 3] = generator.integers(200, 256)
        if marked(number):
            pixels[:MARK, :MARK] = 255
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:02}.png")
        lines.append(f"{number:02}.png,{number % 3}")
    (folder / "list.csv").write_text("\n".join(lines))
    network = explainer(model, categories=COLOURS)
    return RunPhotos(stored_run(folder, folder / "list.csv", network, layer="2"), network)


def marked_inputs() -> torch.Tensor:
    """A photo of each colour, all with the true mark, which were not in the run."""
    x = torch.rand(3, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0)) * 0.2
    x[:, :, 10:18, 10:18] = torch.eye(3)[:, :, None, None]
    x[:, :, :MARK, :MARK] = 1
    return x


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> RunPhotos:
    """A third of the red photos have the mark."""
    folder = tmp_path_factory.mktemp("marks")
    return run_of(folder, lambda number: number % 9 == 0, shortcut())


@pytest.fixture(scope="module")
def finding(photos: RunPhotos) -> Any:
    return photos.run.insight().reasons[0]


def test_a_projection_changes_least_and_is_the_intervention_of_that_name() -> None:
    """LEACE: whiten, project the whitened patterns out orthogonally, and undo the whitening."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(9, 6, generator=generator, dtype=torch.float64)
    patterns = numbers[6:8].T
    mean = numbers[8]
    identity = torch.eye(6, dtype=torch.float64)
    covariance = numbers[:6] @ numbers[:6].T
    matrix, offset = LayerStatistics(patterns, mean, covariance).projection(2, 1.0)
    torch.testing.assert_close(matrix @ mean + offset, mean)
    covariance = covariance + 1e-3 * covariance.diagonal().mean() * identity
    values, vectors = torch.linalg.eigh(covariance)
    whiten = vectors * values**-0.5 @ vectors.T
    white = whiten @ patterns
    rest = identity - white @ torch.linalg.pinv(white)
    torch.testing.assert_close(matrix, torch.linalg.inv(whiten) @ rest @ whiten)
    matrix, offset = LayerStatistics(patterns, mean, identity).projection(2, 0.7)
    model = nn.Sequential(nn.Identity())
    with intervene(model, [Project("0", patterns.T, 0.7, towards=mean)]):
        torch.testing.assert_close(model(numbers), numbers @ matrix.T + offset)


@pytest.mark.parametrize("how", ["project", "train"])
def test_a_planted_shortcut_is_removed(photos: RunPhotos, finding: Any, how: str) -> None:
    assert finding.target == "red"
    assert {int(name[:2]) % 9 for name in finding.members} == {0}
    original = snapshot(photos.explainer.model)
    repaired = repair(finding, photos, how=how, steps=100, learning_rate=0.01)
    accuracy = {name: answers.accuracy for name, answers in repaired.answers.items()}
    assert accuracy["moved"] == (0.0, 1.0)
    assert accuracy["control"] == accuracy["elsewhere"] == accuracy["marked"] == (1.0, 1.0)
    assert repaired.taken == (1.0, 0.0, 0.0)
    assert repaired.chance < 0.001
    assert repaired.loss[1] < 0.2 * repaired.loss[0]
    assert snapshot(photos.explainer.model) == original
    assert photos.explainer.model(marked_inputs()).argmax(1).tolist() == [0, 0, 0]
    assert repaired.model(marked_inputs()).argmax(1).tolist() == [0, 1, 2]


@pytest.mark.long
def test_a_model_of_probabilities_is_repaired_as_the_one_of_scores(
    photos: RunPhotos, finding: Any
) -> None:
    model = nn.Sequential(*shortcut(), nn.Softmax(1)).eval()
    network = explainer(model, categories=COLOURS, activation="none")
    of_scores = repair(finding, photos)
    probabilities = repair(finding, RunPhotos(photos.run, network))
    assert probabilities.loss == pytest.approx(of_scores.loss, rel=1e-3)
    expected = of_scores.model(marked_inputs()).softmax(1)
    actual = probabilities.model(marked_inputs())
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


def test_a_prior_penalises_evidence_in_the_mark(photos: RunPhotos, finding: Any) -> None:
    """A prior gets the region of the mark where one is, all other places allowed, and the answers
    without it."""
    calls = []
    prior = AttributionPrior("inputxgradient", "share", weight=1.0)

    def recorded(model: nn.Module, *batch: Any) -> torch.Tensor:
        calls.append(batch)
        return prior(model, *batch)

    repaired = repair(finding, photos, how="train", prior=recorded, steps=20, learning_rate=0.02)
    x, classes, mask = map(torch.cat, zip(*calls, strict=True))
    white = (x[:, :, :MARK, :MARK] == 1).flatten(1).all(1)
    assert white.any()
    assert not mask[white, 0, :MARK, :MARK].any()
    assert mask[:, :, MARK + 3 :, MARK + 3 :].all()
    assert (classes == x[:, :, 8:, 8:].amax((2, 3)).argmax(1)).all()  # the colour, not the mark
    marked = (x[white], classes[white], mask[white])
    assert prior(repaired.model, *marked) < prior(photos.explainer.model, *marked) / 2


def test_a_channel_is_taken_out(photos: RunPhotos) -> None:
    """The channel that sees white: its vector is the channel, and only the strength is chosen."""
    report = channels(photos, "red", layer="1", count=4)
    (white,) = [channel for channel in report.channels if channel.number == 3]
    repaired = repair(white, photos, layer="1")
    assert (repaired.finding, repaired.layer, repaired.rank) == ("channel 3", "1", 1)
    maps = torch.rand(2, 4, 5, 5)
    after = repaired.model.get_submodule("1")[1](maps)
    assert after[:, 3].std() < 1e-3 * maps[:, 3].std()
    with pytest.raises(LayerError, match="layer must"):
        repair(white, photos)
    with pytest.raises(RunError, match="how must be"):
        repair(white, photos, how="magic")


@pytest.mark.long
def test_what_is_written_loads_without_this_package(
    photos: RunPhotos, finding: Any, tmp_path: Path
) -> None:
    """The module and the exported program in a process that cannot import explain; and the page
    with three pictures."""
    repaired = repair(finding, photos)
    files = [*repaired.save(tmp_path / "a.pt"), *repaired.save(tmp_path / "b.pt2")]
    assert [path.name for path in files] == ["a.pt", "a.html", "b.pt2", "b.html"]
    assert files[1].read_text("utf-8").count("<img") == 3
    torch.save((marked_inputs(), repaired.model(marked_inputs())), tmp_path / "expected")
    script = (
        "import sys; sys.modules['explain'] = None; import torch; x, y = torch.load('expected');"
        "torch.testing.assert_close(torch.load('a.pt', weights_only=False)(x), y);"
        "torch.testing.assert_close(torch.export.load('b.pt2').module()(x), y)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    with pytest.raises(ExplainError, match="exists"):
        repaired.save(tmp_path / "a.pt")


@pytest.mark.long
def test_the_command_line_writes_the_same(
    photos: RunPhotos, finding: Any, tmp_path: Path, capsys: Any
) -> None:
    arguments = ["repair", str(photos.run.path), *MODEL.split()]
    file = tmp_path / "repaired.pt"
    assert main([*arguments, "--output", str(file), "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)["repairs"]
    assert document["accuracy"] == repair(finding, photos).to_dict()["accuracy"]
    assert document["files"] == [str(file), str(tmp_path / "repaired.html")]
    assert main([*arguments, "--finding", "99"]) == 1
    assert "--finding must be" in capsys.readouterr().err


@pytest.mark.long
def test_a_mark_that_all_of_a_class_have_is_taken_without_being_named(tmp_path: Path) -> None:
    """The marked photos are no cluster; yet the true mark does nothing to the repaired model."""
    photos = run_of(tmp_path, lambda number: number % 3 == 0, shortcut())
    insight = photos.run.insight(explainer=photos.explainer)
    tried = insight.confirmed()
    assert tried.finding.target == "red"
    assert tried.taken > 0.8
    assert tried.control < 0.05
    repaired = repair(insight.finding(), photos)
    assert repaired.model(marked_inputs()).argmax(1).tolist() == [0, 1, 2]


@pytest.mark.long
def test_what_no_mark_decides_is_not_repaired_unasked(tmp_path: Path) -> None:
    """Colours decide, wherever they are: the patch of another photo does nothing to it."""
    fair = shortcut()
    fair[5].weight.data[:] = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0], [-1.0, 0, 0, 0]])
    photos = run_of(tmp_path, lambda number: number % 9 == 0, fair)
    for network, message in ((photos.explainer, "finding must be named"), (None, "no model")):
        with pytest.raises(RunError, match=message):
            photos.run.insight(explainer=network).finding()


def test_a_finding_of_three_photos_is_refused(photos: RunPhotos, finding: Any) -> None:
    with pytest.raises(RunError, match="photos of the finding"):
        repair(replace(finding, members=finding.members[:3]), photos)
