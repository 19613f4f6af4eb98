"""Networks of a photo and texts, such as CLIP: methods look at the tower of the photo, and at
nothing in the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import ImageError
from tests.conftest import Made
from tests.peers.common import random

METHODS = [
    "legrad",
    "gradeclip",
    "tis(samples=12)",
    "vitcx",
    "gradcam",
    "gradientrollout",
    "cheferattribution",
    "lrp",
    "occlusion(window=8, stride=8)",
]
IDS = torch.tensor([[1, 5, 6, 2], [1, 7, 8, 2], [1, 9, 3, 2]])


@pytest.fixture(scope="module")
def clip() -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is an extra")
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 2}
    words: dict[str, Any] = {"vocab_size": 50, "max_position_embeddings": 8}
    words |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.CLIPConfig(
        text_config={**sizes, **words},
        vision_config={**sizes, "image_size": 16, "patch_size": 4},
        projection_dim=8,
    )
    torch.manual_seed(3)
    return transformers.CLIPModel(config).eval()


@pytest.fixture
def x() -> Tensor:
    return random(1, 2, 3, 16, 16).float()


def of_photos(net: Any, x: Tensor) -> Tensor:
    """The tower of photos alone, with the texts' features as the weights of its head."""
    features = net.projection(net.tower(pixel_values=x).pooler_output)
    return features / features.norm(dim=-1, keepdim=True) @ net.weight.T


def with_texts(net: Any, pixel_values: Tensor, input_ids: Tensor = IDS) -> Tensor:
    return net.clip(input_ids=input_ids, pixel_values=pixel_values).logits_per_image


@pytest.mark.parametrize("kind", ["bare", "texts"])
def test_photos_beside_texts_are_as_alone(kind: str, clip: Any, x: Tensor) -> None:
    both = {"input_ids": IDS, "pixel_values": x}
    weight = nn.Parameter(clip(**both).text_embeds * clip.logit_scale.exp())
    tower = Made(
        of_photos, tower=clip.vision_model, projection=clip.visual_projection, weight=weight
    )
    model = clip if kind == "bare" else Made(with_texts, clip=clip)
    inputs = explain.Inputs((x, IDS))
    if kind == "bare":
        inputs = explain.Inputs(kwargs=both, explained="pixel_values")
    expected = explain.attribute(tower.eval(), x, METHODS, target=1)
    beside = explain.attribute(model.eval(), inputs, METHODS, target=1)
    assert beside.keys() == expected.keys()
    for name, alone in expected.items():
        path = (beside[name].layer or "").rpartition("vision_model")[2]
        assert path == (alone.layer or "").rpartition("tower")[2]
        tolerance = 1e-4 * float(alone.values.abs().max())
        assert_close(beside[name].values, alone.values, rtol=1e-3, atol=tolerance, msg=name)


def test_a_photo_in_the_place_of_the_texts_is_refused_in_one_line(clip: Any, x: Tensor) -> None:
    with pytest.raises(ImageError, match="pixel_values") as caught:
        explain.attribute(clip, x, "gradcam", target=1)
    assert "\n" not in str(caught.value)
