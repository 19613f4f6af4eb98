"""`--metric`, `explain metrics`, and the page about them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

import explain
from explain.baselines import Black
from explain.cli import main
from explain.methods import FeatureAblation
from explain.metrics import Comprehensiveness
from tests.conftest import ROOT

CAT = str(ROOT / "assets" / "chelsea.png")
TINY = ["--model", "tiny", "--size", "32"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_metrics_are_part_of_the_document(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of an ablated model, and covered by a baseline that all methods and metrics share."""
    arguments = [CAT, *TINY, "--method", "featureablation(regions=2)", "--target", "tabby"]
    arguments += ["--baseline", "black", "--ablate", "layer3[0,7]", "--metric", "comprehensiveness"]
    assert main([*arguments, "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)["results"][0]["metrics"]
    explainer = explain.Explainer("tiny", size=32)
    x = explainer.as_input(Image.open(CAT))
    black = Black.of(explainer.preprocess)
    channels = torch.tensor([0, 7])
    explainer.model.layer3.register_forward_hook(lambda *args: args[2].index_fill(1, channels, 0))
    table = explain.evaluate(
        explainer.model,
        x,
        FeatureAblation(regions=2, baseline=black),
        Comprehensiveness(baseline=black),
        target="tabby",
        categories=explainer.categories,
    )
    expected = table["featureablation"]["comprehensiveness"].tolist()
    values = document["values"]["featureablation"]["comprehensiveness"]
    assert values == pytest.approx(expected, rel=1e-4)


def test_metrics_are_listed_with_their_options_if_one_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["metrics"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == explain.list_metrics()
    assert main(["metrics", "deletion"]) == 0
    assert "options: steps=64, baseline=Zero(), score=probability" in capsys.readouterr().out


@pytest.mark.long
def test_notes_call_a_single_photo_by_its_name_and_are_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Image.new("RGB", (64, 64)).save("black.png")
    # its map is empty
    asked = ["black.png", "--model", "tiny", "--target", "199", "--check"]
    asked += ["--metric", "mprt", "--metric", "sparseness"]
    assert main(asked) == 0
    starts = [
        "note: black.png: ",
        "note: gradcam is zero everywhere for image black.png: ",
        "note: sparseness of gradcam is not defined for image black.png: ",
        "note: mprt of gradcam is not defined for image black.png: ",
    ]
    said = capsys.readouterr()
    assert "  ✗ model: the map is zero everywhere" in said.out
    notes = [line for line in said.err.splitlines() if line.startswith("note: ")]
    assert [line[: len(start)] for line, start in zip(notes, starts, strict=True)] == starts
    assert main([*asked, "--force", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)["results"][0]
    (check,) = document["checks"]
    figures = check["methods"]["gradcam"]["figures"]
    assert [figures[name]["mark"] for name in ("model", "class", "covering", "stability")] == [
        *"✗✗✗✗"
    ]
    assert document["records"][0]["check"] == check["methods"]["gradcam"]


REFUSED = [
    ([CAT, "--baseline", "mean"], "--baseline would have no effect"),
    ([CAT, "--baseline", "mean", "--method", "occlusion(baseline=blur)"], "both say what covers"),
    (["metrics", "delition"], "metric 'delition' is unknown; did you mean 'deletion'"),
    ([CAT, "--model", "tiny", "--metric", "auc"], "needs to know where the object is"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_wrong_metrics_and_baselines_are_wrong_usage(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
