"""Small image-text models of transformers with random weights, and processors and tokenizers made
here: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
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


OF_LLAVA: dict[str, Any] = {
    "patch_size": 8,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
    "chat_template": CHAT,
}


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
        **OF_LLAVA,
    )
    return transformers.LlavaForConditionalGeneration(config), processor


def llava_next() -> tuple[Any, Any]:
    tokenizer = tokenizer_of()
    grid = [[16, 32], [32, 16], [32, 32]]
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**PHOTOS),
        text_config=transformers.LlamaConfig(**SIZES, **IDS, vocab_size=len(tokenizer)),
        image_token_id=IMAGE,
        image_grid_pinpoints=grid,
    )
    photos = transformers.LlavaNextImageProcessor(
        size={"shortest_edge": 16},
        crop_size={"height": 16, "width": 16},
        image_grid_pinpoints=grid,
    )
    processor = transformers.LlavaNextProcessor(
        photos,
        tokenizer,
        **OF_LLAVA,
    )
    return transformers.LlavaNextForConditionalGeneration(config), processor


def qwen(newer: bool) -> tuple[Any, Any]:
    tokenizer = tokenizer_of("<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
    ids = {"image_token_id": IMAGE, "vision_start_token_id": 5, "vision_end_token_id": 6}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    words = {**SIZES, **IDS, "vocab_size": len(tokenizer), "num_key_value_heads": 1}
    words["rope_parameters"] = rope
    photos = {"depth": 2, "num_heads": 2, "patch_size": 4}
    if newer:
        photos |= {"hidden_size": 16, "window_size": 16, "fullatt_block_indexes": [1]}
        photos |= {"out_hidden_size": 16, "intermediate_size": 32}
        kind = transformers.Qwen2_5_VLConfig
        model = transformers.Qwen2_5_VLForConditionalGeneration
    else:
        photos |= {"embed_dim": 16, "hidden_size": 16}
        kind = transformers.Qwen2VLConfig
        model = transformers.Qwen2VLForConditionalGeneration
    config = kind(text_config=words, vision_config=photos, video_token_id=7, **ids)
    sizes = {"patch_size": 4, "merge_size": 2, "min_pixels": 256, "max_pixels": 1024}
    image_processor = transformers.Qwen2VLImageProcessor(**sizes)
    image_processor.size = {"shortest_edge": 256, "longest_edge": 1024}
    videos = transformers.Qwen2VLVideoProcessor(**sizes)
    tokenizer.image_token = "<image>"
    tokenizer.video_token = "<|video_pad|>"
    tokenizer.video_token_id = 7
    of_both = transformers.Qwen2_5_VLProcessor if newer else transformers.Qwen2VLProcessor
    return model(config), of_both(image_processor, tokenizer, videos, chat_template=CHAT)


def paligemma() -> tuple[Any, Any]:
    tokenizer = tokenizer_of()
    words = {**SIZES, **IDS, "vocab_size": len(tokenizer), "num_key_value_heads": 1}
    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**PHOTOS, projection_dim=16),
        text_config=transformers.GemmaConfig(**words, head_dim=8),
        image_token_id=IMAGE,
        projection_dim=16,
        hidden_size=16,
    )
    photos = transformers.SiglipImageProcessor(size={"height": 16, "width": 16})
    photos.image_seq_length = 4
    return (
        transformers.PaliGemmaForConditionalGeneration(config),
        transformers.PaliGemmaProcessor(photos, tokenizer),
    )


def idefics() -> tuple[Any, Any]:
    more = ("<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
    cells = tuple(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4))
    tokenizer = tokenizer_of(*more, *cells)
    config = transformers.Idefics3Config(
        vision_config={**PHOTOS, "num_channels": 3},
        text_config=transformers.LlamaConfig(**SIZES, **IDS, vocab_size=len(tokenizer)),
        image_token_id=IMAGE,
        scale_factor=1,
    )
    photos = transformers.Idefics3ImageProcessor(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 16}
    )
    processor = transformers.Idefics3Processor(
        photos, tokenizer, image_seq_len=4, chat_template=CHAT
    )
    return transformers.Idefics3ForConditionalGeneration(config), processor


def internvl() -> tuple[Any, Any]:
    tokenizer = tokenizer_of("<img>", "</img>", "<video>")
    config = transformers.InternVLConfig(
        vision_config={**SIZES, "image_size": [16, 16], "patch_size": [4, 4]},
        text_config=transformers.Qwen2Config(
            **SIZES, **IDS, vocab_size=len(tokenizer), num_key_value_heads=1
        ),
        image_token_id=IMAGE,
    )
    tokenizer.start_image_token = "<img>"
    tokenizer.end_image_token = "</img>"
    tokenizer.start_image_token_id = 5
    tokenizer.end_image_token_id = 6
    tokenizer.context_image_token = "<image>"
    tokenizer.context_image_token_id = IMAGE
    tokenizer.video_token = "<video>"
    photos = transformers.GotOcr2ImageProcessor(
        size={"height": 16, "width": 16}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    videos = transformers.InternVLVideoProcessor(size={"height": 16, "width": 16})
    processor = transformers.InternVLProcessor(
        photos, tokenizer, videos, image_seq_length=4, chat_template=CHAT
    )
    return transformers.InternVLForConditionalGeneration(config), processor


def framed_tokenizer() -> Any:
    """A tokenizer that puts texts between tokens of its own, as BERT's does."""
    tokenizer = tokenizer_of("<cls>")
    frame = tokenizers.processors.TemplateProcessing(
        single="<cls> $A </s>", special_tokens=[("<cls>", 5), ("</s>", 3)]
    )
    tokenizer.backend_tokenizer.post_processor = frame
    tokenizer.cls_token = "<cls>"
    tokenizer.sep_token = "</s>"
    return tokenizer


def blip() -> tuple[Any, Any]:
    tokenizer = framed_tokenizer()
    words = {**SIZES, **IDS, "sep_token_id": 3, "encoder_hidden_size": 16}
    config = transformers.BlipConfig(
        text_config={**words, "vocab_size": len(tokenizer), "max_position_embeddings": 64},
        vision_config=PHOTOS,
    )
    photos = transformers.BlipImageProcessor(size={"height": 16, "width": 16})
    processor = transformers.BlipProcessor(photos, tokenizer)
    return transformers.BlipForConditionalGeneration(config), processor


def blip_2() -> tuple[Any, Any]:
    tokenizer = tokenizer_of()
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = {**small, **IDS, "ffn_dim": 16, "vocab_size": len(tokenizer)}
    config = transformers.Blip2Config(
        vision_config={**small, "intermediate_size": 16, "image_size": 16, "patch_size": 4},
        qformer_config={**small, "intermediate_size": 16, "encoder_hidden_size": 16},
        text_config=transformers.OPTConfig(**words, word_embed_proj_dim=16).to_dict(),
        num_query_tokens=4,
        image_token_index=IMAGE,
    )
    photos = transformers.BlipImageProcessor(size={"height": 16, "width": 16})
    tokenizer.image_token = tokenizers.AddedToken("<image>", normalized=False, special=True)
    processor = transformers.Blip2Processor(photos, tokenizer, num_query_tokens=4)
    return transformers.Blip2ForConditionalGeneration(config), processor


def git() -> tuple[Any, Any]:
    tokenizer = tokenizer_of()
    config = transformers.GitConfig(
        **SIZES, **IDS, vocab_size=len(tokenizer), vision_config=PHOTOS, num_image_with_embedding=0
    )
    photos = transformers.CLIPImageProcessor(size={"height": 16, "width": 16}, do_center_crop=False)
    return transformers.GitForCausalLM(config), transformers.GitProcessor(photos, tokenizer)


def trocr() -> tuple[Any, Any]:
    tokenizer = tokenizer_of()
    words = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2}
    words |= {"decoder_ffn_dim": 32, "max_position_embeddings": 64, "decoder_start_token_id": 2}
    decoder = transformers.TrOCRConfig(
        **IDS, **words, cross_attention_hidden_size=16, vocab_size=len(tokenizer)
    )
    photos = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    processor = transformers.TrOCRProcessor(photos, tokenizer)
    return of_parts(transformers.ViTConfig(**PHOTOS), decoder), processor


def donut() -> tuple[Any, Any]:
    tokenizer = tokenizer_of()
    photos = {"image_size": [16, 24], "patch_size": 2, "embed_dim": 8, "window_size": 4}
    encoder = transformers.DonutSwinConfig(**photos, depths=[1, 1], num_heads=[2, 2])
    words = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2}
    words |= {"decoder_ffn_dim": 32, "max_position_embeddings": 64}
    decoder = transformers.MBartConfig(**IDS, **words, vocab_size=len(tokenizer))
    processor = transformers.DonutProcessor(
        transformers.DonutImageProcessor(
            size={"height": 16, "width": 24}, do_align_long_axis=False
        ),
        tokenizer,
    )
    return of_parts(encoder, decoder), processor


def vit_gpt2() -> tuple[Any, Any]:
    """Without a joint processor: a pair of the parts."""
    tokenizer = tokenizer_of()
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    decoder = transformers.GPT2Config(
        **sizes, **IDS, vocab_size=len(tokenizer), add_cross_attention=True
    )
    photos = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    return of_parts(transformers.ViTConfig(**PHOTOS), decoder), (photos, tokenizer)


def of_parts(encoder: Any, decoder: Any) -> Any:
    make = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs
    return transformers.VisionEncoderDecoderModel(config=make(encoder, decoder))


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "LLaVA": llava,
    "LLaVA-NeXT": llava_next,
    "Qwen2-VL": lambda: qwen(newer=False),
    "Qwen2.5-VL": lambda: qwen(newer=True),
    "PaliGemma": paligemma,
    "Idefics3": idefics,
    "InternVL": internvl,
    "BLIP": blip,
    "BLIP-2": blip_2,
    "GIT": git,
    "TrOCR": trocr,
    "Donut": donut,
    "ViT-GPT2": vit_gpt2,
}


class Says(nn.Module):
    """A captioner that says "a red cup" of all photos: "red" from habit, and "cup" the more
    probably, the brighter the left half is."""

    def __init__(self) -> None:
        super().__init__()
        self.processor = SaysProcessor()
        names = ("<s>", "▁a", "▁red", "▁cup", "</s>")
        ids = self.processor.tokenizer.convert_tokens_to_ids(list(names))
        count = len(self.processor.tokenizer)
        self.embedding = nn.Embedding(count, count)
        nn.init.eye_(self.embedding.weight)
        follows = torch.zeros(count, count)
        follows[:, ids[1]] = 6.0
        for word, following in pairwise(ids[1:]):
            follows[word] = 0
            follows[word, following] = 8.0
        self.follows = nn.Linear(count, count, bias=False)
        self.follows.weight.data = follows.T.contiguous()
        self.register_buffer("cup", nn.functional.one_hot(torch.tensor(ids[3]), count).float())
        self.config = transformers.PretrainedConfig(bos_token_id=ids[0], eos_token_id=ids[-1])
        self.eval()

    def forward(self, pixel_values: Any, input_ids: Any) -> dict[str, Any]:
        half = pixel_values.shape[-1] // 2
        brightness = pixel_values[..., :half].mean((1, 2, 3))[:, None, None]
        logits = self.follows(self.embedding(input_ids))
        return {"logits": logits + logits * self.cup * (4 * brightness - 3)}


class SaysProcessor:
    """Pixels from 0 to 1, and the tokens of a prompt if there is one."""

    def __init__(self) -> None:
        self.tokenizer = tokenizer_of()

    def __call__(self, images: Any, text: Any = None, **options: Any) -> dict[str, Any]:
        levels = torch.from_numpy(np.array(images)).permute(2, 0, 1)[None] / 255
        tokens = (
            {}
            if text is None
            else {"input_ids": self.tokenizer(text, return_tensors="pt")["input_ids"]}
        )
        return {"pixel_values": levels, **tokens}


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
