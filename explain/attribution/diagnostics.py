"""Why a map says nothing, and what callers are warned of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from explain._utils.errors import either, image_name, warn
from explain.attribution.result import Attribution
from explain.engine import Activations, Attributions, Evidence, InputGradients, LayerGradients, Need
from explain.methods import DeepLIFT, DeepLIFTSHAP, Method
from explain.relevance.gradient_rules import Coverage


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


_MISSED = 0.05
"""The share of the difference of the scores from which on DeepLIFT says what it misses."""
_STABILISED = 0.01
"""The share of the score from which on what stabilisers take is said."""
_ROUNDING = 1000
"""How many of the last bits of the sizes that are added up may be rounding errors."""
_HELD = "its rules hold a softmax constant that the score comes through; use attnlrp"


def warn_of_half_precision(methods: Mapping[str, Method], x: torch.Tensor) -> None:
    """Warn of gradients that reach the input in half precision: their rounding errors add up over all layers."""
    if x.dtype not in (torch.float16, torch.bfloat16):
        return
    needs = {name: [*method.needs, *_inner(method)] for name, method in methods.items()}
    names = [name for name, found in needs.items() if any(need.whole for need in found)]
    if names:
        warn(
            f"{', '.join(names)} may be off by tens of percent: the model computes gradients in "
            f"{str(x.dtype).removeprefix('torch.')}; give model.float() and x.float()"
        )


def _inner(method: Method) -> list[Need[Any]]:
    """What is needed of altered inputs."""
    return [need for outer in method.needs if isinstance(outer, Attributions) for need in outer.method.needs]


def warn_of_closed(method: Method, coverage: Coverage) -> None:
    """Say what relevance passed by the plain gradient for want of a look inside."""
    if coverage.missed:
        warn(
            f"{method.name} has no rule for some operations ({_listed(coverage)}); they pass relevance by the plain "
            "gradient, and may lose some: write them with simpler functions of torch to have them covered"
        )


def warn_of_gaps(method: Method, coverage: Coverage) -> None:
    """Say where a rule found nothing to act on, or could not look."""
    if not coverage.covered:
        warn(
            f"{method.name} found no rectifier (ReLU or a relative) between the input and the score, so it equals "
            "the plain gradient; use saliency, or a network with rectifiers"
        )
    if coverage.missed:
        warn(
            f"{method.name} cannot look into functions that were written as one operation ({_listed(coverage)}); where "
            "they rectify, the plain gradient passes: write them with torch's own functions to have them covered"
        )


def _listed(coverage: Coverage) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in coverage.missed.items())


def warn_of_missed(method: Method, attribution: Attribution, evidence: Evidence) -> None:
    """Say for which images DeepLIFT's values do not add up to the difference of the scores."""
    if not isinstance(method, (DeepLIFT, DeepLIFTSHAP)) or attribution.delta is None:
        return
    off, whole = attribution.delta.abs(), method.expected_sum(evidence).abs()
    parts = [part.values for part in attribution.parts.values()] or [attribution.values]
    sizes = sum((part.abs().flatten(1).sum(1) for part in parts), attribution.score.abs())
    rounding = _ROUNDING * torch.finfo(off.dtype).eps * sizes
    wrong = (off > torch.maximum(_MISSED * whole, rounding)).nonzero().flatten().tolist()
    if wrong:
        worst = max(wrong, key=lambda i: float(off[i]))
        warn(
            f"{attribution.method} misses the difference of the scores by up to {float(off[worst]):.2g} of "
            f"{float(whole[worst]):.2g} for image {', '.join(map(image_name, wrong))}: operations without a rule take "
            "it, or rounding errors; look at delta, and try double precision or integratedgradients"
        )


def warn_of_stabilised(method: Method, attribution: Attribution) -> None:
    """Say for which images stabilisers take more of the relevance than they should."""
    taken = None if attribution.coverage is None else attribution.coverage.taken.get("stabiliser")
    if taken is None:
        return
    share = taken.abs() / attribution.score.abs()
    wrong = (share > _STABILISED).nonzero().flatten().tolist()
    if wrong:
        most = max(float(share[i]) for i in wrong)
        warn(
            f"{attribution.method} loses up to {most:.2g} of the score to the epsilon of its rules for image "
            f"{', '.join(map(image_name, wrong))}; take a smaller epsilon, or one that is not absolute"
        )


def warn_of_signs(method: Method, attribution: Attribution) -> None:
    """Say for which images a method divided by a negative score: as published, that turns its map into the opposite."""
    if not method.by_score:
        return
    below = ((attribution.score < 0) & attribution.values.flatten(1).any(1)).nonzero().flatten().tolist()
    if below:
        scores = ", ".join(f"{float(attribution.score[i]):.3g}" for i in below)
        warn(
            f"{attribution.method} divides by the score, which is negative for image "
            f"{', '.join(map(image_name, below))} ({scores}): that reverses all signs, so that its positive values "
            "speak against the target; choose a target with a positive score, or gradcam"
        )


def warn_if_empty(method: Method, attribution: Attribution, evidence: Sequence[Evidence]) -> None:
    """Say for which images there is nothing to see, and why."""
    reasons: dict[str, list[str]] = {}
    for image in (attribution.values.flatten(1) == 0).all(1).nonzero().flatten().tolist():
        turned = method.by_score and bool(attribution.score[image] < 0)
        why = _HELD if _is_held(attribution, image) else why_empty(evidence, image, turned=turned)
        reasons.setdefault(why, []).append(image_name(image))
    for reason, images in reasons.items():
        warn(f"{attribution.method} is zero everywhere for image {', '.join(images)}: {reason}")


def _is_held(attribution: Attribution, image: int) -> bool:
    """Whether relevance has ended at a softmax that is no factor of anything."""
    taken = {} if attribution.coverage is None else attribution.coverage.taken
    return "softmax" in taken and bool(taken["softmax"][image] != 0)
