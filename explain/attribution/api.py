"""`attribute`: a model and a batch of tensors in, `Attribution` values out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Unpack

from torch import nn

from explain._utils.errors import keywords
from explain.attribution.request import Options, Request, Settings
from explain.attribution.result import Attribution, fused
from explain.attribution.selection import applicable_methods, chosen
from explain.data.inputs import InputsLike
from explain.engine import Plan
from explain.methods import MethodLike, get_method
from explain.targets import TargetLike

__all__ = [
    "Attribution",
    "Options",
    "Settings",
    "applicable_methods",
    "attribute",
    "attribute_all",
    "attribute_targets",
    "fused",
    "plan",
]

_OF_OTHERS = {
    **{"methods": "explain.attribute_all takes several", "targets": "explain.attribute_targets takes several"},
    **{"top_k": "explain.attribute_targets takes a number of best classes for its targets"},
}


@keywords(Options, elsewhere=_OF_OTHERS)
def attribute(
    model: nn.Module,
    x: InputsLike,
    method: MethodLike = "gradcam",
    *,
    target: TargetLike = None,
    **options: Unpack[Options],
) -> Attribution:
    """Attribute one score per image of ``x`` ``(N, C, H, W)``, or per video ``(N, C, T, H, W)``, with one method.

    Modes belong to modules, not to threads: while a model is explained, other threads find it in evaluation mode too.
    To explain a model that another thread trains, explain ``explain.hooks.copied(model)``, made between two steps. An
    explanation that another thread's ``train()`` came in between is refused.

    A batch is explained by the gradient of the sum of its scores. Where a model lets the images of a batch depend on
    each other (a normalisation over the batch), each image's values hold its part in the other scores too: explain
    such images one at a time. Methods that run altered images refuse such batches.

    Args:
        model: any ``nn.Module``; it and the caller's autograd state are left exactly as found.
        x: preprocessed images, on the model's device; where the model takes more, a tuple of its positional arguments,
            a mapping of its keyword arguments, or `explain.Inputs`. The first image among them is explained. A video
            has its frames behind the channels.
        method: a name from `list_methods`, or a method object.
        target: a class index or label for all images, N class indices, a callable ``output -> (N,)``, one of
            `explain.targets` (a class in a region, a detection, a difference, a similarity), or None for each image's
            top class.
        layer: a dotted name, a pattern, a module, or several, whose maps are fused; None finds the last feature map.
            A layer that is called several times stands for its last call, and ``"name@0"`` for its first.
        fuse: how the maps of several layers become one, each divided by its maximum: "mean" (None takes the method's
            own way, and else the mean), "max" or "product".
        categories: the labels of the model's classes, for a target given as a label.
        batch_size: for methods that run the model many times, how many inputs at once; None takes what fits into memory
            and is fastest, found in a short trial where the work is long.
        progress: called with the number of such inputs done and their total.
            If it takes a third argument, that is the maps so far, by method.
        precision: "bf16" computes these runs in bfloat16.
        samples, tolerance, max_seconds: for methods that estimate, how many altered photos to run at most; the largest
            standard error over the largest magnitude that is small enough to stop; and after how many seconds to stop.
        keep_partial: whether an interrupt (Ctrl-C) gives what there is by then, with ``finished`` false.
        activation: what makes probabilities of the model's outputs, for methods that explain one: "softmax", "sigmoid",
            or "none" where they are probabilities already; None finds it out.

    Raises:
        ExplainError: one line that says which argument does not fit and what would.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    >>> a = attribute(model, torch.rand(2, 3, 16, 16), "gradcam", target=3)
    >>> a.values.shape, a.heatmap.shape, a.layer, a.target.tolist()
    (torch.Size([2, 14, 14]), torch.Size([2, 16, 16]), '1', [3, 3])
    """
    method = get_method(method)
    return attribute_targets(model, x, [method], [target], **options)[0][method.name]


@keywords(Options, elsewhere={name: hint for name, hint in _OF_OTHERS.items() if name != "methods"})
def attribute_all(
    model: nn.Module,
    x: InputsLike,
    methods: MethodLike | Iterable[MethodLike],
    *,
    target: TargetLike = None,
    **options: Unpack[Options],
) -> dict[str, Attribution]:
    """Attribute one score per image with several methods that share their passes; arguments as for `attribute`.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    >>> list(attribute_all(model, torch.rand(1, 3, 4, 4), ["gradcam", "saliency"]))
    ['gradcam', 'saliency']
    """
    return attribute_targets(model, x, methods, [target], **options)[0]


@keywords(Options)
def attribute_targets(
    model: nn.Module,
    x: InputsLike,
    methods: MethodLike | Iterable[MethodLike],
    targets: Sequence[TargetLike] | int,
    **options: Unpack[Options],
) -> list[dict[str, Attribution]]:
    """Attribute several scores per image with several methods, in one forward pass; other arguments as for `attribute`.

    Args:
        methods: names or method objects; "all" for those that the network can be explained with in fewer than 200
            passes each, or "everything" for the others too.
        targets: a list of targets, or a number k for each image's k best classes.

    Returns:
        For each target, a dictionary of attributions by method name.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    >>> [a["gradcam"].target.item() for a in attribute_targets(model, torch.rand(1, 3, 4, 4), ["gradcam"], [4, 0])]
    [4, 0]
    """
    settings = Settings(**options)
    return Request.of(model, x, chosen(model, x, methods, targets, settings), targets, settings).answered()


@keywords(Options)
def plan(
    model: nn.Module,
    x: InputsLike,
    methods: MethodLike | Iterable[MethodLike] = "gradcam",
    targets: Sequence[TargetLike] | int = 1,
    **options: Unpack[Options],
) -> Plan:
    """Say which passes an explanation would take, before they are run; arguments as for `attribute_targets`.

    The plan prints itself: forward passes, backward passes and altered rows, each with the methods that they are for.
    To find the layers, the model may be run on one image.

    Raises:
        ExplainError: as for `attribute_targets`.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    >>> print(plan(model, torch.rand(1, 3, 4, 4), ["gradcam", "scorecam"]))
    1 forward pass of 1 image, recorded from 1 on: gradcam, scorecam
    1 backward pass from the score to 1: gradcam
    1 altered row (a blank photo) forward: scorecam
    4 altered rows (the photo seen through each map) forward: scorecam
    in all: 1 forward pass, 1 backward pass, 5 altered rows forward
    """
    settings = Settings(**options)
    return Request.of(model, x, chosen(model, x, methods, targets, settings), targets, settings).plan()
