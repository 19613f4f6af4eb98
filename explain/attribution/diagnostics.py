"""Why a map is zero everywhere, and what callers are warned of."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from explain._utils.errors import ModelError, image_name, python_or_command, warn
from explain._utils.rounding import all_cancel
from explain.attribution.result import Attribution
from explain.engine import Activations, Attributions, Evidence, InputGradients, LayerGradients
from explain.engine.needs import RelevanceCoverage, RuleCoverage, Uninspected
from explain.engine.perturbations import Attributor, Searches
from explain.methods import (
    LRP,
    BlurIntegratedGradients,
    DeepLIFT,
    DeepLIFTSHAP,
    GuidedIntegratedGradients,
    IntegratedGradients,
    Method,
)
from explain.methods.base import spatial_dims
from explain.relevance.gradient_rules import Coverage

_SATURATED = (
    "the model gives probabilities, this one almost 0 or 1; let it give the scores before "
    "the softmax"
)


def why_empty(
    evidence: Sequence[Evidence], image: int, *, negative_score: bool = False, adds_up: bool = False
) -> str:
    """Say in one line why a method found nothing in one image, and what to do: is the layer active,
    does the score depend on it, is the output a saturated softmax (in this order)?
    """
    first = evidence[0]
    layers = [item.layer for item in evidence if item.layer]
    layer = f"layer {', '.join(layers)}" if layers else "the input"
    if layers and all(_is_zero(item, image, Activations) for item in evidence):
        return f"{layer} gives zero everywhere, as behind a dead ReLU; choose an earlier layer"
    if all(_is_zero(item, image, LayerGradients, InputGradients) for item in evidence):
        reason_of_zero_gradient = (
            f"the score does not change with {layer} (the gradient is zero); choose "
            "another layer or target"
        )
        return _SATURATED if _is_saturated(first, image) else reason_of_zero_gradient
    if layers and adds_up and (terms := _cancelled(evidence, image)):
        reason_of_cancelling = (
            f"{terms} of {layer} add up to rounding errors, as next to a normalisation or before "
            "a softmax"
        )
        return f"{reason_of_cancelling}; choose another layer, or layercam"
    if layers and not first.inputs[image].any():
        return "the input is zero everywhere; give a photo"
    if negative_score:
        effect = (
            "reverses all signs, so that what supports the target is left out; choose one "
            "with a positive score"
        )
        return (
            f"the score is negative ({float(first.score[image]):.3g}) and the method divides by "
            f"it, which {effect}"
        )
    if any(isinstance(need, LayerGradients) for need in first.answers):
        how = python_or_command("relu=False", "--method 'gradcam(relu=False)'")
        return (
            f"all of {layer} contributes negatively; choose another target, or a signed map ({how})"
        )
    reason = f"nothing in {layer} contributes positively; choose another target or method"
    return _SATURATED if _is_saturated(first, image) else reason


def _is_zero(evidence: Evidence, image: int, *kinds: type) -> bool:
    """Whether a layer's evidence has answers to needs of these ``kinds``, and all of them are zero
    for an image. False if there is no such evidence, which then proves nothing.
    """
    values: list[Any] = [
        value for need, value in evidence.answers.items() if isinstance(need, kinds)
    ]
    return bool(values) and not any(value[image].any() for value in values)


def _cancelled(evidence: Sequence[Evidence], image: int) -> str:
    """The words for what adds up to rounding errors at a layer of an image: gradients or maps over
    places in every channel, or products over channels at every place. Empty if none do.
    """
    for item in evidence:
        maps = item.activations[image : image + 1]
        places = spatial_dims(maps)
        for need, batch_gradients in item.answers.items():
            if isinstance(need, LayerGradients):
                gradients = batch_gradients[image : image + 1]
                products = gradients * maps
                if all_cancel(gradients.mean(places), gradients):
                    return "the gradients"
                if any(all_cancel(products.mean(dim), products) for dim in (places, 1)):
                    return "the products of maps and gradients"
                if all_cancel(maps.mean(places), maps):
                    return "the maps"
    return ""


def _is_saturated(evidence: Evidence, image: int) -> bool:
    """Whether the model's outputs are probabilities, and that of the target's class is almost 0 or
    1 for an image. The gradient through such a softmax is too small to say anything.
    """
    if evidence.logits is None or evidence.classes is None:
        return False
    if evidence.outputs.activation != "none" or evidence.outputs.kind == "numbers":
        return False
    probability = float(evidence.logits[image, evidence.classes[image]])
    return min(abs(probability), abs(1 - probability)) < 1e-4


_OF_PATHS = (IntegratedGradients, BlurIntegratedGradients, GuidedIntegratedGradients)
_MISSED = 0.05
"""The share of the score, or of the difference of two, from which on LRP and DeepLIFT say what they
miss."""
_MISSED_BY_POINTS = 0.2
"""The share from which on it is seen whether the backward is no derivative."""
_TOO_FEW_POINTS = 0.5
"""The share from which on the points of a path are said to be too few."""
_POINTS = 20
"""Of fewer points, a path misses much by itself."""
_STABILISED = 0.01
"""The share of the score from which on what stabilisers take is said."""
_ROUNDING = 1000
"""How many of the last bits of the sizes that are added up may be rounding errors."""
_TINY = 100
"""Values that change the score by no more than so many of its last bits may be rounding errors:
those of a mean behind an instance normalisation changed it by up to 45."""
_EXCUSED = 0.01
"""The share of the scores up to which these are rounding errors, however large the sizes are."""


def warn_of_half_precision(methods: Mapping[str, Method], x: torch.Tensor) -> None:
    """Warn of methods whose gradients reach the input in half precision: rounding errors add up
    over all layers. Methods that run others on perturbed inputs are looked into as well.
    """
    if x.dtype not in (torch.float16, torch.bfloat16):
        return

    def reaches_input(method: Method | Attributor) -> bool:
        return any(
            need.whole  # its graph goes back to the input
            or (isinstance(need, Attributions) and reaches_input(need.method))
            or (isinstance(need, Searches) and reaches_input(need.of_samples))
            for need in method.needs
        )

    names = [name for name, method in methods.items() if reaches_input(method)]
    if names:
        half = str(x.dtype).removeprefix("torch.")
        warn(
            f"{', '.join(names)} may be off by tens of percent: the model computes gradients "
            f"in {half}; give model.float() and x.float()"
        )


def warn_of_coverage(method: Method, evidence: Evidence) -> Coverage | None:
    """Warn if a method's rules had nothing to act on or met operations without a rule. Returns the
    operations covered, for `Attribution.coverage`; None for methods without rules.
    """
    coverages: dict[type, Coverage] = {}
    for need in method.needs:
        if isinstance(need, (RelevanceCoverage, RuleCoverage, Uninspected)):
            coverages[type(need)] = evidence[need]
    if not coverages:
        return None
    rectifiers = coverages.get(RuleCoverage)
    relevance = coverages.get(RelevanceCoverage)
    uninspected = coverages.get(Uninspected)
    if rectifiers is not None and not rectifiers.covered:
        warn(
            f"{method.name} found no rectifier (ReLU or a relative) between the input and the "
            "score, so it equals the plain gradient; use saliency, or a network with "
            "rectifiers"
        )
    opaque = [
        (rectifiers, "where they rectify, the plain gradient passes"),
        (uninspected, "what they add is in no map, but in delta"),
    ]
    for coverage, effect in opaque:
        if coverage is not None and coverage.missed:
            warn(
                f"{method.name} cannot look into functions that were written as one operation "
                f"({_listed(coverage)}); {effect}: write them with torch's own functions"
            )
    if relevance is not None and relevance.missed:
        warn(
            f"{method.name} has no rule for some operations ({_listed(relevance)}); they pass "
            "relevance by the plain gradient, and may lose some: write them with simpler "
            "functions"
        )
    return relevance or rectifiers or uninspected


def _listed(coverage: Coverage) -> str:
    """The operations that were missed, as a warning names them: "2 x softmax, 1 x custom"."""
    return ", ".join(f"{count} x {kind}" for kind, count in coverage.missed.items())


def image_names(wrong: torch.Tensor) -> str:
    """The names of the images of a batch for which ``wrong`` ``(N,)`` is true, as messages call
    them; empty without any."""
    return ", ".join(map(image_name, wrong.nonzero().flatten().tolist()))


def not_finite(attribution: Attribution, largest: Sequence[float]) -> ModelError:
    """The error to raise for an attribution that holds NaN or infinity. ``largest`` has the largest
    magnitude of each image, of all parts one after the other; at least one is not finite.
    """
    parts = list(attribution.parts.values()) or [attribution]
    wrong = next(index for index, value in enumerate(largest) if not math.isfinite(value))
    part = parts[wrong * len(parts) // len(largest)]  # each part has as many images
    at_layer = "" if part.layer is None else f" at layer {part.layer}"
    return ModelError(
        f"model must have finite activations and gradients, but {part.method} found NaN or "
        f"infinity{at_layer}; look for a root, logarithm or division at zero, or overflow in half "
        "precision"
    )


def to_be_read(
    method: Method, attribution: Attribution, evidence: Sequence[Evidence], *, warns: bool
) -> dict[str, torch.Tensor]:
    """The tensors that tell whether an attribution is right, left on the device: "largest", the
    largest magnitudes ``(P * N,)`` of P inputs; if it ``warns``, also which images ``(N,)`` have
    "tiny" values, a "negative" score that they are divided by, a sum that is "missed", or a share
    of the score that a "stabiliser" takes.
    """
    largest = []
    for part in attribution.parts.values() or [attribution]:
        values = part.values.detach().flatten(1)
        largest.append(torch.linalg.vector_norm(values, math.inf, dim=1))
    tensors = {"largest": largest[0] if len(largest) == 1 else torch.cat(largest)}
    if not warns:
        return tensors
    score = attribution.score
    if not attribution.parts:  # of several inputs, this evidence is on the first alone
        # taken as slopes, values change the score by about their norm times the largest input
        values = attribution.values.detach()
        change = values.flatten(1).norm(dim=1) * evidence[0].inputs.abs().amax().clamp(min=1)
        limit = _TINY * torch.finfo(values.dtype).eps * score.abs().clamp(min=1)
        tensors["tiny"] = (change > 0) & (change <= limit)
    if method.by_score:
        tensors["negative"] = (score < 0) & attribution.values.flatten(1).any(1)
    promised = _promised_sum(method, attribution, evidence)
    if promised is not None:
        tensors["missed"] = _misses(method, attribution, promised)
    if attribution.coverage is not None and "stabiliser" in attribution.coverage.taken:
        share = attribution.coverage.taken["stabiliser"].abs() / score.abs()
        tensors["stabiliser"] = share > _STABILISED
    return tensors


def warn_of_result(
    method: Method,
    attribution: Attribution,
    largest: Sequence[float],
    doubtful: Mapping[str, torch.Tensor],
    evidence: Sequence[Evidence],
    follows_gradient: Callable[[], bool],
) -> None:
    """Warn of images whose values mean something else than one expects, such as zeros (with the
    reason of `why_empty`). ``largest`` and ``doubtful`` ``(N,)`` come from `to_be_read`.
    """
    name = attribution.method
    score = attribution.score
    if "negative" in doubtful:
        negative = doubtful["negative"]
        scores = ", ".join(f"{value:.3g}" for value in score[negative].tolist())
        warn(
            f"{name} divides by the score, which is negative for image {image_names(negative)} "
            f"({scores}): that reverses all signs; choose a target with a positive score, or "
            "gradcam"
        )
    if "missed" in doubtful:
        promised: Any = _promised_sum(method, attribution, evidence)
        _warn_of_missed(method, attribution, doubtful["missed"], promised, follows_gradient)
    taken = {} if attribution.coverage is None else attribution.coverage.taken
    if "stabiliser" in doubtful:
        wrong = doubtful["stabiliser"]
        share = taken["stabiliser"].abs() / score.abs()
        warn(
            f"{name} loses up to {float(share[wrong].max()):.2g} of the score to the epsilon "
            f"of its rules for image {image_names(wrong)}; take a smaller epsilon, or one that "
            "is not absolute"
        )
    reasons: dict[str, list[str]] = {}
    # images whose values were nothing but rounding errors, and have been set to zero
    cancelled = doubtful["cancelled"].tolist() if "cancelled" in doubtful else [False] * len(score)
    for image, magnitude in enumerate(largest):
        if magnitude != 0 and not cancelled[image]:
            continue
        negative_score = method.by_score and bool(score[image] < 0)
        if cancelled[image]:
            reason = (
                "all that it found are rounding errors, as if the score did not depend on the "
                "photo; choose another target, or try double precision"
            )
        elif attribution.sets is not None:
            asks_for_same = attribution.options.get("becomes") is None
            answer = (
                "the answer is the same"
                if asks_for_same
                else "the answer is not the other class either"
            )
            where = ", an earlier layer" if attribution.options.get("of_layer") else ""
            reason = (
                f"{answer} with all regions absent; take another baseline{where}, or another target"
            )
        elif "softmax" in taken and bool(taken["softmax"][image] != 0):
            # the relevance ended there
            reason = "its rules hold a softmax constant that the score comes through; use attnlrp"
        else:
            reason = why_empty(
                evidence, image, negative_score=negative_score, adds_up=method.adds_up
            )
        reasons.setdefault(reason, []).append(image_name(image))
    for reason, images in reasons.items():
        warn(f"{name} is zero everywhere for image {', '.join(images)}: {reason}")


def _promised_sum(
    method: Method, attribution: Attribution, evidence: Sequence[Evidence]
) -> torch.Tensor | None:
    """The size ``(N,)`` of what the values should add up to: the difference of the scores, or LRP's
    score. None without a promise, for few points, or where operations lack a rule.
    """
    coverage = attribution.coverage
    if attribution.delta is None or (coverage is not None and coverage.missed):
        return None
    if isinstance(method, LRP):
        return attribution.score.abs()
    follows_path = isinstance(method, _OF_PATHS) and method.steps >= _POINTS
    if not follows_path and not isinstance(method, (DeepLIFT, DeepLIFTSHAP)):
        return None
    expected_sum: Any = method.expected_sum(evidence[0])
    size: torch.Tensor = expected_sum.abs()
    return size


def _misses(method: Method, attribution: Attribution, promised: torch.Tensor) -> torch.Tensor:
    """Whether each image's attribution misses its ``promised`` sum: ``(N,)``. A share of the sum
    may be missing, and rounding of huge values that cancel: a small share of the scores.
    """
    assert attribution.delta is not None
    missed = attribution.delta.abs()
    parts = [part.values for part in attribution.parts.values()] or [attribution.values]
    score = attribution.score.abs()
    sizes = sum((part.abs().flatten(1).sum(1) for part in parts), score)
    rounding = torch.minimum(
        _ROUNDING * torch.finfo(missed.dtype).eps * sizes, _EXCUSED * (score + promised)
    )
    share = _MISSED_BY_POINTS if isinstance(method, _OF_PATHS) else _MISSED
    return missed > torch.maximum(share * promised, rounding)


def _warn_of_missed(
    method: Method,
    attribution: Attribution,
    wrong: torch.Tensor,
    promised: torch.Tensor,
    follows_gradient: Callable[[], bool],
) -> None:
    """Warn of images whose values do not add up to ``promised`` ``(N,)``; of a path with few points
    and a true gradient only from a half on, as such paths always miss a part.
    """
    assert attribution.delta is not None
    missed = attribution.delta.abs()
    reason = (
        "operations without a rule take it, or rounding errors; try double precision or "
        "integratedgradients"
    )
    if not follows_gradient():
        reason = (
            "the model's backward is not the derivative of its score; take occlusion or kernelshap"
        )
    elif isinstance(method, _OF_PATHS):
        wrong = wrong & (missed > _TOO_FEW_POINTS * promised)
        reason = "the score changes fast, or jumps, between its points; take more steps"
    if not wrong.any():
        return
    worst = int(torch.where(wrong, missed, -1).argmax())
    amount = (
        f"by up to {float(missed[worst]):.2g} of {float(promised[worst]):.2g} for image "
        f"{image_names(wrong)}"
    )
    what = "the score" if isinstance(method, LRP) else "the difference of the scores"
    warn(f"{attribution.method} misses {what} {amount}: {reason}")
