"""What fixes a run: model, weights, methods, targets, options and versions, as plain values.

A class and its weights do not say what a model does: it may have a temperature, a switch or a hook. So the model and
the preprocessing also run on a picture that is always the same.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from explain._utils import nested
from explain._utils.errors import quiet
from explain._utils.signals import came_by_signal
from explain.attribution.encoding import encode
from explain.explanation.explainer import Explainer
from explain.hooks.preserve import preserving_rng, untouched
from explain.store.manifest import digest_of, tensor_bytes

SIZES = ((160, 120), (300, 400))  # of the test pictures: width and height
WAVES = 4  # numbers in the summary of a tensor
CHANGED = "changed by training"
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def identity(explainer: Explainer, *, trained: bool = False) -> dict[str, Any]:
    """Return what identifies the model of an explainer and its preprocessing, in plain values.

    Args:
        explainer: the model with all that belongs to it.
        trained: leave out what training changes.
    """
    origin, model = explainer._origin, explainer.model
    found = {
        "model": origin.name, "network": type(model).__name__, "weights": CHANGED if trained else digest_of(model),
        "weights_from": origin.weights, "preprocess": origin.preprocess, "explainer": origin.to_dict(),
        "categories": None if explainer.categories is None else list(explainer.categories),
        "temperature": explainer._classifier.temperature,
    }  # fmt: skip
    if explainer.interventions:
        found["interventions"] = encode(list(explainer.interventions))
    inputs = [_returned(explainer.preprocess, picture) for picture in _pictures()]
    found["test_inputs"] = [_summary(each) for each in inputs]
    if not trained:
        found |= _of_model(explainer, next((each for each in inputs if isinstance(each, torch.Tensor)), None))
    return found


def _of_model(explainer: Explainer, x: torch.Tensor | None) -> dict[str, Any]:
    """The scores of a model for a picture, and its attributes, but for those that change with each call.

    Attributes may be set by the first call alone; where it set any, a second one tells these from those that change.
    """
    model = explainer.model
    x = torch.zeros(1, 3, 224, 224) if x is None else explainer._placed(x[None])

    def scores() -> Any:
        with untouched(model), torch.no_grad():
            output = _returned(model, x)
        return [_summary(tensor) for _, tensor in nested.paths(output)] if not isinstance(output, str) else output

    new, found, before = _attributes(model), scores(), _attributes(model)
    found, after = (found, before) if new == before else (scores(), _attributes(model))
    stable = [f"{name} {value}\n" for name, value in before.items() if after.get(name) == value]
    return {"attributes": hashlib.sha256("".join(stable).encode()).hexdigest(), "test_scores": found}


def _attributes(model: nn.Module) -> dict[str, str]:
    """The attributes of all modules that are plain values or tensors, which are no part of the weights."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
        own |= {name: module._buffers[name] for name in sorted(module._non_persistent_buffers_set)}
        plain = {f"{path}.{name}": _plain(value) for name, value in own.items()}
        found |= {name: value for name, value in plain.items() if value is not None}
    return found


def _plain(value: Any) -> str | None:
    """A plain value, a tensor or a container of these as text; None for anything else."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
        return repr(value)
    if isinstance(value, np.ndarray):
        value = torch.as_tensor(value) if value.dtype != object else None
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {hashlib.sha256(tensor_bytes(value)).hexdigest()}"
    if isinstance(value, Mapping):
        value = [each for pair in value.items() for each in pair]
    if not isinstance(value, (list, tuple, set, frozenset)):
        return None
    parts = [_plain(each) for each in value]
    known = [each for each in parts if each is not None]
    ordered = sorted(known) if isinstance(value, (set, frozenset)) else known
    return f"({', '.join(ordered)})" if len(known) == len(parts) else None


def _returned(function: Any, argument: Any) -> Any:
    """The result of a function, or the name of the error that it raises."""
    try:
        with quiet(), preserving_rng([]):
            torch.manual_seed(0)
            return function(argument)
    except Exception as error:  # of the caller's own code: anything; the photos will show whether it matters
        if came_by_signal(error):
            raise
        return f"raises {type(error).__name__}"


def _summary(value: Any) -> Any:
    """A few numbers of a tensor that change with any of its elements, or with all of them."""
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, str) else type(value).__name__
    flat = value.detach().cpu().double().reshape(-1).nan_to_num()
    positions = torch.arange(len(flat), dtype=torch.float64)
    waves = [float((flat * torch.cos(k * positions)).sum()) for k in range(WAVES)]
    root = max(1, len(flat)) ** 0.5
    return {"shape": list(value.shape), "rms": float(flat.norm()) / root, "waves": [wave / root for wave in waves]}


def _pictures() -> list[Image.Image]:
    """Pictures with edges, flat parts and noise, which are always the same."""
    found = []
    for width, height in SIZES:
        draw = np.random.RandomState(0)  # whose numbers never change
        blocks = draw.randint(0, 256, (height // 20, width // 20, 3)).repeat(20, 0).repeat(20, 1)
        noise = draw.randint(0, 32, blocks.shape) * (np.arange(width) % 80 < 40)[None, :, None]
        found.append(Image.fromarray((blocks ^ noise).astype(np.uint8)))
    return found


def named_layer(model: nn.Module, layer: Any) -> Any:
    """Return the names of layers that were given as modules or names."""
    if isinstance(layer, (list, tuple)):
        return [named_layer(model, each) for each in layer]
    if isinstance(layer, nn.Module):
        return next((name for name, module in model.named_modules() if module is layer), type(layer).__name__)
    return layer
