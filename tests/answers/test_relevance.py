"""AttnLRP of a word, compared with value times gradient of the model that says its rules."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from explain.answers import AnswerExplainer
from explain.methods import LRP
from explain.relevance.composites import attn_lrp
from tests.answers.toys import made, photo_of, transformers
from tests.relevance.test_relevance import half

eager_mask = pytest.importorskip("transformers.masking_utils").eager_mask


def attended(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attention ``(N, heads, L, D)``: of each product two halves, of the softmax the derivative."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    logits = half(query) @ half(key).mT * scale
    if attention_mask is not None:
        logits = logits + attention_mask[..., : key.shape[2]]
    return (half(logits.softmax(-1)) @ half(value)).transpose(1, 2).contiguous(), None


def activated(plain: Any, x: Tensor) -> Tensor:
    """An activation hands on what arrives."""
    return x * (plain(x) / x).detach()


def layer_norm(norm: Any, x: Tensor) -> Tensor:
    """The deviation is constant."""
    centred = x - x.mean(-1, keepdim=True)
    deviation = (x.var(-1, correction=0, keepdim=True) + norm.eps).sqrt().detach()
    return norm.weight * centred / deviation + norm.bias


def rms_norm(norm: Any, x: Tensor) -> Tensor:
    epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    root = (x.square().mean(-1, keepdim=True) + epsilon).sqrt().detach()
    weight = norm.weight + 1 if "Gemma" in type(norm).__name__ else norm.weight
    return weight * x / root


def gated(mlp: Any, x: Tensor) -> Tensor:
    """Of the product of the gate two halves."""
    return mlp.down_proj(half(mlp.act_fn(mlp.gate_proj(x))) * half(mlp.up_proj(x)))


def speak_by_the_rules(model: Any) -> None:
    """Let gradients of a model be the shares of relevance by the paper."""
    transformers.AttentionInterface.register("halves", attended)
    transformers.AttentionMaskInterface.register("halves", eager_mask)
    model.set_attn_implementation("halves")
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.LayerNorm):
            module.forward = partial(layer_norm, module)
        elif kind.endswith("RMSNorm"):
            module.forward = partial(rms_norm, module)
        elif hasattr(module, "gate_proj"):
            module.forward = partial(gated, module)
        elif name.endswith(("act_fn", "activation_fn", "projector.act")):
            module.forward = partial(activated, module.forward)


@pytest.mark.parametrize("name", ["LLaVA", "PaliGemma", "Idefics3"])
def test_attnlrp_of_a_word_is_its_paper_on_an_image_text_model(name: str) -> None:
    model, processor = made(name)
    photo = photo_of(16, 16)
    method = LRP(attn_lrp(epsilon=0))
    asker = AnswerExplainer(model, processor)
    answered = asker(photo, "what is a cup?", answer="a red cup", words="red", method=method)
    reading = answered.scorer.reading
    ids = answered.scorer.ids
    pixels = reading.sampling.pixels.clone().requires_grad_()
    inputs = {**reading.fixed, **reading.tokens, "pixel_values": pixels}
    prompt = inputs["input_ids"]
    inputs["input_ids"] = torch.cat([prompt, torch.tensor([ids])], 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if "token_type_ids" in inputs:  # the answer is marked by ones
        marks = inputs["token_type_ids"]
        inputs["token_type_ids"] = torch.cat([marks, torch.ones_like(marks[:, : len(ids)])], 1)
    plain = model(**inputs).logits
    speak_by_the_rules(model)
    logits = model(**inputs).logits
    assert_close(logits, plain, rtol=1e-5, atol=1e-5)  # its norms are in single precision
    score = logits[0, prompt.shape[1]].log_softmax(-1)[ids[1]]
    (gradient,) = torch.autograd.grad(score, pixels)
    expected = reading.sampling.on_photo((pixels * gradient).detach()[None])
    assert float(expected.abs().max()) > 1e-3
    assert_close(answered.words[0].attribution.values, expected, rtol=1e-4, atol=1e-6)
