"""The small models "tiny" and "tiny-transformer": 200 everyday classes, parts of this package."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import nn

from explain._utils.errors import ModelError, option
from explain.models.classifier import CenterCrop, Classifier
from explain.models.labels import with_synonyms
from explain.models.small_resnet import SmallResNet
from explain.models.small_transformer import SmallTransformer
from explain.models.weights import check_published

TINY, TRANSFORMER = "tiny", "tiny-transformer"
FILE = Path(__file__).with_name("bundled.pt")
TRANSFORMER_FILE = Path(__file__).with_name("tiny_transformer.pt")
TRANSFORMER_SHA256 = "e8eebfd58f4f4eee1afc64cb5e777a68216ae4bf3007055e0ec9089525fa8b83"


def load_tiny(size: int | None = None) -> Classifier:
    """Load the small residual network; ``size`` is the side of its input in pixels (the model card says what is best).

    The file holds tensors, numbers and text only, and is read with ``weights_only=True``.

    >>> load_tiny().label(0)
    'Egyptian cat'
    """
    if size is not None and size < 16:
        raise ModelError(
            f"{option('size')} must be at least 16 pixels for the model 'tiny', got {size}; leave it out for 80"
        )
    return _classifier(TINY, SmallResNet, FILE.read_bytes(), size)


def load_tiny_transformer(size: int | None = None) -> Classifier:
    """Load the small transformer; ``size`` can only be that of its input, 64 pixels, since each token has its place.

    The file holds tensors, numbers and text only, is read with ``weights_only=True``, and must be the published one to
    the bit.

    Raises:
        ModelError: another size is requested, or the file is missing or not the published one.

    >>> load_tiny_transformer().label(0)
    'Egyptian cat'
    """
    try:
        content = TRANSFORMER_FILE.read_bytes()
    except OSError as error:
        raise ModelError(
            f"model {TRANSFORMER!r} needs its weights at {str(TRANSFORMER_FILE)!r} ({error.strerror}); install explain "
            "again"
        ) from None
    check_published(content, TRANSFORMER_SHA256, TRANSFORMER, TRANSFORMER_FILE, "explain")
    weights = f"{TRANSFORMER_FILE.name} (sha256 {TRANSFORMER_SHA256})"
    found = _classifier(TRANSFORMER, SmallTransformer, content, None, weights)
    if size not in (None, found.preprocess.side):  # type: ignore[attr-defined]
        raise ModelError(
            f"{option('size')} must be 64 pixels for the model {TRANSFORMER!r}, whose tokens have fixed places, got "
            f"{size}; use the model 'tiny' for other sizes"
        )
    return found


def _classifier(
    name: str, kind: type[nn.Module], file: bytes, size: int | None, weights: str | None = None
) -> Classifier:
    """The classifier in the bytes of a file: architecture, weights, preprocessing, labels and temperature."""
    content: dict[str, Any] = torch.load(io.BytesIO(file), weights_only=True, map_location="cpu")
    with torch.device("meta"):  # no time spent on initial values that are replaced at once
        model = kind(**content["architecture"])
    state = {name: t.float() if t.is_floating_point() else t for name, t in content["state_dict"].items()}
    model.load_state_dict(state, assign=True)
    view = content["preprocess"]
    preprocess = CenterCrop(size or view["side"], view["crop"], tuple(view["mean"]), tuple(view["std"]))
    labels = with_synonyms(content["categories"])
    return Classifier(model.eval(), preprocess, labels, name, content["temperature"], weights)
