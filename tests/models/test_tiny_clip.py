"""The small image-text model: its files, its texts, and what explains them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.nn.functional as F
from torch.testing import assert_close

import explain
from explain.cli import main
from explain.models.bundled import LENGTH, WordPieces, vocabulary
from explain.targets import Text
from tests.conftest import ROOT
from tests.models.test_tiny_transformer import block_by_hand

CUP = ROOT / "assets" / "coffee.png"


@pytest.fixture(scope="module")
def explainer() -> explain.Explainer:
    return explain.Explainer("tiny-clip")


def test_the_text_tower_computes_what_its_formula_says(explainer: explain.Explainer) -> None:
    """The formula in float64, one head after the other."""
    state = {name: each.double() for name, each in explainer.model.state_dict().items()}
    ids = WordPieces(vocabulary())(["a photo of a dog", "zebras"])
    x = state["token_embedding.weight"][ids] + state["position_embedding"]
    for layer in range(2):
        x, _ = block_by_hand(state, f"text_layers.{layer}.", x, heads=4)
    x = F.layer_norm(x[:, 0], (128,), state["text_ln.weight"], state["text_ln.bias"])
    expected = x @ state["text_projection.weight"].T + state["text_projection.bias"]
    attribution = explainer.model.encode_text(ids)  # type: ignore[operator]
    assert_close(attribution, expected.float(), rtol=1e-4, atol=1e-4)


def test_words_that_are_not_known_become_pieces() -> None:
    pieces = WordPieces(vocabulary())
    known = set(pieces.decoder.values())
    assert "dog" in known
    assert "xylophonist" not in known
    names = [pieces.decoder[i] for i in pieces.pieces("xylophonist")]
    assert "".join(name.removeprefix("##") for name in names) == "xylophonist"
    assert pieces(["dog " * 50]).shape == (1, LENGTH)


def test_words_carry_the_similarity(explainer: explain.Explainer) -> None:
    text = Text("a photo of coffee in the morning", words=True)
    x = explainer.as_input(CUP)
    (words,) = explain.attribute(
        explainer.model, x, "integratedgradients(steps=8)", target=text
    ).words
    assert " ".join(word for word, _ in words) == text.text
    assert max(words, key=lambda pair: pair[1])[0] == "coffee"


@pytest.mark.long
def test_the_command_line_takes_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "tiny-clip", "--text", "a cup of coffee", "--text", "a dog", "--json"]
    assert main([str(CUP), *words, "--output", str(tmp_path)]) == 0
    (attribution,) = json.loads(capsys.readouterr().out)["results"]
    assert [record["target"] for record in attribution["records"]] == ["a cup of coffee", "a dog"]
    record = next(path for path in attribution["files"] if path.endswith(".json"))
    again = explain.load(record).repeat()
    assert float(again["gradcam"].score) == pytest.approx(
        attribution["records"][0]["score"], rel=1e-4
    )
