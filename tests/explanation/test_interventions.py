"""Explanations under interventions: in every place, in records, captions and runs, and repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import explain
from explain.cli import main
from explain.hooks import Ablate, Patch, intervene
from tests.conftest import ROOT

PHOTO = ROOT / "assets" / "chelsea.png"


@pytest.fixture(scope="module")
def explainer() -> explain.Explainer:
    return explain.Explainer("tiny", size=64)


ABLATED = Ablate("layer3", channels=[0, 7])


def test_the_four_places_are_one(explainer: explain.Explainer, tmp_path: Path) -> None:
    x = explainer.as_input(PHOTO)
    with intervene(explainer.model, [ABLATED]):
        within = explain.attribute(explainer.model, x, "gradcam", target=3)
        twice = explain.attribute(explainer.model, x, "gradcam", target=3, interventions=[ABLATED])
    option = explain.attribute(explainer.model, x, "gradcam", target=3, interventions=[ABLATED])
    of_call = explainer(PHOTO, "gradcam", target=3, interventions=[ABLATED])
    of_explainer = explain.Explainer("tiny", size=64, interventions=[ABLATED])(
        PHOTO, "gradcam", target=3
    )
    words = [
        "--model",
        "tiny",
        "--size",
        "64",
        "--target",
        "3",
        "--ablate",
        "layer3[0,7]",
        "-o",
        str(tmp_path),
    ]
    assert main([str(PHOTO), *words]) == 0
    (saved,) = tmp_path.glob("*.json")
    for values in (twice, option, of_call["gradcam"], of_explainer["gradcam"]):
        assert torch.equal(values.values, within.values)
    assert_close(explain.load(saved).values, within.values[0], rtol=0, atol=1e-7)
    plain = explainer(PHOTO, "gradcam", target=3)
    assert not torch.equal(plain["gradcam"].values, within.values)
    assert plain.predictions != of_call.predictions == of_explainer.predictions


def test_records_and_captions_say_what_was_altered_and_repeat_it(
    explainer: explain.Explainer, tmp_path: Path
) -> None:
    other = explainer.as_input(ROOT / "assets" / "coffee.png")
    several = [Patch("layer2", other, channels=[1]), ABLATED]
    explanation = explainer(PHOTO, "gradcam", target=3, interventions=several)
    assert [
        type(intervention).__name__ for intervention in explanation["gradcam"].interventions
    ] == ["Patch", "Ablate"]
    record = json.loads(json.dumps(explanation.record()))
    assert len(record["interventions"]) == 2
    assert explainer(PHOTO, "gradcam", target=3).record()["interventions"] == []
    remarks = [tile.remark for group in explanation.layout().groups for tile in group.tiles]
    assert any("ablate layer3" in remark and "patch layer2" in remark for remark in remarks)
    assert "ablate layer3" in explanation.to_html()
    explanation.save(tmp_path)
    (saved,) = tmp_path.glob("*.json")
    again = explain.load(saved).repeat()
    assert torch.equal(again["gradcam"].values, explanation["gradcam"].values)
    assert again.record()["interventions"] == record["interventions"]


def test_runs_and_metrics_see_them(tmp_path: Path) -> None:
    altered = explain.Explainer("tiny", size=64, interventions=[ABLATED])
    where: Any = {"output": tmp_path / "run.sqlite", "workers": 0}
    run = explain.run([PHOTO], altered, ["gradcam"], target=3, **where)
    (row,) = run.rows()
    assert row.score == pytest.approx(
        float(altered(PHOTO, "gradcam", target=3)["gradcam"].score[0]), rel=1e-5
    )
    with pytest.raises(explain.ExplainError):
        explain.run([PHOTO], explain.Explainer("tiny", size=64), ["gradcam"], target=3, **where)
    x = altered.as_input(PHOTO)
    table = explain.evaluate(
        altered.model, x, ["gradcam"], ["deletion"], target=3, interventions=[ABLATED]
    )
    with intervene(altered.model, [ABLATED]):
        within = explain.evaluate(altered.model, x, ["gradcam"], ["deletion"], target=3)
    assert str(table) == str(within)
