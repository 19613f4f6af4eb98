"""Identification of a model with its preprocessing: by its weights and structure, and by what both
make of pictures.

A class and its weights do not say what a model does: it may have a temperature, a switch or a hook.
So the model and the preprocessing also run on a picture that is always the same.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import nn

from explain._utils import nested
from explain._utils.errors import quiet
from explain._utils.modules import modules_of
from explain._utils.random_numbers import drawing
from explain._utils.signals import came_by_signal
from explain.attribution.encoding import encode
from explain.explanation.explainer import Explainer
from explain.hooks.preserve import untouched
from explain.store.manifest import digest_of_model

SIZES = ((160, 120), (300, 400))  # of the test pictures: width and height
WAVES = 4  # cosine sums in the summary of a tensor
CHANGED = "changed by training"


def model_identity(explainer: Explainer, *, trained: bool = False) -> dict[str, Any]:
    """What identifies a model (unless ``trained``, by its outputs for a test picture) and its
    preprocessing, in plain values that a continued run must share.
    """
    origin = explainer.origin
    model = explainer.model
    inputs = _test_inputs(explainer)
    properties = {
        **network_identity(origin.name, model, trained=trained),
        "weights_from": origin.weights,
        **preprocessing_identity(explainer, inputs),
        "categories": None if explainer.categories is None else list(explainer.categories),
        "temperature": explainer.classifier.temperature,
    }
    if explainer.interventions:
        properties["interventions"] = encode(list(explainer.interventions))
    if not trained:
        # zeros where the preprocessing refuses both test pictures
        x = next((x for x in inputs if isinstance(x, torch.Tensor)), torch.zeros(3, 224, 224))
        with untouched(model), torch.no_grad():
            output = _result(model, explainer.batch(x[None]))
        # of all tensors in it; without any, of what it is instead, such as an error's name
        properties["test_scores"] = [_summary(tensor) for _, tensor in nested.paths(output)] or [
            _summary(output)
        ]
    return properties


def network_identity(name: str, model: nn.Module, *, trained: bool = False) -> dict[str, Any]:
    """The part of `model_identity` about the network and its weights."""
    structure = re.sub(r" at 0x[0-9a-f]+", "", str(model))  # places in memory, of functions
    return {
        "model": name,
        "network": type(model).__name__,
        "structure": hashlib.sha256(structure.encode()).hexdigest(),
        "weights": CHANGED if trained else digest_of_model(model),
    }


def inputs_of(preprocess: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """What identifies a preprocessing: summaries of what it makes of the test pictures."""
    return [_summary(_result(preprocess, picture)) for picture in _pictures()]


def preprocessing_identity(
    explainer: Explainer, inputs: Sequence[Any] | None = None
) -> dict[str, Any]:
    """The part of `model_identity` about the preprocessing; the model does not run. ``inputs`` is
    what it makes of the test pictures, where that is known.
    """
    inputs = _test_inputs(explainer) if inputs is None else inputs
    origin = explainer.origin
    return {
        "preprocess": origin.preprocess,
        "explainer": origin.to_dict(),
        "test_inputs": [_summary(x) for x in inputs],
    }


def _test_inputs(explainer: Explainer) -> list[Any]:
    """What the preprocessing makes of each test picture: an input, or a text with the name of the
    error that it raises."""
    return [_result(explainer.preprocess, picture) for picture in _pictures()]


def _result(function: Callable[[Any], Any], argument: Any) -> Any:
    """Call a function with fixed random numbers: return its result, or "raises" with the name of
    its error. Random numbers of the caller stay as they were."""
    try:
        with quiet(), drawing(0):
            return function(argument)
    # of the caller's own code: anything; the photos will show whether it matters
    except Exception as error:
        if came_by_signal(error):
            raise
        return f"raises {type(error).__name__}"


def _summary(value: Any) -> dict[str, Any]:
    """A tensor's shape, and its norm and products with cosines of `WAVES` frequencies, over the
    root of its size: another tensor is noticed, rounding is not. Manifests keep them.
    """
    if not isinstance(value, torch.Tensor):
        # What came instead stands in the shape's place: the text of an error from `_result`, or the
        # name of a type. The zeros make all summaries of one length, as `alike` compares them.
        instead_of_tensor = value if isinstance(value, str) else type(value).__name__
        return {"shape": instead_of_tensor, "numbers": [0.0] * (WAVES + 1)}
    flat = value.detach().cpu().double().reshape(-1).nan_to_num()  # NaN would equal nothing
    # The first wave is 1 everywhere, which gives the plain sum. The others weigh each place in its
    # own way, so that the same values in another order are noticed too.
    angles = torch.arange(WAVES).double()[:, None] * torch.arange(len(flat))
    # the norm first: by it, `explain.store.manifest.alike` judges how far all numbers are apart
    numbers = torch.cat([flat.norm()[None], angles.cos() @ flat]) / max(1, len(flat)) ** 0.5
    return {"shape": list(value.shape), "numbers": numbers.tolist()}


def _pictures() -> list[Image.Image]:
    """Two test pictures in RGB with edges, flat parts and fine structure. They must stay the same:
    manifests keep what models make of them."""
    where = (-2.2, -1.5, 1.0, 1.5)
    return [
        Image.merge(
            "RGB", [Image.effect_mandelbrot(size, where, quality) for quality in (12, 25, 50)]
        )
        for size in SIZES
    ]


def named_layer(model: nn.Module, layer: Any) -> Any:
    """Return a layer, or a nested list of layers, by names for the manifest: a module becomes its
    name in the model, or that of its class if it is not in it."""
    if isinstance(layer, (list, tuple)):
        return [named_layer(model, part) for part in layer]
    if isinstance(layer, nn.Module):
        return modules_of(model).get(layer, type(layer).__name__)
    return layer
