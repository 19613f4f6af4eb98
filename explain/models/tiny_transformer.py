"""The small transformer "tiny-transformer": 200 everyday classes at 64 pixels, part of this package."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import torch

from explain._utils.errors import ModelError, option
from explain.models.classifier import CenterCrop, Classifier
from explain.models.labels import with_synonyms
from explain.models.small_transformer import SmallTransformer

NAME = "tiny-transformer"
FILE = Path(__file__).with_name("tiny_transformer.pt")
SHA256 = "e8eebfd58f4f4eee1afc64cb5e777a68216ae4bf3007055e0ec9089525fa8b83"


def load_tiny_transformer(size: int | None = None) -> Classifier:
    """Load the small transformer; ``size`` can only be that of its input, 64 pixels, since each token has its place.

    The file holds tensors, numbers and text only, is read with ``weights_only=True``, and must be the published one to
    the bit.

    Raises:
        ModelError: another size is asked for, or the file is missing or not the published one.

    >>> load_tiny_transformer().label(0)
    'Egyptian cat'
    """
    try:
        data = FILE.read_bytes()
    except OSError as error:
        raise ModelError(
            f"model {NAME!r} needs its weights at {str(FILE)!r} ({error.strerror}); install explain again"
        ) from None
    digest = hashlib.sha256(data).hexdigest()
    if digest != SHA256:
        raise ModelError(
            f"model {NAME!r} must have the published weights (sha256 {SHA256[:12]}…), got {digest[:12]}… in "
            f"{str(FILE)!r}; install explain again"
        )
    content: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    view = content["preprocess"]
    if size not in (None, view["side"]):
        raise ModelError(
            f"{option('size')} must be {view['side']} pixels for the model {NAME!r}, whose tokens have fixed places, "
            f"got {size}; use the model 'tiny' for other sizes"
        )
    with torch.device("meta"):  # no time spent on initial values that are replaced at once
        model = SmallTransformer(**content["architecture"])
    state = {name: t.float() if t.is_floating_point() else t for name, t in content["state_dict"].items()}
    model.load_state_dict(state, assign=True)
    preprocess = CenterCrop(view["side"], view["crop"], tuple(view["mean"]), tuple(view["std"]))
    categories = with_synonyms(content["categories"])
    told = f"{FILE.name} (sha256 {SHA256})"
    return Classifier(model.eval(), preprocess, categories, NAME, content["temperature"], weights=told)
