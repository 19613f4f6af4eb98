"""The small model "tiny": 200 everyday classes, 3 MB, part of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from explain._utils.errors import ModelError, option
from explain.models.classifier import CenterCrop, Classifier
from explain.models.labels import with_synonyms
from explain.models.small_resnet import SmallResNet

NAME = "tiny"
FILE = Path(__file__).with_name("bundled.pt")


def load_bundled(size: int | None = None) -> Classifier:
    """Load the bundled classifier; ``size`` is the side of its input in pixels (the model card says what serves best).

    The file holds tensors, numbers and text only, and is read with ``weights_only=True``.

    >>> load_bundled().label(0)
    'Egyptian cat'
    """
    content: dict[str, Any] = torch.load(FILE, weights_only=True, map_location="cpu")
    with torch.device("meta"):  # no time spent on initial values that are replaced at once
        model = SmallResNet(**content["architecture"])
    state = {name: t.float() if t.is_floating_point() else t for name, t in content["state_dict"].items()}
    model.load_state_dict(state, assign=True)
    if size is not None and size < 16:
        raise ModelError(
            f"{option('size')} must be at least 16 pixels for the model 'tiny', got {size}; leave it out for 80"
        )
    view = content["preprocess"]
    preprocess = CenterCrop(size or view["side"], view["crop"], tuple(view["mean"]), tuple(view["std"]))
    return Classifier(model.eval(), preprocess, with_synonyms(content["categories"]), NAME, content["temperature"])
