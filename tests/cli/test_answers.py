"""Answers of image-text models on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import explain
from explain.answers import AnswerExplainer
from tests.answers.toys import IDS, PHOTOS, SIZES, made, photo_of, transformers
from tests.cli.conftest import Typed

ASK = "what is on the table?"
ANSWER = "a red cup on the table."
ANSWER_SHEET = "<h2>{}</h2>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of a small model that was saved with its processor."""
    folders: dict[str, str] = {}

    def of(kind: str) -> str:
        if kind not in folders:
            path = tmp_path_factory.mktemp("models") / kind.lower()
            model, processor = made(kind)
            parts = processor if isinstance(processor, tuple) else (processor,)
            for part in (model, *parts):
                part.save_pretrained(path)
            folders[kind] = str(path)
        return folders[kind]

    return of


@pytest.fixture(autouse=True)
def _photos(tmp_path: Path) -> None:
    photo_of().save(tmp_path / "a.png")
    photo_of(seed=1).save(tmp_path / "b.png")


def test_words_of_an_answer_are_those_of_python(typed: Typed, folder: Any) -> None:
    words = ("--ask", ASK, "--answer", ANSWER, "--words", "red, cup, .")
    code, out, err = typed("a.png", "--model", folder("LLaVA"), *words, "--html")
    assert code == 0
    expected = AnswerExplainer(*made("LLaVA"))("a.png", ASK, answer=ANSWER, words="red,cup,.")
    assert out[:2] == ["a.png", f"  {ANSWER}"]
    for line, word in zip(out[2:5], expected.words, strict=True):
        name, *_ = line.split()
        assert (name, word.summary in line) == (word.text, True)
        assert word.grounding.mark in line
    assert out[4].endswith("(punctuation)")
    assert [line for line in err if " altered inputs, about" in line]
    stem = "explained/a-llava"
    written = [line.removeprefix("  wrote ") for line in out[5:]]
    names = (
        "answer.png",
        "answer.html",
        "red.npy",
        "red.png",
        "cup.npy",
        "cup.png",
        "mark.npy",
        "answer.json",
    )
    assert written == [f"{stem}-{name}" for name in names]
    cup = torch.from_numpy(np.load(f"{stem}-cup.npy"))
    torch.testing.assert_close(cup, expected["cup"].attribution.values[0].float())
    record = json.loads(Path(f"{stem}-answer.json").read_text())
    assert [word["text"] for word in record["words"]] == ["red", "cup", "."]


def test_each_of_several_photos_has_the_next_one_in_its_place(typed: Typed, folder: Any) -> None:
    words = ("--answer", "a cup", "--words", "cup", "--json")
    code, out, _ = typed("a.png", "b.png", "--model", folder("BLIP"), *words)
    assert code == 0
    document = json.loads("\n".join(out))
    assert document["errors"] == []
    asker = AnswerExplainer(*made("BLIP"))
    expected = asker(["a.png", "b.png"], answer="a cup", words="cup")
    for result, answered in zip(document["results"], expected, strict=True):
        [record] = result["records"]
        [found] = record["words"]
        [word] = answered.to_dict()["words"]
        assert found["grounding"]["with_other_photo"] is not None
        assert found["shares"] == pytest.approx(word["shares"], abs=1e-4)
        assert record["ask"] is None


@pytest.mark.parametrize("kind", ["LLaVA-NeXT", "BLIP", "GIT", "ViT-GPT2"])
def test_models_say_their_own_answer(typed: Typed, folder: Any, kind: str) -> None:
    ask = ASK if kind == "LLaVA-NeXT" else ""
    model = folder(kind)
    code, out, err = typed("a.png", "--model", model, "--ask", ask, "--method", "saliency")
    own_ends_at_once = any("ends before the first" in line for line in err)
    assert (code, bool(out)) == ((2, False) if own_ends_at_once else (0, True)), err


def test_several_photos_have_a_sheet_and_those_that_are_there_are_skipped(
    typed: Typed, folder: Any
) -> None:
    photo_of(seed=2).save("c.png")
    words = ("--model", folder("LLaVA"), "--ask", ASK, "--words", "cup", "--method", "saliency")
    code, out, _ = typed("a.png", "b.png", *words, "--answer", "a cup", "--html")
    assert code == 0
    assert out[-1].startswith("wrote explained/contact-sheet.html")
    page = Path("explained/contact-sheet.html").read_text("utf-8")
    assert page.count("data:image/png;base64,") == 2
    assert [page.count(f"{ANSWER_SHEET.format(name)}") for name in ("a.png", "b.png")] == [1, 1]
    before = {path: path.stat().st_mtime_ns for path in Path("explained").iterdir()}
    code, out, _ = typed("a.png", "b.png", *words, "--answer", "a cup", "--skip-existing")
    skipped = [f"{name}: skipped: its results are there" for name in ("a.png", "b.png")]
    assert (code, out[:2]) == (0, skipped)
    # the second photo has another one in its place now
    code, out, err = typed(
        "a.png", "b.png", "c.png", *words, "--answer", "a cup", "--skip-existing"
    )
    assert (out[:2], code) == ([skipped[0], "c.png: a cup"], 1)
    assert [line for line in err if "b-llava" in line and "exists" in line]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    code, out, err = typed("a.png", "b.png", *words, "--answer", "a red cup", "--skip-existing")
    assert (code, [line for line in out if "skipped" in line]) == (1, [])
    record = Path("explained/a-llava-answer.json")
    text = record.read_text("utf-8")
    changed = json.loads(text)
    changed["words"][0]["probability"] *= 1.5  # of another model
    for content in ("[]", "{", json.dumps(changed)):
        record.write_text(content)
        _, out, _ = typed("a.png", "b.png", *words, "--answer", "a cup", "--skip-existing")
        assert out[0] == skipped[1]


def test_a_run_keeps_answers_and_insight_lists_those_without_the_photo(
    typed: Typed, folder: Any
) -> None:
    Path("photos").mkdir()
    for name in ("a.png", "b.png"):
        Path(name).rename(f"photos/{name}")
    words = ("--ask", ASK, "--answer", ANSWER, "--method", "occlusion", "--workers", "0")
    model = folder("LLaVA")
    code, out, _ = typed("run", "photos", "--model", model, *words, "--pictures", "source")
    assert code == 0
    assert [line for line in out if line.startswith("explained 2 photos")]
    assert len(list(Path("run-pictures").iterdir())) == 2 * 7
    run = explain.open_run("run.sqlite")
    expected = AnswerExplainer(*made("LLaVA"))("photos/a.png", ASK, answer=ANSWER, words="cup")
    [cup] = [row for row in run.rows() if (row.name, row.target) == ("a.png", "cup")]
    assert cup.probability == pytest.approx(expected.words[0].probability, rel=1e-4)
    code, out, _ = typed("insight", "run.sqlite")
    assert (code, "Answers that do not rest on the photo" in out) == (0, True)
    code, out, _ = typed("run", "photos", "--model", model, *words)
    assert [
        line for line in out if line.startswith("explained 0 photos") and "2 were there" in line
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--ask what", "--ask needs one image-text model"),
        ("--words cup", "--words would have no effect without --ask"),
        ("--ask what --model tiny --target cup", "--target would have no effect with --ask"),
        ("--ask what --model tiny --check", "--check would have no effect with --ask"),
        ("--ask what --model tiny --method gradcamm", "gradcamm"),
        ("--ask what --model tiny", "must be an image-text model"),
    ],
)
def test_what_does_not_fit_a_run_is_refused_in_a_line(typed: Typed, words: str, said: str) -> None:
    code, out, [line] = typed("run", ".", *words.split())
    assert (code, out, said in line) == (2, [], True)


def test_models_that_answer_by_classes_are_refused_in_a_line(typed: Typed) -> None:
    sizes = {**SIZES, "image_size": 16, "patch_size": 8, "vocab_size": 30}
    vilt = transformers.ViltForQuestionAnswering(transformers.ViltConfig(**sizes, num_labels=5))
    words = {**SIZES, **IDS, "encoder_hidden_size": 16, "vocab_size": 30}
    config = transformers.BlipConfig(text_config=words, vision_config=PHOTOS)
    blip = transformers.BlipForQuestionAnswering(config)
    for model, said in ((vilt, "vilt"), (blip, "BlipForQuestionAnswering")):
        model.save_pretrained("model")
        code, out, [line] = typed("a.png", "--model", "./model", "--ask", ASK)
        assert (code, out) == (2, [])
        assert said in line
        assert "must be an image-text model" in line


def test_code_of_ones_own_is_asked_too(typed: Typed) -> None:
    Path("mine.py").write_text(
        "from tests.answers.toys import made\n\n\ndef make():\n"
        "    model, processor = made('LLaVA')\n"
        "    model.processor = processor\n"
        "    return model\n"
    )
    words = ("--ask", ASK, "--answer", "a cup", "--method", "occlusion")
    code, out, _ = typed("a.png", "--model", "./mine.py:make", *words)
    assert (code, out[1]) == (0, "  a cup")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--ask what", "--ask needs one image-text model"),
        ("--ask what --model nanodet", "'nanodet' must be an image-text model"),
        ("--ask what --model tiny --model tiny-clip", "needs one image-text model"),
        ("--ask what --model timm:a/b", "must be an image-text model"),
        ("--ask what --model ./text", "must be an image-text model"),
        ("--words cup", "--words would have no effect without --ask"),
        ("--ask what --model MODEL --target cup", "--target would have no effect with --ask"),
        ("--ask what --model MODEL --layer x", "--layer would have no effect with --ask"),
        ("--ask what --model MODEL --method gradcamm", "gradcamm"),
        ("--ask what --model MODEL --method lrp --method saliency", "one too many"),
        ("--ask what --model MODEL --answer ×", "answer must be words"),
        ("--ask what --model MODEL --answer ''", "answer must be the words"),
        ("--ask what --model MODEL --answer cup --words red", "word must be one of"),
        ("--ask what --model MODEL --output a.png", "--output must be a folder"),
        ("--ask what --model MODEL --baseline none", "baseline"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(
    typed: Typed, folder: Any, words: str, said: str
) -> None:
    parts = [part.replace("MODEL", folder("LLaVA")).strip("'") for part in words.split()]
    Path("text").mkdir()
    Path("text/config.json").write_text('{"model_type": "bert"}')
    code, out, err = typed("a.png", *parts)
    assert (code, out) == (2, [])
    [line] = [line for line in err if not line.startswith("note: ")]
    assert said in line
    assert not Path("explained").exists()


def test_a_photo_that_is_broken_fails_alone(typed: Typed, folder: Any) -> None:
    Path("c.png").write_bytes(b"broken")
    Image.new("RGB", (24, 16), "red").save("d.png")
    words = ("--ask", ASK, "--answer", "a cup", "--words", "cup", "--method", "saliency")
    code, out, err = typed("a.png", "c.png", "d.png", "--model", folder("LLaVA"), *words)
    assert code == 1
    assert [line for line in err if "c.png" in line and line.startswith("explain: ")]
    assert out[:2] == ["a.png: a cup", "d.png: a cup"]
