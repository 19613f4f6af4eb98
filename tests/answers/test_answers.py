"""Explained words, compared with plain code on models of transformers with their own processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import explain
from explain.answers import AnswerExplainer
from tests.answers.toys import MODELS, SIZES, made, photo_of, tokenizer_of, transformers

ANSWER = "a zebra on the table."


@pytest.fixture(params=[*MODELS], scope="module")
def asked(request: pytest.FixtureRequest) -> tuple[str, Any, Any]:
    return request.param, *made(request.param)


def log_probabilities(model: Any, processor: Any, prompt: str, answer: str) -> list[float]:
    """The log-probability of each token of an answer, with a pass for each."""
    inputs = dict(processor(images=photo_of(), text=prompt, return_tensors="pt"))
    inputs["pixel_values"] = inputs["pixel_values"].double()
    scores = []
    for token in processor.tokenizer(answer, add_special_tokens=False)["input_ids"]:
        with torch.no_grad():
            logits = model(**inputs).logits[0, -1]
        scores.append(float(logits.log_softmax(-1)[token]))
        inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([[token]])], 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return scores


def test_words_of_several_tokens_are_one_and_marks_are_greyed() -> None:
    model, processor = made("LLaVA")
    answered = AnswerExplainer(model, processor)(photo_of(), "what is a zebra?", answer=ANSWER)
    assert [word.text for word in answered.words] == ["a", "zebra", "on", "the", "table", "."]
    reasons = [word.greyed for word in answered.words]
    assert reasons == ["article", "", "", "article", "", "punctuation"]
    assert answered["zebra"].tokens == ("▁zeb", "ra")
    tokens = log_probabilities(model, processor, answered.prompt or "", ANSWER)
    expected = [tokens[0], tokens[1] + tokens[2], *tokens[3:]]
    found = torch.tensor([word.probability for word in answered.words]).log()
    assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-5)
    words = ["USER", ":", "what", "is", "a", "zebra", "?", "ASSISTANT", ":"]
    assert [text for text, _ in answered.words[0].prompt_words] == words
    for number, word in enumerate(answered.words):
        assert len(word.words_before) == number
        assert sum(word.shares.values()) == pytest.approx(1)


def test_an_answer_is_saved_with_its_maps_and_a_record(tmp_path: Path) -> None:
    model, processor = made("LLaVA")
    asker = AnswerExplainer(model, processor)
    answered = asker(photo_of(), "what is a cup?", answer="a red cup", words="red, cup")
    paths = answered.save(tmp_path)
    record = json.loads((tmp_path / "image-answer.json").read_text())
    assert {path.name for path in paths} == {path.name for path in tmp_path.iterdir()}
    assert [word["text"] for word in record["words"]] == ["red", "cup"]
    assert record["texts"] == ["a", "red", "cup"]
    assert record["words"][1]["shares"] == dict(answered["cup"].shares)
    assert answered.overlay("red").size == (24, 16)
    assert answered.sheet().width >= 300
    assert answered.figure().axes


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    model, processor = made("LLaVA")
    asker = AnswerExplainer(model, processor)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"answer": " "}, "answer"),
        ({"answer": "a dog"}, "tokenizer"),
        ({"answer": "a <image> cup"}, "stands for a photo"),
        ({"ask": "what is a <image> cup?"}, "<image>"),
        ({"ask": "what is a <image> cup?", "answer": "a cup"}, "<image>"),
        ({"ask": ""}, "ask"),
        ({"answer": ANSWER, "words": "dog"}, "word must"),
        ({"answer": ANSWER, "words": [9]}, "word must"),
        ({"answer": ANSWER, "method": "nonsense"}, "nonsense"),
    ]
    for options, message in cases:
        with pytest.raises(explain.ExplainError, match=message) as raised:
            asker(photo_of(), **{"ask": "what is a cup?", **options})
        assert "\n" not in str(raised.value)
    processor.chat_template = processor.chat_template.replace("<image>", "")
    with pytest.raises(explain.TargetError, match="<image>"):
        asker(photo_of(), "what is a cup?")
    with pytest.raises(explain.ModelError, match="processor"):
        AnswerExplainer(model)
    words_alone = torch.nn.Module()
    words_alone.forward = lambda input_ids: input_ids  # type: ignore[method-assign]
    with pytest.raises(explain.ModelError, match="pixel_values"):
        AnswerExplainer(words_alone, processor)


def test_a_pair_of_an_image_processor_and_a_tokenizer_does_for_a_processor(tmp_path: Path) -> None:
    model, (photos, tokenizer) = made("ViT-GPT2")
    answer = "a red cup"
    answered = AnswerExplainer(model, (photos, tokenizer))(photo_of(), answer=answer)
    pixels = photos(images=photo_of(), return_tensors="pt")["pixel_values"].double()
    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    start = model.config.decoder.bos_token_id
    tokens = torch.tensor([[start, *ids]])
    with torch.no_grad():
        logits = model(pixel_values=pixels, decoder_input_ids=tokens).logits[0].log_softmax(-1)
    expected = [float(logits[place, token]) for place, token in enumerate(ids)]
    found = torch.tensor([word.probability for word in answered.words]).log()
    assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-5)
    for part in (model, photos, tokenizer):
        part.save_pretrained(tmp_path)
    beside = AnswerExplainer(str(tmp_path))(photo_of(), answer=answer, method="occlusion")
    assert [word.text for word in beside.words] == ["a", "red", "cup"]


def test_a_model_of_classes_is_refused_in_one_line() -> None:
    sizes = {**SIZES, "image_size": 16, "patch_size": 8, "vocab_size": 30}
    vilt = transformers.ViltForQuestionAnswering(transformers.ViltConfig(**sizes, num_labels=5))
    photos = transformers.ViltImageProcessor(size={"shortest_edge": 16}, size_divisor=8)
    processor = transformers.ViltProcessor(photos, tokenizer_of())
    with pytest.raises(explain.TargetError, match="logits of the next token") as raised:
        AnswerExplainer(vilt.eval(), processor)(photo_of(), "what is a cup?")
    assert "\n" not in str(raised.value)
    inputs = dict(processor(images=photo_of(), text="what is a cup?", return_tensors="pt"))
    a = explain.attribute(vilt, inputs, "saliency", target=2)
    assert a.values.shape == inputs["pixel_values"].shape


def word_gradients(model: Any, processor: Any, prompt: str) -> tuple[Any, Any]:
    """The pixels of a photo, and the gradients of the log-probability of "zebra" after "a", by a
    pass without a cache."""
    inputs = dict(processor(images=photo_of(), text=prompt, return_tensors="pt"))
    pixels = inputs["pixel_values"].double().requires_grad_()
    ids = processor.tokenizer(ANSWER, add_special_tokens=False)["input_ids"]
    prompt_length = inputs["input_ids"].shape[1]
    answer = torch.tensor([ids[:3]])
    longer = torch.cat([inputs["input_ids"], answer], 1)
    for name in ("attention_mask", "mm_token_type_ids", "token_type_ids"):
        if name in inputs:
            marks = torch.full_like(answer, name == "attention_mask")
            inputs[name] = torch.cat([inputs[name], marks], 1)
    inputs |= {"pixel_values": pixels, "input_ids": longer}
    logits = model(**inputs).logits[0, prompt_length - 1 :].log_softmax(-1)
    score = logits[1, ids[1]] + logits[2, ids[2]]
    return pixels, torch.autograd.grad(score, pixels)[0]


@pytest.mark.parametrize("name", ["LLaVA", "Qwen2.5-VL", "InternVL", "Idefics3"])
def test_gradients_are_those_of_plain_autograd_laid_on_the_photo(name: str) -> None:
    model, processor = made(name)
    asker = AnswerExplainer(model, processor)
    answered = asker(
        photo_of(), "what is a zebra?", answer=ANSWER, words="zebra", method="inputxgradient"
    )
    pixels, gradients = word_gradients(model, processor, answered.prompt or "")
    expected = (pixels * gradients).detach()
    values = answered.words[0].attribution.values
    assert_close(values.sum(), expected.sum(), rtol=1e-6, atol=1e-8)
    sampling = answered.scorer.reading.sampling
    if expected.numel() == sampling.pixels.numel() and name != "Qwen2.5-VL":
        laid = sampling.on_photo(expected.reshape(1, *sampling.pixels.shape))
        assert_close(values, laid, rtol=1e-4, atol=1e-8)


def test_several_photos_are_as_each_alone() -> None:
    model, processor = made("LLaVA")
    asker = AnswerExplainer(model, processor)
    photos = [photo_of(24, 16), photo_of(16, 30, seed=1)]
    together = asker(photos, "what is a cup?", answer="a red cup")
    for photo, other, answered in zip(photos, photos[::-1], together, strict=True):
        alone = asker(photo, "what is a cup?", answer="a red cup", other=other)
        for word, expected in zip(answered.words, alone.words, strict=True):
            assert_close(word.attribution.values, expected.attribution.values)
            assert word.to_dict() == expected.to_dict()
    with pytest.raises(explain.PhotosError, match="photo 1"):
        asker([photos[0], b"nothing"], "what is a cup?", answer="a cup", other=photos[1])


def test_all_words_share_their_passes() -> None:
    model, processor = made("BLIP")
    asker = AnswerExplainer(model, processor)
    passes = set()
    for words in (["table"], None):
        answered = asker(
            photo_of(), "what is a cup?", answer=ANSWER, words=words, method="occlusion"
        )
        passes.add(answered.passes)
    assert len(passes) == 1


def test_the_smallest_evidence_keeps_a_words_probability_within_its_budget() -> None:
    model, processor = made("LLaVA")
    for weight in model.model.multi_modal_projector.parameters():
        weight.data *= 5  # for a word that depends on the photo
    answered = AnswerExplainer(model, processor)(
        photo_of(), "what is a cup?", answer="a red cup", words="red"
    )
    scorer = answered.scorer
    photo = scorer.photo
    blank = photo.mean((2, 3), keepdim=True).expand_as(photo)
    found = answered.evidence("red", budget=300, squares=3)
    keep = found.mask.to(photo)
    alone = scorer(photo * keep + blank * (1 - keep))[0, 1].exp()
    assert found.alone == pytest.approx(float(alone), rel=1e-5)
    assert float(alone) >= 0.9 * answered["red"].probability
    assert found.passes <= 300
    assert 0 < found.size < 1
    with pytest.raises(explain.MethodError, match="kind"):
        answered.evidence("red", "best")  # type: ignore[arg-type]


def test_models_in_half_precision_are_explained_nearly_as_in_double() -> None:
    model, processor = made("LLaVA")
    asker = AnswerExplainer(model, processor)
    exact = asker(photo_of(), "what is a cup?", answer="a red cup", method="occlusion")
    model.bfloat16()
    halves = asker(photo_of(), "what is a cup?", answer="a red cup", method="occlusion")
    for word, expected in zip(halves.words, exact.words, strict=True):
        assert word.probability == pytest.approx(expected.probability, rel=0.1)
    both = [
        torch.cat([word.attribution.values.double().flatten() for word in answered.words])
        for answered in (halves, exact)
    ]
    assert float(torch.corrcoef(torch.stack(both))[0, 1]) > 0.9
