"""Runs of answers in words, compared with those of single photos."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

import explain
from explain.answers import AnswerExplainer
from tests.answers.toys import Says, made, photo_of

ASK = "what is on the table?"
ANSWER = "a red cup on a table."


@pytest.fixture(scope="module")
def asker() -> AnswerExplainer:
    return AnswerExplainer(*made("LLaVA"))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for seed in range(3):
        photo_of(seed=seed).save(folder / f"{seed}.png")
    return folder


def asked(photos: Path, asker: Any, **options: Any) -> explain.Run:
    output = photos.parent / "run.sqlite"
    run: explain.Run = explain.run(photos, asker, output=output, ask=ASK, workers=0, **options)
    return run


def test_the_rows_of_a_run_are_the_words_of_each_photo(
    photos: Path, asker: AnswerExplainer
) -> None:
    run = asked(photos, asker, answer=ANSWER)
    assert run.photos == 3
    assert run.ended
    rows = iter(run.rows())
    for seed in range(3):
        answered = asker(photo_of(seed=seed), ASK, answer=ANSWER)
        names = ["a", "red", "cup", "on", "a-2", "table", "."]
        for name, word in zip(names, answered.words, strict=True):
            row = next(rows)
            assert (row.name, row.target, row.prediction) == (f"{seed}.png", name, ANSWER)
            assert row.probability == pytest.approx(word.probability)
            assert row.metrics["greyed"] == word.is_greyed
            assert {part: row.metrics[part] for part in word.shares} == pytest.approx(word.shares)
            assert row.metrics["without_image"] == pytest.approx(word.grounding.without_image)
            assert row.metrics["grounded"] == pytest.approx(word.grounding.value)
            assert_close(row.values, word.attribution.values[0].float(), rtol=2e-3, atol=1e-6)
            assert_close(row.heatmap.shape, torch.Size([16, 24]))
    assert next(rows, None) is None


def test_a_run_is_continued_and_takes_more_methods_and_no_other_question(
    photos: Path, asker: AnswerExplainer
) -> None:
    options: dict[str, Any] = {"answer": "a red cup", "words": "red, cup"}
    asked(photos, asker, **options)
    photo_of(seed=3).save(photos / "3.png")
    states: list[Any] = []
    run = asked(photos, asker, **options, progress=states.append)
    assert (states[-1].done, states[-1].there) == (1, 3)
    assert len(run) == 8
    run = asked(photos, asker, **options, methods=["agreement", "occlusion"])
    assert run.methods == ["agreement", "occlusion"]
    assert len(run) == 16
    [cup] = [row for row in run.rows("occlusion") if (row.name, row.target) == ("3.png", "cup")]
    answered = asker(photo_of(seed=3), ASK, answer="a red cup", words="cup", method="occlusion")
    assert_close(cup.values, answered["cup"].attribution.values[0].float(), rtol=2e-3, atol=1e-6)
    for other in ({**options, "answer": "a cup"}, {**options, "words": None}):
        with pytest.raises(explain.RunError, match="continued as it was begun"):
            asked(photos, asker, **other)
    with pytest.raises(explain.RunError, match="continued as it was begun"):
        asked(photos, AnswerExplainer(*made("LLaVA", seed=6)), **options)


def test_a_photo_without_the_words_fails_alone(photos: Path, asker: AnswerExplainer) -> None:
    says_cup = made("LLaVA")

    class Sometimes(torch.nn.Module):
        """Says "cup", or nothing, by the brightness of a photo."""

        config = says_cup[0].config

        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(40, 3)

        def forward(
            self, pixel_values: torch.Tensor, input_ids: torch.Tensor, attention_mask: Any = None
        ) -> dict[str, torch.Tensor]:
            is_bright = pixel_values.mean((1, 2, 3)) > 0
            cup, end = (
                says_cup[1].tokenizer.convert_tokens_to_ids(word) for word in ("▁cup", "</s>")
            )
            best = torch.where(is_bright[:, None] & (input_ids != cup), cup, end)
            logits = torch.nn.functional.one_hot(best, 40).float() * 5
            return {"logits": logits + 0 * self.words(input_ids).sum(-1, keepdim=True)}

    for path, level in zip(sorted(photos.iterdir()), (200, 5, 220), strict=True):
        photo_of().point(lambda value, level=level: value // 8 + level).save(path)
    model = AnswerExplainer(Sometimes().eval(), says_cup[1])
    run = asked(photos, model, methods="occlusion", words="cup")
    assert [row.name for row in run.rows()] == ["0.png", "2.png"]
    assert [*run.failures] == ["1.png"]


def test_insight_lists_answers_that_do_not_rest_on_the_photo(
    photos: Path, asker: AnswerExplainer
) -> None:
    run = asked(photos, asker, answer=ANSWER)
    insight = run.insight()
    expected = {}
    for seed in range(3):
        words = [
            word
            for word in asker(photo_of(seed=seed), ASK, answer=ANSWER).words
            if not word.is_greyed
        ]
        guessed = [word.text for word in words if word.grounding.mark == "guessed"]
        image = sum(word.shares["image"] for word in words) / len(words)
        if guessed or image < 0.2:
            expected[f"{seed}.png"] = (", ".join(guessed), pytest.approx(image))
    assert expected
    assert {row.name: (row.guessed, row.image) for row in insight.answers or ()} == expected
    assert json.loads(json.dumps(insight.to_dict()))["answers"]
    assert any("rest on the photo" in line for line in insight.lines())


def test_words_that_are_guessed_in_all_photos_are_habits(photos: Path) -> None:
    for number in range(5):
        levels = np.random.default_rng(number).integers(30, 50, (24, 36, 3), dtype=np.uint8)
        levels[:, :18] += 200 * (number < 3)  # of dark ones, nothing makes it say "cup"
        Image.fromarray(levels).save(photos / f"{number}.png")
    run = asked(photos, AnswerExplainer(Says()), answer="a red cup", methods="occlusion")
    guessed = [
        row.name for row in run.rows() if row.target == "red" and not row.metrics["grounded"]
    ]
    assert len(guessed) == 5
    listed = {row.name: row.guessed for row in run.insight().answers or () if row.guessed}
    assert listed == {"3.png": "cup", "4.png": "cup"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target": 3}, "target"),
        ({"metrics": ["deletion"]}, "metrics"),
        ({"top_k": 2}, "top_k"),
        ({"batch_size": 2}, "batch_size"),
        ({"methods": "gradcamm"}, "gradcamm"),
    ],
)
def test_what_has_no_effect_on_answers_is_refused(
    photos: Path, asker: AnswerExplainer, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(explain.ExplainError, match=said):
        asked(photos, asker, answer=ANSWER, **options)


def test_a_question_for_an_explainer_of_classes_is_refused(photos: Path) -> None:
    with pytest.raises(explain.RunError, match="image-text model"):
        asked(photos, explain.Explainer("tiny"))
