"""What tells one model with its preprocessing from another: its weights, its attributes, and what it answers.

A class and its weights do not say what a model does: it may have a temperature, a switch or a hook. So it is also asked
about a picture that is always the same, and so is the preprocessing.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from explain._utils import nested
from explain._utils.errors import quiet
from explain._utils.signals import came_by_signal
from explain.explanation.explainer import Explainer
from explain.hooks.preserve import preserving_rng, untouched

SIZES = ((160, 120), (300, 400))  # of the test pictures: width and height
NUMBERS = 4  # that stand for a tensor
TOLERANCES = {"test_inputs": 1e-4, "test_scores": 5e-3}  # devices differ in the last digits
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
        "model": origin.name,
        "network": type(model).__name__,
        "weights": CHANGED if trained else digest_of(model),
        "weights_from": origin.weights,
        "preprocess": origin.preprocess,
        "explainer": origin.to_dict(),
        "categories": None if explainer.categories is None else list(explainer.categories),
        "temperature": explainer._classifier.temperature,
    }
    inputs = [_answer(explainer.preprocess, picture) for picture in _pictures()]
    found["test_inputs"] = [_numbers(each) for each in inputs]
    if not trained:
        found |= _of_model(explainer, next((each for each in inputs if isinstance(each, torch.Tensor)), None))
    return found


def alike(key: str, one: Any, other: Any) -> bool:
    """Whether two values under a key of `identity` are the same, as far as devices compute the same.

    >>> alike("weights", 1.0, 1.000001)
    False
    """
    if key not in TOLERANCES or not isinstance(one, list) or not isinstance(other, list) or len(one) != len(other):
        return bool(one == other)
    return all(_close(*pair, TOLERANCES[key]) for pair in zip(one, other, strict=True))


def _close(one: Any, other: Any, tolerance: float) -> bool:
    """Whether what stands for two tensors is the same, but for a share of their root mean square."""
    if not isinstance(one, dict) or not isinstance(other, dict) or one["shape"] != other["shape"]:
        return bool(one == other)
    error = np.abs(np.subtract(one["waves"], other["waves"])).max()
    return bool(error <= tolerance * max(one["rms"], other["rms"]))


def digest_of(model: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers of a model, with their names.

    >>> digest_of(nn.ReLU()) == digest_of(nn.Tanh()), digest_of(nn.ReLU()) == digest_of(nn.Linear(1, 1))
    (True, False)
    """
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        kind = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        found.update(f"{name} {kind}\n".encode())
        found.update(_content(value))
    return found.hexdigest()


def _content(value: Any) -> Any:
    try:
        return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    except (
        AttributeError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ):  # quantised, sparse, or no tensor
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue()


def _of_model(explainer: Explainer, x: torch.Tensor | None) -> dict[str, Any]:
    """What a model answers, and its attributes, but for those that change with each call, such as counters.

    The first call is for what a model notes only once.
    """
    model = explainer.model

    def scores() -> Any:
        with untouched(model), torch.no_grad():
            output = _answer(model, torch.zeros(1, 3, 224, 224) if x is None else explainer._placed(x[None]))
        return [_numbers(tensor) for _, tensor in nested.paths(output)] if not isinstance(output, str) else output

    scores()
    before, answers, after = _attributes(model), scores(), _attributes(model)
    kept = [f"{name} {value}\n" for name, value in before.items() if after.get(name) == value]
    return {"attributes": hashlib.sha256("".join(kept).encode()).hexdigest(), "test_scores": answers}


def _attributes(model: nn.Module) -> dict[str, str]:
    """The attributes of all modules that are plain values or tensors, which are no part of the weights."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
        own |= {name: module._buffers[name] for name in sorted(module._non_persistent_buffers_set)}
        for name, value in own.items():
            plain = _plain(value)
            if plain is not None:
                found[f"{path}.{name}"] = plain
    return found


def _plain(value: Any) -> str | None:
    """A plain value, a tensor or a container of these as text; None for anything else."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
        return repr(value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        tensor = torch.as_tensor(value) if isinstance(value, torch.Tensor) or value.dtype != object else None
        return None if tensor is None else f"{tensor.dtype} {hashlib.sha256(_content(tensor)).hexdigest()}"
    if isinstance(value, Mapping):
        value = [each for pair in value.items() for each in pair]
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = [_plain(each) for each in value]
        known = [each for each in parts if each is not None]
        ordered = sorted(known) if isinstance(value, (set, frozenset)) else known
        return f"({', '.join(ordered)})" if len(known) == len(parts) else None
    return None


def _answer(function: Any, given: Any) -> Any:
    """What a function returns, or the name of the error that it raises."""
    try:
        with quiet(), preserving_rng([]):
            torch.manual_seed(0)
            return function(given)
    except Exception as error:  # of the caller's own code: anything; the photos will show whether it matters
        if came_by_signal(error):
            raise
        return f"raises {type(error).__name__}"


def _numbers(value: Any) -> Any:
    """A few numbers that stand for a tensor: a change in any place or in all of them changes these."""
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, str) else type(value).__name__
    flat = value.detach().cpu().double().reshape(-1).nan_to_num()
    places = torch.arange(len(flat), dtype=torch.float64)
    waves = [float((flat * torch.cos(k * places)).sum()) for k in range(NUMBERS)]
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
