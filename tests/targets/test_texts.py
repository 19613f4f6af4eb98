"""Texts as targets, compared with plain code on the outputs of transformers' and open_clip's own
models."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain.targets import Text
from explain.targets.text import image_scorer
from explain.targets.tokenizer import words_of

BUS = (1, 5, 6, 7, 2)
TRUCK = (1, 8, 9, 7, 2)
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
WORDS = {
    "vocab_size": 50,
    "max_position_embeddings": 5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PICTURES = {**SIZES, "image_size": 16, "patch_size": 4}


class Tokenizer:
    """Words as tokens, in the manner of transformers."""

    all_special_ids = (0, 1, 2)
    pad_token_id = 0

    def __call__(self, texts: list[str], max_length: int, **options: Any) -> dict[str, Tensor]:
        rows = [[1, *(3 + len(word) for word in text.split()), 2] for text in texts]
        return {"input_ids": torch.tensor([(row + [0] * max_length)[:max_length] for row in rows])}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [f"length{each - 3}" for each in ids]


def of_transformers(kind: str) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is an extra")
    config = getattr(transformers, f"{kind}Config")
    projected = {} if kind == "Siglip" else {"projection_dim": 8}
    return getattr(transformers, f"{kind}Model")(
        config(text_config={**SIZES, **WORDS}, vision_config=PICTURES, **projected)
    )


def of_open_clip(kind: str) -> Any:
    open_clip = pytest.importorskip("open_clip", reason="open_clip is an extra")
    pictures = {"image_size": 16, "layers": 3, "width": 16, "head_width": 8, "patch_size": 4}
    words = {"context_length": 5, "vocab_size": 50, "width": 16, "heads": 2, "layers": 3}
    kinds = {"CLIP": open_clip.CLIP, "CustomTextCLIP": open_clip.CustomTextCLIP}
    return kinds[kind](8, pictures, words)


MODELS = {
    "CLIP": lambda: of_transformers("CLIP"),
    "SigLIP": lambda: of_transformers("Siglip"),
    "ChineseCLIP": lambda: of_transformers("ChineseCLIP"),
    "open_clip": lambda: of_open_clip("CLIP"),
    "open_clip custom": lambda: of_open_clip("CustomTextCLIP"),
}


@pytest.fixture(params=MODELS, scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(3)
    model = MODELS[request.param]()
    for parameter in model.parameters():  # transformers' initial values are close to zero
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(
        2, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def logits(model: Any, x: Tensor, ids: tuple[int, ...]) -> Tensor:
    """What the whole model says of photos and a text."""
    tokens = torch.tensor([ids])
    if hasattr(model, "get_text_features"):
        return model(input_ids=tokens, pixel_values=x).logits_per_image[:, 0]
    photos, texts, scale = model(x, tokens)[:3]
    return scale * (photos * texts).sum(-1)


def test_the_score_and_the_gradient_are_those_of_the_whole_model(model: Any, x: Tensor) -> None:
    start = x.clone().requires_grad_()
    score = logits(model, start, BUS) - 2 * logits(model, start, TRUCK)
    (gradient,) = torch.autograd.grad(score.sum(), start)
    maps = explain.attribute(model, x, "inputxgradient", target=Text(BUS) - 2 * Text(TRUCK))
    assert_close(maps.score, score.detach(), rtol=1e-9, atol=1e-9)
    assert_close(maps.values, gradient * x, rtol=1e-7, atol=1e-9)
    assert maps.target == "tokens 1 5 6 7 2 − 2 × tokens 1 8 9 7 2"


def test_words_and_photo_come_from_one_pass(model: Any, x: Tensor) -> None:
    embedding = max(
        (m for m in model.modules() if isinstance(m, nn.Embedding)), key=lambda m: m.num_embeddings
    )
    rows = embedding(torch.tensor([BUS])).detach().requires_grad_()
    start = x.clone().requires_grad_()
    handle = embedding.register_forward_hook(lambda module, args, output: rows)
    of_photo, of_words = torch.autograd.grad(logits(model, start, BUS)[0], (start, rows))
    handle.remove()
    maps = explain.attribute(model, x, "inputxgradient", target=Text(BUS, words=True))
    assert_close(maps.values[0], (of_photo * x)[0], rtol=1e-7, atol=1e-9)
    values = torch.tensor([value for _, value in maps.words[0]], dtype=torch.float64)
    assert_close(values, (of_words * rows)[0].sum(1).detach(), rtol=1e-5, atol=1e-6)
    assert not any(m._forward_hooks for m in model.modules())


def test_occlusion_covers_the_photo_alone(model: Any, x: Tensor) -> None:
    maps = explain.attribute(
        model, x, "occlusion(window=8, stride=8, baseline=0)", target=Text(BUS)
    )
    covered = x.clone()
    covered[..., 8:, :8] = 0
    drop = logits(model, x, BUS) - logits(model, covered, BUS)
    assert_close(maps.values.reshape(2, -1, 16, 16)[:, 0, 12, 4], drop.detach())
    with pytest.raises(explain.MethodError, match="leave out words=True"):
        explain.attribute(model, x, "occlusion(window=8, stride=8)", target=Text(BUS, words=True))


@pytest.mark.filterwarnings("ignore:gradeclip is zero everywhere")
def test_methods_for_transformers_explain_the_image_tower(model: Any, x: Tensor) -> None:
    methods = ["gradcam", "gradeclip", "attnlrp", "rollout"]
    one, both = (explain.attribute(model, each, methods, target=Text(BUS)) for each in (x[:1], x))
    for name, attribution in both.items():
        assert attribution.heatmap.shape == (2, 16, 16)
        assert_close(attribution.values[:1], one[name].values, rtol=1e-6, atol=1e-9)
    # the tokens of a late block, though there are no class scores
    assert re.search(r"\.[12]\.|post", both["gradcam"].layer)
    assert "text" not in both["gradcam"].layer


def test_labels_are_zero_shot_classes(model: Any, x: Tensor) -> None:
    model.tokenizer = Tokenizer()
    labels = ["a bus", "some trucks there", "no"]
    ids = Tokenizer()(labels, max_length=5)["input_ids"].tolist()
    if not hasattr(model, "get_text_features"):  # in the manner of open_clip
        model.tokenizer = lambda texts: Tokenizer()(texts, max_length=5)["input_ids"]
    scorer = image_scorer(model, labels=labels)
    expected = torch.stack([logits(model, x, tuple(row)) for row in ids], 1)
    assert_close(scorer(x)["logits"], expected)
    of_class = explain.attribute(scorer, x, "saliency", target=1)
    of_text = explain.attribute(model, x, "saliency", target=Text("some trucks there"))
    assert_close(of_class.values, of_text.values)
    del model.tokenizer


def test_a_text_is_split_into_texts_without_one_of_its_words() -> None:
    shorter = [text.text for text in Text("a cup of coffee").without_words()]
    assert shorter == ["cup of coffee", "a of coffee", "a cup coffee", "a cup of"]
    assert [text.text for text in Text("a cup").without_words()] == ["cup", "a"]
    for whole in (Text("bus"), Text(BUS)):
        with pytest.raises(explain.TargetError, match="words"):
            whole.without_words()


def test_bad_texts_are_refused() -> None:
    for wrong in ("", " ", (), (1.5,), 3, None, torch.tensor([[1, 4], [2, 3]]), torch.tensor(5)):
        with pytest.raises(explain.TargetError, match="text must"):
            Text(wrong)  # type: ignore[arg-type]
    assert Text(torch.tensor([[1, 4, 2]])) == Text((1, 4, 2))
    x = torch.rand(1, 3, 8, 8)
    for model, word in ((nn.Flatten(), "CLIP"), (Colours(), "tokenizer")):
        with pytest.raises(explain.ModelError, match=word):
            explain.attribute(model, x, "saliency", target=Text("a bus"))


def test_tokens_make_words() -> None:
    assert words_of(["", "a</w>", "bu", "s</w>", "is</w>", ""]) == [[1], [2, 3], [4]]
    assert words_of(["Ġa", "Ġze", "bra"]) == [[0], [1, 2]]
    assert words_of(["a", "##b", "", "c"]) == [[0, 1], [3]]


class Colours(nn.Module):
    """Features of photos by their channels' means, and of texts by the mean of three numbers for
    each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 3)

    def encode_image(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))

    def encode_text(self, ids: Tensor, **others: Tensor) -> Tensor:
        return self.embedding(ids).mean(1)


@pytest.mark.parametrize("padding", ["[PAD]", "[EOS]", None])
def test_a_text_that_is_cut_is_said_so(padding: str | None) -> None:
    """By a tokenizer of transformers, whose padding may be the token of the end, and by one that
    only gives ids."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[BOS]", "[EOS]", "a", "red", "bus", "and", "truck"]
    numbers = {word: number for number, word in enumerate(words)}
    rules = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="a"))
    rules.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    rules.post_processor = tokenizers.processors.TemplateProcessing(
        single="[BOS] $A [EOS]", special_tokens=[("[BOS]", 1), ("[EOS]", 2)]
    )
    ends = {"pad_token": padding or "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=rules, **ends)
    how = {"padding": "max_length", "truncation": True, "max_length": 5, "return_tensors": "pt"}
    model: Any = Colours().eval()
    model.tokenizer = theirs if padding else lambda texts: theirs(texts, **how)["input_ids"]
    model.config = SimpleNamespace(max_position_embeddings=5)
    x = torch.rand(1, 3, 4, 4)
    fits = explain.attribute(model, x, "saliency", target=Text("a red bus"))
    with pytest.warns(explain.ExplainWarning, match="more than the 5 tokens"):
        cut = explain.attribute(model, x, "saliency", target=Text("a red bus and truck"))
    assert_close(cut.values, fits.values)
