"""Explanations under interventions: in every place, in records, captions and runs, and repeated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import explain
from explain.cli import main
from explain.hooks import Ablate, Patch, intervene
from tests.conftest import ROOT
from tests.runs.networks import stored_run

PHOTO = ROOT / "assets" / "chelsea.png"


@pytest.fixture(scope="module")
def explainer() -> explain.Explainer:
    return explain.Explainer("tiny", size=64)


ABLATED = Ablate("layer3", channels=[0, 7])


@pytest.mark.long
def test_the_four_places_are_one(explainer: explain.Explainer, tmp_path: Path) -> None:
    x = explainer.as_input(PHOTO)
    with intervene(explainer.model, [ABLATED]):
        within = explain.attribute(explainer.model, x, target=3)
        twice = explain.attribute(explainer.model, x, target=3, interventions=[ABLATED])
    option = explain.attribute(explainer.model, x, target=3, interventions=[ABLATED])
    of_call = explainer(PHOTO, target=3, interventions=[ABLATED])
    altered = explain.Explainer("tiny", size=64, interventions=[ABLATED])
    of_explainer = altered(PHOTO, target=3)
    for result in (twice, option, of_call["gradcam"], of_explainer["gradcam"]):
        assert torch.equal(result.values, within.values)
    plain = explainer(PHOTO, target=3)
    assert not torch.equal(plain.values, within.values[0])
    assert plain.predictions != of_call.predictions == of_explainer.predictions
    words = "--model tiny --size 64 --target 3 --ablate layer3[0,7] -o"
    assert main([str(PHOTO), *words.split(), str(tmp_path)]) == 0
    (saved,) = tmp_path.glob("*.json")
    assert_close(explain.load(saved).values, within.values[0], rtol=0, atol=1e-7)


def test_records_and_captions_say_what_was_altered_and_repeat_it(
    explainer: explain.Explainer, tmp_path: Path
) -> None:
    several = [Patch("layer2", explainer.as_input(PHOTO).flip(3), channels=[1]), ABLATED]
    explanation = explainer(PHOTO, "gradcam", target=3, interventions=several)
    remark = explanation.layout().groups[-1].tiles[-1].remark
    assert "ablate layer3" in remark
    assert "patch layer2" in remark
    assert "ablate layer3" in explanation.to_html()
    saved = explain.load(explanation.save(tmp_path)[2])
    again = saved.repeat()
    assert torch.equal(again.values, explanation.values)
    assert len(saved.record["interventions"]) == 2
    assert again.record()["interventions"] == saved.record["interventions"]


@pytest.mark.long
def test_runs_and_metrics_see_them(tmp_path: Path) -> None:
    altered = explain.Explainer("tiny", size=32, interventions=[ABLATED])
    (row,) = stored_run(tmp_path, [PHOTO], altered, target=3).rows()
    score = altered(PHOTO, "gradcam", target=3)["gradcam"].score
    assert row.score == pytest.approx(float(score), rel=1e-5)
    with pytest.raises(explain.ExplainError):
        stored_run(tmp_path, [PHOTO], explain.Explainer("tiny", size=32), target=3)
    question = altered.model, altered.as_input(PHOTO), ["gradcam"], ["deletion"]
    table = explain.evaluate(*question, target=3, interventions=[ABLATED])
    with intervene(altered.model, [ABLATED]):
        within = explain.evaluate(*question, target=3)
    assert str(table) == str(within)
