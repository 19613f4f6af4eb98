"""What a newcomer stumbled over: each thing works now, or is refused in one line that says what to
do."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import explain
from explain import ArgumentError, ExplainError, ExplainWarning, RecordError
from explain.attribution.pictures import remark
from explain.cli import main
from explain.methods import AblationCAM
from tests.conftest import ROOT, Made, TinyNet

CAT = str(ROOT / "assets" / "chelsea.png")
X = torch.rand(1, 3, 12, 10, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def tiny() -> explain.Explainer:
    return explain.Explainer("tiny")


@pytest.fixture(scope="module")
def cat(tiny: explain.Explainer) -> explain.Explanation:
    return tiny(CAT, ["gradcam", "saliency"], targets=["tabby", "espresso"])


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], list[str]]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err.splitlines()


# Misspelt arguments

MADE = explain.Explainer.__new__(explain.Explainer)
PUBLIC = {
    name: getattr(explain, name)
    for name in explain.__all__
    if inspect.isfunction(getattr(explain, name))
} | {
    "Explainer": explain.Explainer,
    "explainer": MADE,
    "explainer.concepts": MADE.concepts,
    "explanation.overlay": explain.Explanation.overlay,
    "explanation.save": explain.Explanation.save,
    "overlay": explain.render.overlay,
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_keyword_that_no_public_function_has_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(
        ArgumentError, match=r"^[\w.]+ has no argument 'zzz'; (known: |none is known)"
    ) as caught:
        PUBLIC[name](zzz=1)
    assert isinstance(caught.value, TypeError)
    assert "self" not in str(caught.value)


MISSPELT = [
    (lambda: explain.explain(CAT, metod="lrp"), "'methods'"),
    (lambda: explain.explain(CAT, model="tiny"), "Explainer"),
    (lambda: explain.Explainer(labels=["cat"]), "categories"),
    (lambda: explain.attribute(TinyNet(), X, batchsize=3), "'batch_size'"),
]


@pytest.mark.parametrize(("call", "word"), MISSPELT)
def test_a_misspelt_keyword_is_answered_with_the_right_one(call: Any, word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        call()


# Values that are no values


WRONG_VALUES = [
    (lambda e, x: e.overlay(3), "method"),
    (lambda e, x: e.overlay(alpha="x"), "alpha"),
    (lambda e, x: e.overlay(colormap=3), "colormap"),
    (lambda e, x: e.save(5), "folder"),
    (lambda e, x: e.sheet("a"), "tile"),
    (lambda e, x: explain.attribute(x, X, "occlusion", progress=3), "progress"),
    (lambda e, x: explain.attribute(x, X, "gradcam", top_k=2.5), "top_k"),
]


@pytest.mark.parametrize(("call", "word"), WRONG_VALUES)
def test_what_cannot_be_meant_is_refused_in_one_line(
    call: Any, word: str, cat: explain.Explanation, tiny: explain.Explainer
) -> None:
    with pytest.raises(ExplainError, match=rf"^{word} (of \w+ )?must") as caught:
        call(cat, tiny.model)
    assert "\n" not in str(caught.value)


# What an explanation holds


def test_an_explanation_gives_the_attribution_of_a_method_and_its_values(
    cat: explain.Explanation,
) -> None:
    assert list(cat) == cat.methods == ["gradcam", "saliency"]
    assert "lrp" not in cat
    assert cat["saliency"] is cat[explain.methods.Saliency()] is cat.results[0]["saliency"]
    assert torch.equal(cat.values, cat["gradcam"].values[0])
    assert torch.equal(cat.heatmap, cat["gradcam"].heatmap[0])


def test_concepts_that_were_saved_are_plain_arrays(tiny: explain.Explainer, tmp_path: Path) -> None:
    explanation = tiny.concepts(CAT, 3)
    maps, vectors = explanation.save(tmp_path)[1:3]
    assert np.array_equal(np.load(maps), explanation.concepts.maps[0])
    assert np.array_equal(np.load(vectors), explanation.concepts.vectors)
    with pytest.raises(RecordError, match=r"numpy\.load"):
        explain.load(maps)


def test_a_folder_is_no_record_but_says_what_is_in_it(
    cat: explain.Explanation, tmp_path: Path
) -> None:
    with pytest.raises(RecordError, match="the folder"):
        explain.load(tmp_path)
    cat.save(tmp_path)
    with pytest.raises(RecordError, match="chelsea"):
        explain.load(tmp_path)


@pytest.mark.filterwarnings("default:ablationcam divides by the score")
def test_a_negative_score_is_said_to_turn_ablationcam_round() -> None:
    """What the channel shows speaks for the target, and its weight (y - y_k) / y is negative."""
    conv = nn.Conv2d(3, 1, 1, bias=False)
    nn.init.constant_(conv.weight, 1.0)
    model = Made(lambda made, x: made.conv(x).mean((2, 3)) - 9, conv=conv)
    with pytest.warns(ExplainWarning) as said:
        empty = explain.attribute(model, X, "ablationcam", target=0, layer="conv")
    assert not empty.values.any()
    (message,) = [str(warning.message) for warning in said]
    assert message.startswith("ablationcam is zero everywhere for image 0: the score is negative")
    with pytest.warns(ExplainWarning, match="ablationcam divides by"):
        signed = explain.attribute(model, X, AblationCAM(relu=False), target=0, layer="conv")
    assert (signed.values < 0).all()
    assert remark(signed) == "negative score: signs reversed"


# The command line

REFUSED = {
    "--crop centre": "'center', 'whole'",
    "--style heet": "'heat', 'contour'",
    "--style contour --alpha 0.5": "--alpha",
    "--method grad-cam": "did you mean 'gradcam'",
    "--metod gradcam": "'--method'",
    "--metric relevancemass": "that has their boxes",
    "--layer nope": "explain layers",
    "--top-k 300": "at most 200",
    "--mean 300": "--mean must",
    "--labels two.txt": "--labels must",
    "--method drise": "drise is for detectors",
    "--method smooth(gradcam) --method smooth(gradcam(relu=False))": "--output",
}


@pytest.mark.parametrize("typed", REFUSED)
def test_what_cannot_be_done_is_code_2_and_one_line_in_the_words_of_the_command_line(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.txt").write_text("cat\ndog\n")
    code, out, err = run(capsys, CAT, "--model", "tiny", *typed.split(" "))
    assert (code, out, len(err)) == (2, [], 1)
    assert REFUSED[typed] in err[0]
    assert not Path("explained").exists()


def test_a_command_that_is_misspelt_is_not_taken_for_a_photo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = "explain: 'method' is neither a file nor a command; did you mean 'explain methods'?"
    assert run(capsys, "method") == (2, [], [said])
    missing = "explain: image 'method.jpg' does not exist; check the path"
    assert run(capsys, "method.jpg") == (1, [], [missing])
    Path("method").mkdir()
    assert "holds no images" in run(capsys, "method")[2][0]


def test_codes_tell_what_was_asked_for_from_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where one photo cannot be read, what is wrong with the question is still told as such."""
    monkeypatch.chdir(tmp_path)
    options = ["--model", "tiny", "--method", "saliency"]
    assert run(capsys, CAT, "none.jpg", *options)[0] == 1
    code, _, err = run(capsys, "none.jpg", CAT, CAT, *options, "--target", "tabbby", "--force")
    assert (code, len(err)) == (2, 1)
    assert "target 'tabbby' is not a label of this model" in err[0]
