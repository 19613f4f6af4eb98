"""Small image-text models of transformers with random weights, and processors and tokenizers made
here: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is an extra")
tokenizers = pytest.importorskip("tokenizers", reason="transformers brings it")

SPECIAL = ("<unk>", "<pad>", "<s>", "</s>", "<image>")
WORDS = ("a", "an", "the", "red", "cup", "on", "table", "what", "is", "USER", "ASSISTANT", "zeb")
PIECES = (".", ",", "?", ":", "ra")
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
IDS = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
PHOTOS = {**SIZES, "image_size": 16, "patch_size": 8}
IMAGE = 4
CHAT = (
    "{% for message in messages %}USER:{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %} <image>{% else %} {{ part['text'] }}{% endif %}"
    "{% endfor %} ASSISTANT:{% endfor %}"
)


def tokenizer_of(*more: str) -> Any:
    """Words with the mark of sentencepiece before them; "zebra" has two tokens."""
    special = [(word, 0.0) for word in (*SPECIAL, *more)]
    words = [(f"▁{word}", -1.0) for word in WORDS]
    pieces = [(piece, -2.0) for piece in (*PIECES, "▁")]
    model = tokenizers.models.Unigram([*special, *words, *pieces], unk_id=0)
    fast = tokenizers.Tokenizer(model)
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    fast.decoder = tokenizers.decoders.Metaspace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<image>", *more],
    )
    tokenizer.image_token = "<image>"
    tokenizer.image_token_id = IMAGE
    return tokenizer


def llava() -> tuple[Any, Any]:
    tokenizer = tokenizer_of()
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**PHOTOS),
        text_config=transformers.LlamaConfig(**SIZES, **IDS, vocab_size=len(tokenizer)),
        image_token_id=IMAGE,
    )
    photos = transformers.CLIPImageProcessor(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    )
    processor = transformers.LlavaProcessor(
        photos,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT,
    )
    return transformers.LlavaForConditionalGeneration(config), processor


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {"LLaVA": llava}


def made(name: str, seed: int = 5) -> tuple[Any, Any]:
    """A model in double precision whose weights are large enough to matter, with its processor."""
    torch.manual_seed(seed)
    model, processor = MODELS[name]()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
    return model.double().eval(), processor


def photo_of(width: int = 24, height: int = 16, seed: int = 0) -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(levels)
