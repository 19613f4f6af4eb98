"""Why a map says nothing: found by looking at the evidence, not guessed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from explain.engine import Activations, Evidence, InputGradients, LayerGradients
from explain.errors import either


def why_empty(evidence: Sequence[Evidence], image: int, *, turned: bool = False) -> str:
    """Say why a method that saw this evidence found nothing in one image, and what to do.

    Looked at in turn: whether the layer is active at all, whether the score depends on it, and whether that is because
    the model's output is a saturated softmax. ``turned`` says that the method divided by a negative score, which
    reverses all signs.
    """
    first = evidence[0]
    named = [item.layer for item in evidence if item.layer]
    layer = f"layer {', '.join(named)}" if named else "the input"
    if named and all(_is_zero(item, image, Activations) for item in evidence):
        return f"{layer} gives zero everywhere, as behind a ReLU of which every unit is off; choose an earlier layer"
    if all(_is_zero(item, image, LayerGradients, InputGradients) for item in evidence):
        if _is_saturated(first, image):
            return (
                "the model gives probabilities, and this one is so near to 0 or 1 that nothing changes it; let the "
                "model give the scores before the softmax"
            )
        return f"the score does not change with {layer} (the gradient is zero); choose another layer or target"
    if named and torch.equal(first.inputs[image], torch.zeros_like(first.inputs[image])):
        return "the input is zero everywhere; give a photo"
    if turned:
        return (
            f"the score is negative ({float(first.score[image]):.3g}) and the method divides by it, which reverses all "
            "signs, so that what speaks for the target is left out; choose a target with a positive score, or gradcam"
        )
    if any(isinstance(need, LayerGradients) for need in first.found):
        how = either("relu=False", "--method 'gradcam(relu=False)'")
        return f"all that {layer} shows speaks against the target; choose another target, or a signed map ({how})"
    return f"nothing that it looks at in {layer} speaks for the target; choose another target or method"


def _is_zero(evidence: Evidence, image: int, *kinds: type) -> bool:
    """Whether evidence of these kinds is there and zero for an image."""
    found: list[Any] = [value for need, value in evidence.found.items() if isinstance(need, kinds)]
    return bool(found) and not any(value[image].any() for value in found)


def _is_saturated(evidence: Evidence, image: int) -> bool:
    """Whether the model returns probabilities, and that of the target's class is practically 0 or 1."""
    if evidence.logits is None or evidence.classes is None or evidence.outputs.activation != "none":
        return False
    probability = float(evidence.logits[image, evidence.classes[image]])
    return min(abs(probability), abs(1 - probability)) < 1e-4
