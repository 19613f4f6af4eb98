"""Pass-through rules, and those of the first transformer attribution that rest on them.

Relevance is value times gradient: where a step passes on, place by place, what it gets, the gradient that leaves is the
one that arrives, times what the step gave over what it was given.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F

from explain._utils.errors import MethodError
from explain.relevance.nonlinear_rules import ConstantTerms
from explain.relevance.propagation import Gradients, RelevanceFlow, _constant, per_image
from explain.relevance.rule import RelevanceRule
from explain.tracing.batch_layout import numbers_of
from explain.tracing.steps import Step


@dataclass(frozen=True)
class Pass(RelevanceRule):
    """The pass rule: each value of the input gets what its place of the result has, whatever made it.

    For activations, normalisations of a photo and softmaxes, which give as many values as they are given. Attention is
    two products with a softmax between: the factors of each product share equally. What belongs to an input of zero
    cannot be passed on, and is taken.
    """

    name: ClassVar[str] = "pass"

    def fits(self, step: Step) -> bool:
        if step.kind == "attention":
            kept = [step.values[i].tensor for i in sorted(step.values)]
            return len(kept) == 3 and len({each.shape[:-2] for each in kept}) == 1
        if step.kind == "deviation":
            return bool(step.entrances) and tuple(step.dependent) == (0,)
        return step.kind in ("activation", "softmax") and tuple(step.dependent) == (0,)

    def attach(self, step: Step, flow: RelevanceFlow) -> None:
        if step.kind == "attention":
            _pass_attention(step, flow)
        else:
            super().attach(step, flow)

    def back(self, step: Step, gradient: torch.Tensor, flow: RelevanceFlow) -> torch.Tensor:
        if step.kind == "deviation":
            return _ratio(flow, gradient, _normalised(step), step.values[0].tensor)
        if step.kind == "softmax":
            assert step.result is not None
            return _ratio(flow, gradient, step.result.tensor, step.values[0].tensor)
        if step.slope is None:
            return _ratio(flow, gradient, step.values[1].tensor, step.values[0].tensor)
        # What it was given is overwritten, and the line from its value at zero is known.
        if step.offset is not None:
            flow.take("activations", gradient * step.offset)
        return gradient * torch.where(step.slope.isnan() | (gradient == 0), 0, step.slope)


def _ratio(flow: RelevanceFlow, arrived: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient with which x takes what y has."""
    relevance = arrived * y
    flow.take("zero inputs", relevance * (x == 0))
    return torch.where(x == 0, 0, relevance / torch.where(x == 0, 1, x))


def _normalised(step: Step) -> torch.Tensor:
    """What a normalisation gave, which is computed once more."""
    x, options = step.values[0].tensor, dict(step.options)
    shape = () if step.function in ("group_norm", "instance_norm") else (options.pop("normalized_shape"),)
    groups = (options.pop("num_groups"),) if step.function == "group_norm" else ()
    with torch.no_grad():
        found: torch.Tensor = getattr(F, step.function)(x, *shape, *groups, **options)
    return found


def _pass_attention(step: Step, flow: RelevanceFlow) -> None:
    """Through a fused attention: half of it to the values, the rest through the softmax to query and key alike."""

    def arrived(gradient: torch.Tensor) -> torch.Tensor:
        q, k, v = (step.values[i].tensor for i in range(3))
        scale = step.options.get("scale")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        scores = q @ k.transpose(-2, -1) * scale
        weights = _masked(scores, step).softmax(-1)
        of_scores = _ratio(flow, gradient @ v.transpose(-2, -1) / 2, weights, scores) * scale / 2
        sent = {
            0: of_scores @ k,
            1: of_scores.transpose(-2, -1) @ q,
            2: weights.transpose(-2, -1) @ gradient / 2,
        }
        for place, found in sent.items():
            flow.give(step.entrances[place], partial(_constant, found))
        return gradient / 2  # what the weights get, where the kernel is one of several Nodes

    flow.arriving(step, arrived)


def _masked(scores: torch.Tensor, step: Step) -> torch.Tensor:
    """Scores with what keeps some keys from some queries."""
    mask = step.options.get("attn_mask")
    if step.options.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        return scores
    return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.detach()


@dataclass(frozen=True)
class Norm(ConstantTerms):
    """The norm rule: what is added up shares out what arrives in proportion to what each adds.

    R_i = x_i / (sum of x) R. As value times gradient it is the plain gradient of a sum or an average, and needs no
    stabiliser, since no quotient is formed. What is added without being a signal takes its share as a bias.
    """

    name: ClassVar[str] = "norm"


@dataclass(frozen=True)
class Balanced(RelevanceRule):
    """A sum of two signals, such as a shortcut and what it leads past (Chefer et al., CVPR 2021).

    The norm rule gives each of them a share, and large shares of opposite signs cancel out. Here each signal's shares
    are scaled, for each image, so that both together keep what arrived, in proportion to the magnitudes of their sums.
    """

    name: ClassVar[str] = "balanced"

    def fits(self, step: Step) -> bool:
        return step.function in ("add", "iadd", "sub", "isub") and len(step.values) == 2

    def attach(self, step: Step, flow: RelevanceFlow) -> None:
        def after(grad_inputs: Gradients, grad_outputs: Gradients) -> Gradients:
            one, other = grad_inputs[:2]
            if one is None or other is None:
                return grad_inputs
            sums = [per_image(g * step.values[i].tensor, flow.count, step.images) for i, g in enumerate((one, other))]
            whole, sizes = sums[0] + sums[1], sums[0].abs() + sums[1].abs()
            factors = (torch.where(s == 0, 0, s.sign() * whole / torch.where(sizes == 0, 1, sizes)) for s in sums)
            changed = (g * _spread(f, g, step.images) for g, f in zip((one, other), factors, strict=True))
            return (*changed, *grad_inputs[2:])

        flow.at(step, after)


def _spread(per_image: torch.Tensor, like: torch.Tensor, images: torch.Tensor | None) -> torch.Tensor:
    """A number for each image, in the shape that meets a tensor with values of all of them."""
    numbers = numbers_of(like, len(per_image), images)
    if numbers is None:
        raise MethodError(
            "relevance must balance sums of each image by itself, and which image the rows of a sum of shape "
            f"{tuple(like.shape)} belong to is not known; explain one image at a time"
        )
    return per_image[numbers.long()]
