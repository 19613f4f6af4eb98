"""Where photos lie in the pixels of models, by their own processors: tiled, padded, packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

import explain
from explain.answers import AnswerExplainer
from explain.answers.reading import Reader, Reading
from explain.targets.answer import own_answer
from tests.answers.toys import MODELS, made, photo_of

SIZE = (48, 28)
ASK = "what is a zebra?"
WITHOUT_PROMPT = {"TrOCR", "Donut", "GIT", "ViT-GPT2"}


@pytest.fixture(params=[*MODELS], scope="module")
def reading(request: pytest.FixtureRequest) -> Reading:
    model, processor = made(request.param)
    reader = Reader.of(model, processor)
    ask = None if request.param in WITHOUT_PROMPT else ASK
    return reader.read(smooth(), reader.prompt_of(ask))


def smooth(seed: int = 0) -> Image.Image:
    """A photo of coarse fields, which resizing leaves as they are."""
    return photo_of(6, 4, seed).resize(SIZE, Image.Resampling.BICUBIC)


def processed(reading: Reading, photo: Image.Image) -> torch.Tensor:
    """The pixels that the processor makes of a photo, laid out as the model of the reading has
    them."""
    return reading.reader.read(photo, reading.prompt).sampling.pixels


def planted(box: tuple[int, int, int, int]) -> Image.Image:
    """The photo with a grey square in it."""
    photo = smooth()
    photo.paste((128, 128, 128), box)
    return photo


BOXES = [(4, 4, 14, 14), (30, 2, 40, 12), (18, 14, 28, 24), (36, 16, 46, 26)]


def test_maps_lie_where_the_processor_puts_the_photo(reading: Reading) -> None:
    for box in BOXES:
        change = (processed(reading, planted(box)) - reading.sampling.pixels).abs()
        laid = reading.sampling.on_photo(change[None])[0]
        assert_close(laid.sum(), change.sum(), rtol=1e-3, atol=0)
        height, width = laid.shape
        across = width / SIZE[0]
        down = height / SIZE[1]
        left, top, right, bottom = box
        margin = 2  # pixels of the photo, that resampling reaches over
        rows = slice(max(0, round((top - margin) * down)), round((bottom + margin) * down))
        columns = slice(max(0, round((left - margin) * across)), round((right + margin) * across))
        assert float(laid[rows, columns].sum()) > 0.9 * float(laid.sum())


def test_covering_the_photo_is_covering_it_before_the_processor(reading: Reading) -> None:
    sampling = reading.sampling
    assert_close(sampling.of(sampling.photo), sampling.pixels)
    for box in BOXES:
        covered = sampling.of(sampling.like(planted(box))) - sampling.pixels
        expected = processed(reading, planted(box)) - sampling.pixels
        # edges of the square, and of a crop through it, are resampled otherwise
        assert float((covered - expected).norm()) < 0.5 * float(expected.norm())


def test_the_models_own_answer_is_that_of_generate_with_its_cache(reading: Reading) -> None:
    model = reading.reader.model
    inputs = {**reading.tokens, **reading.fixed, "pixel_values": reading.sampling.pixels}
    if "image_grid_thw" in inputs:
        pytest.skip("photos are packed for generate")
    ids = inputs["input_ids"]
    if type(model).__name__ == "BlipForConditionalGeneration":
        longer = torch.cat([ids, torch.tensor([[3]])], 1)  # the end, which it takes off
        inputs |= {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
    if reading.reader.decodes:
        for name in ("input_ids", "attention_mask"):
            inputs[f"decoder_{name}"] = inputs.pop(name)
    images = sorted(reading.reader.image_ids)
    with torch.no_grad():
        generated = model.generate(
            **inputs,
            max_new_tokens=6,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            suppress_tokens=images or None,
        )
    tokens = generated[0].tolist()
    if tokens[: ids.shape[1]] == ids[0].tolist():
        tokens = tokens[ids.shape[1] :]
    own = own_answer(*reading.of_photos())[:4]
    if own[0] == 3:  # nothing to say
        own = own[:1]
    assert tuple(tokens[: len(own)]) == own


def test_a_processor_that_does_more_is_refused() -> None:
    model, processor = made("LLaVA")

    def equalised(images: Image.Image, **options: Any) -> Any:
        """What depends on all pixels of a photo."""
        levels = np.asarray(images.convert("L")).ravel()
        ranks = np.argsort(np.argsort(levels, kind="stable"))
        even = (ranks * 255 // len(ranks)).astype(np.uint8)
        picture = Image.fromarray(even.reshape(images.size[::-1])).convert("RGB")
        return processor(images=picture, **options)

    model.tokenizer = processor.tokenizer
    with pytest.raises(explain.ModelError, match="processor"):
        AnswerExplainer(model, equalised)(smooth(), "<image>what is a cup?", answer="a cup")
