"""`attribute`: a model and a batch of tensors in, `Attribution` values out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias, Unpack, overload

from torch import nn

from explain._utils.errors import keywords
from explain.attribution.options import Options, Settings
from explain.attribution.request import Request
from explain.attribution.result import Attribution
from explain.attribution.selection import GROUPS, applicable_methods, chosen
from explain.data.inputs import InputsLike
from explain.engine.plan import Plan
from explain.methods.registry import MethodLike
from explain.targets.resolve import TargetLike, as_targets

__all__ = ["Attribution", "Options", "applicable_methods", "attribute", "plan"]

Several: TypeAlias = "Literal['all', 'everything'] | list[Any] | tuple[Any, ...]"


@overload
def attribute(  # type: ignore[overload-overlap]  # the name of a group is a name, too
    model: nn.Module, x: InputsLike, method: Several, *, target: TargetLike = None, **options: Unpack[Options]
) -> dict[str, Attribution]: ...


@overload
def attribute(  # type: ignore[overload-overlap]
    model: nn.Module,
    x: InputsLike,
    method: MethodLike = "gradcam",
    *,
    target: TargetLike = None,
    **options: Unpack[Options],
) -> Attribution: ...


@overload
def attribute(  # type: ignore[overload-overlap]
    model: nn.Module,
    x: InputsLike,
    method: Several,
    *,
    targets: Sequence[TargetLike] | None = None,
    top_k: int | None = None,
    **options: Unpack[Options],
) -> list[dict[str, Attribution]]: ...


@overload
def attribute(
    model: nn.Module,
    x: InputsLike,
    method: MethodLike = "gradcam",
    *,
    targets: Sequence[TargetLike] | None = None,
    top_k: int | None = None,
    **options: Unpack[Options],
) -> list[Attribution]: ...


@keywords(Options)
def attribute(
    model: nn.Module,
    x: InputsLike,
    method: MethodLike | Iterable[MethodLike] = "gradcam",
    *,
    target: TargetLike = None,
    targets: Sequence[TargetLike] | None = None,
    top_k: int | None = None,
    **options: Unpack[Options],
) -> Any:
    """Attribute one score per image of ``x`` ``(N, C, H, W)``, or per video ``(N, C, T, H, W)``.

    One method gives an `Attribution`; several, which share their passes, give a dictionary of them by name. With
    ``targets`` or ``top_k`` there is a list of either, with an entry for each target.

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
        method: a name from `list_methods` or a method object, or a list of these; "all" for the methods that the
            network can be explained with in fewer than 200 passes each, or "everything" for the others too.
        target: a class index or label for all images, a callable ``output -> (N,)``, one of `explain.targets` (a class
            in a region, a detection, a difference, a similarity), or None for each image's top class; or a list or
            tensor of N of these, one for each image.
        targets: several targets for every image, instead of ``target``.
        top_k: the k best classes of each image, instead of ``target``.
        layer: a dotted name, a pattern, a module, or several, whose maps are fused; None finds the last feature map.
            A layer that is called several times stands for its last call, and ``"name@0"`` for its first.
        fuse: how the maps of several layers become one, each divided by its maximum: "mean" (None takes the method's
            own way, and else the mean), "max" or "product".
        categories: the labels of the model's classes, for a target given as a label.
        batch_size: for methods that run the model many times, how many inputs at once; None takes what fits into memory
            and is fastest, found in a short trial where the work is long.
        progress: called with the number of such inputs done and their total.
            If it takes a third argument, that is the maps so far, by method.
        precision: "bf16" computes these runs in bfloat16 where only their scores are needed; gradients in bfloat16
            are off by tens of percent.
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
    >>> list(attribute(model, torch.rand(2, 3, 16, 16), ["gradcam", "saliency"], target=[3, 0]))
    ['gradcam', 'saliency']
    >>> [found.target.tolist() for found in attribute(model, torch.rand(2, 3, 16, 16), targets=[4, 0])]
    [[4, 4], [0, 0]]
    """
    settings = Settings(**options)
    wanted = as_targets(target, targets, top_k, settings.categories)
    found = Request.of(model, x, chosen(model, x, method, wanted, settings), wanted, settings).answered()
    several = isinstance(method, Iterable) and not (isinstance(method, str) and method not in GROUPS)
    results = found if several else [next(iter(each.values())) for each in found]
    return results[0] if targets is None and top_k is None else results


@keywords(Options)
def plan(
    model: nn.Module,
    x: InputsLike,
    methods: MethodLike | Iterable[MethodLike] = "gradcam",
    *,
    target: TargetLike = None,
    targets: Sequence[TargetLike] | None = None,
    top_k: int | None = None,
    **options: Unpack[Options],
) -> Plan:
    """Say which passes an explanation would take, before they are run; arguments as for `attribute`.

    The plan prints itself: forward passes, backward passes and perturbed rows, each with the methods that they are for.
    To find the layers, the model may be run on one image.

    Raises:
        ExplainError: as for `attribute`.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    >>> print(plan(model, torch.rand(1, 3, 4, 4), ["gradcam", "scorecam"]))
    1 forward pass of 1 image, recorded from 1 on: gradcam, scorecam
    1 backward pass from the score to 1: gradcam
    1 perturbed row (a blank photo) forward: scorecam
    4 perturbed rows (the photo seen through each map) forward: scorecam
    in all: 1 forward pass, 1 backward pass, 5 perturbed rows forward
    """
    settings = Settings(**options)
    wanted = as_targets(target, targets, top_k, settings.categories)
    return Request.of(model, x, chosen(model, x, methods, wanted, settings), wanted, settings).plan()
