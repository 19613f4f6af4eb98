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
from explain.methods import FeatureAblation, Smooth
from explain.metrics import Comprehensiveness
from tests.conftest import ROOT

CAT = str(ROOT / "assets" / "chelsea.png")
TINY = ["--model", "tiny", "--size", "32"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_metrics_are_printed_as_a_table_and_are_part_of_the_document(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [CAT, *TINY, "--method", "gradcam", "--method", "saliency", "--target", "tabby"]
    assert main([*arguments, "--metric", "averagedrop", "--metric", "sparseness", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"][0]["metrics"][0]
    explainer = explain.Explainer("tiny", size=32)
    x = explainer.as_input(Image.open(CAT))
    table = explain.evaluate(
        explainer.model,
        x,
        ["gradcam", "saliency"],
        ["averagedrop", "sparseness"],
        target="tabby",
        categories=explainer.categories,
    )
    for method in table:
        for metric in ("averagedrop", "sparseness"):
            assert found["values"][method][metric] == pytest.approx(
                table[method][metric].tolist(), rel=1e-4
            )
    assert (
        main(
            [
                *arguments,
                "--target",
                "goldfish",
                "--force",
                "--metric",
                "emprt",
                "--metric",
                "sparseness",
            ]
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if "↑" in line] == [
        ["emprt", "↑", "sparseness", "↑"]
    ] * 2
    assert (
        torch.tensor(
            [len(line.split()) == 3 for line in lines if line.strip().startswith("saliency")]
        ).sum()
        == 2
    )


def test_metrics_of_an_ablated_model_are_those_of_a_model_without_the_channels(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [
        CAT,
        *TINY,
        "--target",
        "3",
        "--ablate",
        "layer3[0,7]",
        "--metric",
        "deletion",
        "--json",
    ]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)["results"][0]["metrics"][0]["values"]["gradcam"][
        "deletion"
    ]
    explainer = explain.Explainer("tiny", size=32)
    x = explainer.as_input(Image.open(CAT))

    def without(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        kept = torch.ones_like(output)
        kept[:, [0, 7]] = 0
        return output * kept

    explainer.model.layer3.register_forward_hook(without)
    table = explain.evaluate(explainer.model, x, "gradcam", "deletion", target=3)
    assert found == pytest.approx(table["gradcam"]["deletion"].tolist(), rel=1e-4)


def test_metrics_are_listed_with_their_options_if_one_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["metrics"]) == 0
    assert [
        line.split()[0] for line in capsys.readouterr().out.splitlines()
    ] == explain.list_metrics()
    assert main(["metrics", "deletion"]) == 0
    assert "options: steps=64, baseline=Zero(), score=probability" in capsys.readouterr().out


def test_a_fill_is_for_all_methods_and_metrics_that_cover_pixels(
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = [
        "--method",
        "featureablation(regions=2)",
        "--method",
        "smooth(featureablation(regions=2), samples=2)",
    ]
    arguments = [CAT, *TINY, "--target", "tabby", *named, "--metric", "comprehensiveness", "--json"]
    assert main([*arguments, "--baseline", "black"]) == 0
    result = json.loads(capsys.readouterr().out)["results"][0]
    explainer = explain.Explainer("tiny", size=32)
    x = explainer.as_input(Image.open(CAT))
    black = Black.of(explainer.preprocess)
    method = FeatureAblation(regions=2, baseline=black)
    table = explain.evaluate(
        explainer.model,
        x,
        [method, Smooth(method, samples=2)],
        Comprehensiveness(baseline=black),
        target="tabby",
        categories=explainer.categories,
    )
    found = result["metrics"][0]["values"]
    plain = explain.evaluate(
        explainer.model,
        x,
        FeatureAblation(regions=2),
        "comprehensiveness",
        target="tabby",
        categories=explainer.categories,
    )
    for name in table:
        assert found[name]["comprehensiveness"] == pytest.approx(
            table[name]["comprehensiveness"].tolist(), rel=1e-4
        )
    (covered,) = found["featureablation"]["comprehensiveness"]
    assert plain["featureablation"]["comprehensiveness"].item() != pytest.approx(covered, rel=1e-2)


def test_notes_call_a_single_photo_by_its_name_and_are_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Image.new("RGB", (64, 64)).save("black.png")
    # its map is empty
    asked = ["--target", "199", "--metric", "mprt", "--metric", "sparseness", "--check"]
    assert main(["black.png", "--model", "tiny", *asked]) == 0
    starts = [
        "note: gradcam is zero everywhere for image black.png: ",
        "note: sparseness of gradcam is not defined for image black.png: ",
        "note: mprt of gradcam is not defined for image black.png: ",
    ]
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert [line[: len(start)] for line, start in zip(notes, starts, strict=True)] == starts


REFUSED = [
    ([CAT, "--baseline", "grey", "--method", "occlusion"], "baseline 'grey' is unknown; "),
    ([CAT, "--baseline", "mean"], "--baseline would have no effect"),
    (
        [CAT, "--baseline", "mean", "--method", "occlusion(baseline=blur)"],
        "both say what covers pixels",
    ),
    (
        ["metrics", "--baseline", "mean"],
        "--baseline would have no effect with explain metrics; leave it out",
    ),
    ([CAT, "--metric", "delition"], "metric 'delition' is unknown; did you mean 'deletion'"),
    (["metrics", "delition"], "metric 'delition' is unknown; did you mean 'deletion'"),
    ([CAT, "--model", "tiny", "--metric", "auc"], "needs to know where the object is"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_wrong_metrics_and_baselines_are_wrong_usage(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
