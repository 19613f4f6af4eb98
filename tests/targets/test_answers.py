"""Answers in words as targets, compared with plain code on models of transformers."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain._utils.nested import first_tensor
from explain.targets import Answer

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
ANSWER = (8, 9, 10)
OF_QWEN = [1, 36, *[39] * 6, 37, 5, 6]
PROMPT = {
    "LLaVA": [1, 39, 39, 39, 39, 5, 6, 7],
    "PaliGemma": [39, 39, 39, 39, 1, 5, 6, 7],
    "BLIP": [1, 5, 6, 7],
    "Qwen2.5-VL": OF_QWEN,
}


IDS = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WORDS = {**SIZES, **IDS, "num_key_value_heads": 1}
PHOTOS = {**SIZES, "image_size": 16, "patch_size": 8}


def llava(transformers: Any) -> Any:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**PHOTOS),
        text_config=transformers.LlamaConfig(**WORDS),
        image_token_id=39,
    )
    return transformers.LlavaForConditionalGeneration(config)


def paligemma(transformers: Any) -> Any:
    words = {**WORDS, "bos_token_id": 2, "eos_token_id": 1}
    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**PHOTOS, projection_dim=16),
        text_config=transformers.GemmaConfig(**words, head_dim=8),
        image_token_id=39,
        projection_dim=16,
        hidden_size=16,
    )
    return transformers.PaliGemmaForConditionalGeneration(config)


def blip(transformers: Any) -> Any:
    words = {**SIZES, **IDS, "sep_token_id": 2, "encoder_hidden_size": 16}
    config = transformers.BlipConfig(
        text_config={**words, "max_position_embeddings": 64}, vision_config=PHOTOS
    )
    return transformers.BlipForConditionalGeneration(config)


def qwen(transformers: Any) -> Any:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    photos = {"depth": 2, "hidden_size": 16, "num_heads": 2, "patch_size": 4}
    photos |= {"window_size": 16, "fullatt_block_indexes": [1], "out_hidden_size": 16}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**WORDS, "rope_parameters": rope},
        vision_config=photos,
        image_token_id=39,
        video_token_id=38,
        vision_start_token_id=36,
        vision_end_token_id=37,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def packed(photo: Tensor) -> Tensor:
    """The patches of 4 x 4 pixels of a photo, blocks of 2 x 2 of them one after the other, each
    twice: for Qwen."""
    rows = []
    for top, left in product(range(0, 16, 8), range(0, 24, 8)):
        for y, x in product((top, top + 4), (left, left + 4)):
            patch = photo[0, :, y : y + 4, x : x + 4]
            rows.append(torch.stack([patch, patch], 1).flatten())
    return torch.stack(rows)


MODELS = {"LLaVA": llava, "PaliGemma": paligemma, "BLIP": blip, "Qwen2.5-VL": qwen}


@pytest.fixture(params=MODELS, scope="module")
def prompted(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers", reason="transformers is an extra")
    torch.manual_seed(5)
    model = MODELS[request.param](transformers)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
    is_qwen = "Qwen" in request.param
    model.photo = torch.randn(1, 3, 16, 24 if is_qwen else 16, dtype=torch.float64)
    ids = torch.tensor([PROMPT[request.param]])
    inputs = {"pixel_values": model.photo, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if is_qwen:
        inputs["pixel_values"] = packed(model.photo)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 6]])
        inputs["mm_token_type_ids"] = (ids == 39).long()
    if request.param == "PaliGemma":
        inputs["token_type_ids"] = torch.zeros_like(ids)
    return model.double().eval(), inputs


def run(model: Any, inputs: dict[str, Tensor], photo: Tensor, ids: Tensor, **options: Any) -> Any:
    """The output of a model for a photo and tokens, by its own interface."""
    more = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": photo}
    if "token_type_ids" in inputs:  # the answer is marked by ones
        more["token_type_ids"] = (
            torch.arange(ids.shape[1])[None] >= inputs["input_ids"].shape[1]
        ).long()
    if "image_grid_thw" in inputs:
        more |= {"pixel_values": packed(photo), "image_grid_thw": inputs["image_grid_thw"]}
        more["mm_token_type_ids"] = (ids == 39).long()
    return model(**more, **options)


def one_by_one(model: Any, inputs: dict[str, Tensor], photo: Tensor) -> Tensor:
    """The log-probability of each token of the answer, with a pass for each."""
    scores = []
    ids = inputs["input_ids"]
    for token in ANSWER:
        scores.append(run(model, inputs, photo, ids).logits[:, -1].log_softmax(-1)[:, token])
        ids = torch.cat([ids, torch.tensor([[token]])], 1)
    return torch.stack(scores, 1)


def test_the_score_and_the_gradient_are_those_of_a_pass_for_each_word(prompted: Any) -> None:
    model, inputs = prompted
    photo = model.photo.clone().requires_grad_()
    expected = one_by_one(model, inputs, photo)
    targets = [Answer(ANSWER, word=word) for word in (None, 0, 1, 2)]
    maps = explain.attribute(model, inputs, "inputxgradient", targets=targets)
    for attribution, score in zip(maps, [expected.sum(1), *expected.unbind(1)], strict=True):
        (gradient,) = torch.autograd.grad(score.sum(), photo, retain_graph=True)
        assert_close(attribution.score, score.detach(), rtol=1e-6, atol=1e-8)
        # norms in float32
        assert_close(attribution.values, gradient * photo.detach(), rtol=1e-4, atol=1e-7)


# Qwen counts positions by the mask, and wants photos packed one behind the other.
@pytest.mark.parametrize(
    ("prompted", "masked"),
    [("LLaVA", True), ("LLaVA", False), ("PaliGemma", True), ("BLIP", False)],
    indirect=["prompted"],
)
def test_prompts_that_are_filled_up_on_the_right_are_read_where_they_end(
    prompted: Any, masked: bool
) -> None:
    model, inputs = prompted
    ids = torch.cat([inputs["input_ids"], torch.tensor([[11, 12]])], 1)
    batch = {"pixel_values": torch.cat([model.photo, -model.photo]), "input_ids": ids.repeat(2, 1)}
    batch["input_ids"][1, -2:] = 0  # the second prompt is shorter
    if masked:
        batch["attention_mask"] = (batch["input_ids"] > 0).long()
    methods = ["inputxgradient", "occlusion(window=8, stride=8, baseline=0)"]
    if "token_type_ids" in inputs:
        batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    elif 39 in ids:
        methods.append("rollout")
    together = explain.attribute(model, batch, methods, target=Answer(ANSWER))
    for i, prompt in enumerate((ids, inputs["input_ids"])):
        single = {name: values[i : i + 1, : prompt.shape[1]] for name, values in batch.items()}
        single["attention_mask"] = torch.ones_like(prompt)
        alone = explain.attribute(model, single, methods, target=Answer(ANSWER))
        for name, attribution in alone.items():
            assert_close(together[name].values[i], attribution.values[0], rtol=1e-4, atol=1e-7)
            assert_close(together[name].score[i], attribution.score[0])
    filled = {name: values[1:] for name, values in batch.items()}
    free = [explain.attribute(model, x, "saliency", target=Answer()) for x in (filled, single)]
    assert_close(free[0].score, free[1].score)


@pytest.mark.parametrize("prompted", ["LLaVA"], indirect=True)
def test_positions_go_on_where_those_of_the_prompt_end(prompted: Any) -> None:
    model, inputs = prompted
    places = torch.arange(inputs["input_ids"].shape[1])[None] + 5
    further = torch.cat([places, places[:, -1:] + torch.tensor([[1, 2, 3]])], 1)
    longer = torch.cat([inputs["input_ids"], torch.tensor([ANSWER])], 1)
    shares = run(model, inputs, model.photo, longer, position_ids=further).logits.log_softmax(-1)
    first = places.shape[1] - 1
    expected = sum(shares[0, first + k, token] for k, token in enumerate(ANSWER))
    maps = explain.attribute(
        model, {**inputs, "position_ids": places}, "saliency", target=Answer(ANSWER)
    )
    assert_close(maps.score[0], expected.detach())


def test_words_after_a_word_have_no_part_in_it(prompted: Any) -> None:
    model, inputs = prompted
    for word in range(3):
        maps = explain.attribute(
            model, inputs, "inputxgradient", target=Answer(ANSWER, word=word, words=True)
        )
        values = [value for _, value in maps.words[0]]
        assert [name for name, _ in maps.words[0]][-3:] == ["8", "9", "10"]
        assert values[-3:][word:] == [0.0] * (3 - word)
        assert all(values[-3:][:word])
        assert float(sum(maps.shares.values())) == pytest.approx(1)


def followed(matrices: list[Tensor]) -> Tensor:
    """The product of a matrix and the identity for each attention, with rows that add up to one."""
    product = torch.eye(len(matrices[0]), dtype=torch.float64)
    for matrix in matrices:
        mixed = matrix + torch.eye(len(matrix), dtype=torch.float64)
        product = torch.stack([row / row.sum() for row in mixed]) @ product
    return product


@pytest.mark.parametrize("prompted", ["BLIP"], indirect=True)
def test_where_words_look_at_the_photo_the_answer_is_the_mean_of_its_tokens(prompted: Any) -> None:
    model, inputs = prompted
    first = inputs["input_ids"].shape[1] - 1
    names = ["cheferbimodal", *(f"cheferbimodal(token={first + word})" for word in range(3))]
    maps = [explain.attribute(model, inputs, name, target=Answer(ANSWER)).values for name in names]
    assert_close(maps[0], sum(maps[1:]) / 3)


@pytest.mark.filterwarnings("ignore:gradeclip is zero everywhere")
@pytest.mark.parametrize("prompted", ["LLaVA", "PaliGemma", "Qwen2.5-VL"], indirect=True)
def test_attention_methods_follow_the_language_model_from_the_tokens_that_say_a_word(
    prompted: Any,
) -> None:
    model, inputs = prompted
    ids = torch.cat([inputs["input_ids"], torch.tensor([ANSWER])], 1)
    first = inputs["input_ids"].shape[1] - 1
    places = (ids[0] == 39).nonzero()[:, 0]
    model.set_attn_implementation("eager")
    output = run(model, inputs, model.photo.clone().requires_grad_(), ids, output_attentions=True)
    score = output.logits[0, first + 1].log_softmax(-1)[ANSWER[1]]
    gradients = torch.autograd.grad(score, output.attentions)
    model.set_attn_implementation("sdpa")
    weights = [each[0].detach() for each in output.attentions]
    weighted = [(a * g[0]).clamp(min=0).mean(0) for a, g in zip(weights, gradients, strict=True)]
    expected = {
        "rollout": followed([a.mean(0) for a in weights])[first : first + 3].mean(0)[places],
        "gradientrollout": followed(weighted)[first + 1][places],
    }
    maps = explain.attribute(model, inputs, [*expected, "gradeclip"], target=Answer(ANSWER, word=1))
    for name, values in expected.items():
        grid = values.to(maps[name].values).reshape(1, 2, -1)
        assert_close(maps[name].values, grid, rtol=1e-4, atol=1e-7)
        assert maps[name].heatmap.shape[1:] == model.photo.shape[2:]
    both = explain.attribute(model, inputs, "gradeclip", target=Answer(ANSWER, word=1, words=True))
    assert_close(both.values, maps["gradeclip"].values)
    assert not both.parts["words"].values[0, places].any()
    assert [value for _, value in both.words[0]][-2:] == [0, 0]


@pytest.mark.parametrize("prompted", ["PaliGemma", "Qwen2.5-VL"], indirect=True)
def test_the_models_own_answer_is_its_most_probable_words(prompted: Any) -> None:
    model, inputs = prompted
    ids = inputs["input_ids"]
    end = 1 if "token_type_ids" in inputs else 2
    answer: list[int] = []
    while len(answer) < 32:
        more = torch.cat([ids, torch.tensor([answer], dtype=torch.long)], 1)
        logits = run(model, inputs, model.photo, more).logits
        best = int(logits[0, -1, :39].argmax())  # the last token stands for patches
        if best == end and answer:
            break
        answer.append(best)
    free, same = (
        explain.attribute(model, inputs, "saliency", target=Answer(text)) for text in (None, answer)
    )
    assert_close(free.score, same.score)


@pytest.mark.parametrize("prompted", ["Qwen2.5-VL"], indirect=True)
def test_cams_explain_a_layer_that_keeps_images_apart_and_else_say_what_to_use(
    prompted: Any,
) -> None:
    model, inputs = prompted
    maps = explain.attribute(model, inputs, "hirescam(relu=False)", target=Answer(ANSWER))
    # of the language model, where the photo has 2 x 3 tokens
    layer = model.get_submodule(maps.layer)
    kept: list[Tensor] = []
    handle = layer.register_forward_hook(
        lambda module, args, output: kept.append(first_tensor(output))
    )
    ids = inputs["input_ids"]
    answer = torch.tensor([ANSWER])
    scores = run(model, inputs, model.photo, torch.cat([ids, answer], 1)).logits[0].log_softmax(1)
    handle.remove()
    score = scores[ids.shape[1] - 1 : -1].gather(1, answer.mT).sum()
    (gradients,) = torch.autograd.grad(score, kept[0])
    of_photo = (kept[0] * gradients).sum(2)[0, : ids.shape[1]][inputs["mm_token_type_ids"][0] == 1]
    assert_close(maps.values[0], of_photo.reshape(2, 3))
    with pytest.raises(explain.LayerError, match="saliency"):  # all patches are one batch
        layer = "model.visual.merger"
        explain.attribute(model, inputs, "gradcam", target=Answer(ANSWER), layer=layer)


@pytest.mark.parametrize("prompted", ["LLaVA"], indirect=True)
def test_what_does_not_fit_is_refused(prompted: Any) -> None:
    model, inputs = prompted
    cases = [
        (inputs, [Answer(ANSWER, word=3)], "3 words"),
        (inputs, [Answer(ANSWER), Answer((1, 2))], "one answer"),
        (inputs, [Answer("a cat")], "tokenizer"),
        (model.photo, [Answer(ANSWER)], "input_ids"),
        (inputs, [Answer((8, 39))], "token that stands for a photo"),
    ]
    for x, targets, message in cases:
        with pytest.raises(explain.ExplainError, match=message):
            explain.attribute(model, x, "saliency", targets=targets)
    two = {name: torch.cat([value, value]) for name, value in inputs.items()}
    with pytest.raises(explain.TargetError, match="x must hold one photo"):
        explain.attribute(model, two, "saliency", target=Answer())
    without_photo = {**inputs, "input_ids": torch.full_like(inputs["input_ids"], 5)}
    with pytest.raises(ValueError, match="tokens"):  # of the model itself
        explain.attribute(model, without_photo, "saliency", target=Answer())
    with pytest.raises(explain.TargetError, match="word"):
        Answer("a cat", word=-1)


@pytest.mark.parametrize("prompted", ["LLaVA"], indirect=True)
@pytest.mark.parametrize(("ids", "got"), [([8, 3], "unknown"), ([], "none")])
def test_an_answer_that_the_tokenizer_cannot_make_is_refused(
    prompted: Any, ids: list[int], got: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = prompted

    def tokenizer(text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": ids}

    tokenizer.unk_token_id = 3  # type: ignore[attr-defined]
    monkeypatch.setattr(model, "tokenizer", tokenizer, raising=False)
    with pytest.raises(explain.TargetError, match=got):
        explain.attribute(model, inputs, "saliency", target=Answer("a cat"))


def trocr(transformers: Any) -> Any:
    words = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2}
    words |= {"decoder_ffn_dim": 32, "max_position_embeddings": 64, "decoder_start_token_id": 2}
    decoder = transformers.TrOCRConfig(**{**IDS, **words}, cross_attention_hidden_size=16)
    return transformers.ViTConfig(**PHOTOS), decoder


def donut(transformers: Any) -> Any:
    photos = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "window_size": 4}
    encoder = transformers.DonutSwinConfig(**photos, depths=[1, 1], num_heads=[2, 2])
    words = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2}
    words |= {"decoder_ffn_dim": 32, "max_position_embeddings": 64}
    return encoder, transformers.MBartConfig(**{**IDS, **words})


@pytest.mark.parametrize(("make", "start"), [(trocr, 2), (donut, 1)], ids=["TrOCR", "Donut"])
def test_a_decoder_beside_a_photo_needs_no_prompt_and_takes_one(make: Any, start: int) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is an extra")
    torch.manual_seed(6)
    of_parts = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs
    model = transformers.VisionEncoderDecoderModel(config=of_parts(*make(transformers)))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
    model = model.double().eval()
    photos = torch.randn(2, 3, 16, 16, dtype=torch.float64, requires_grad=True)
    prompts = torch.tensor([[5, 6], [7, 6]])
    cases = [
        (photos.detach(), torch.tensor([[start], [start]])),
        ({"pixel_values": photos.detach()}, torch.tensor([[start], [start]])),
        ({"pixel_values": photos.detach(), "decoder_input_ids": prompts}, prompts),
    ]
    for inputs, prompt in cases:
        ids = prompt
        expected = torch.zeros(2, dtype=torch.float64)
        for token in ANSWER:
            logits = model(pixel_values=photos, decoder_input_ids=ids).logits[:, -1]
            expected = expected + logits.log_softmax(-1)[:, token]
            ids = torch.cat([ids, torch.full((2, 1), token)], 1)
        (gradient,) = torch.autograd.grad(expected.sum(), photos)
        maps = explain.attribute(model, inputs, "inputxgradient", target=Answer(ANSWER))
        assert_close(maps.score, expected.detach())
        assert_close(maps.values, gradient * photos.detach())
    answer: list[int] = []
    while len(answer) < 32:
        ids = torch.tensor([[start, *answer]])
        best = int(model(pixel_values=photos[:1], decoder_input_ids=ids).logits[0, -1].argmax())
        if best == IDS["eos_token_id"] and answer:
            break
        answer.append(best)
    x = photos.detach()[:1]
    free, same = (
        explain.attribute(model, x, "saliency", target=Answer(text)) for text in (None, answer)
    )
    assert_close(free.score, same.score)
    with_words = explain.attribute(
        model, x, "inputxgradient", target=Answer(ANSWER, word=2, words=True)
    )
    assert with_words.values.shape == x.shape
    assert_close(sum(with_words.shares.values()), torch.ones(1), check_dtype=False)


def git(transformers: Any) -> Any:
    config = transformers.GitConfig(
        **SIZES, **IDS, vision_config=PHOTOS, num_image_with_embedding=0
    )
    return transformers.GitForCausalLM(config)


@pytest.mark.parametrize("make", [git, blip], ids=["GIT", "BLIP"])
def test_captioners_need_no_prompt_and_may_give_logits_of_the_photo_too(make: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is an extra")
    torch.manual_seed(7)
    model = make(transformers).double().eval()
    photo = torch.randn(1, 3, 16, 16, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[1]])
    expected = torch.zeros(1, dtype=torch.float64)
    for token in ANSWER:
        logits = model(pixel_values=photo, input_ids=ids).logits[:, -1]
        expected = expected + logits.log_softmax(-1)[:, token]
        ids = torch.cat([ids, torch.tensor([[token]])], 1)
    (gradient,) = torch.autograd.grad(expected.sum(), photo)
    x = photo.detach()
    for inputs in ({"pixel_values": x}, {"pixel_values": x, "input_ids": torch.tensor([[1]])}):
        maps = explain.attribute(model, inputs, "inputxgradient", target=Answer(ANSWER))
        assert_close(maps.score, expected.detach())
        assert_close(maps.values, gradient * x)


def test_the_queries_of_a_bridge_lie_nowhere_on_the_photo() -> None:
    """BLIP-2: 32 queries look at the photo, of which 25 would make 5 x 5."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    parts = {
        "vision_config": {**small, "intermediate_size": 16, "image_size": 32, "patch_size": 4},
        "qformer_config": {**small, "intermediate_size": 16, "encoder_hidden_size": 16},
        "text_config": {**small, "ffn_dim": 16, "vocab_size": 60, "word_embed_proj_dim": 16},
    }
    config = transformers.Blip2Config(**parts, num_query_tokens=32, image_token_index=59)
    config.text_config.model_type = "opt"
    model = transformers.Blip2ForConditionalGeneration(config).eval()
    ids = torch.tensor([[59] * 32 + [5, 6]])
    photo = torch.rand(1, 3, 32, 32)
    inputs = {"pixel_values": photo, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    target = Answer(torch.tensor([[8, 9]]))
    for method in ("rollout", "gradientrollout", "gradeclip"):
        with pytest.raises(explain.ExplainError, match="nowhere"):
            explain.attribute(model, inputs, method, target=target)
    with pytest.raises(explain.LayerError):
        explain.attribute(model, inputs, "gradcam", target=target, layer="language_projection")
    assert explain.attribute(model, inputs, "gradcam", target=target).values.shape == (1, 8, 8)
