"""`attribute`: a model and a batch of tensors in, `Attribution` values out.

A call becomes a `Request`. Its methods (`explain.methods`, found by name in the registry) say what
evidence they need; `explain.engine.execution.gather` runs the model and collects it; and each
method computes its map from the evidence.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeAlias, Unpack, overload

from torch import nn

from explain._utils.errors import keywords
from explain.attribution.options import AttributeOptions
from explain.attribution.result import Attribution
from explain.attribution.selection import GROUPS, requested
from explain.data.inputs import InputsLike
from explain.engine.plan import Plan
from explain.layers.intervening import intervene
from explain.methods.base import MethodLike
from explain.targets.resolve import TargetLike

Several: TypeAlias = Literal["all", "everything"] | list[Any] | tuple[Any, ...]


class _OneTarget(AttributeOptions, total=False):
    target: TargetLike


class _Targets(AttributeOptions, total=False):
    targets: Sequence[TargetLike] | None
    top_k: int | None


@overload
def attribute(  # type: ignore[overload-overlap]  # the name of a group is a name, too
    model: nn.Module, x: InputsLike, method: Several, **options: Unpack[_OneTarget]
) -> dict[str, Attribution]: ...


@overload
def attribute(  # type: ignore[overload-overlap]
    model: nn.Module, x: InputsLike, method: MethodLike = "gradcam", **options: Unpack[_OneTarget]
) -> Attribution: ...


@overload
def attribute(  # type: ignore[overload-overlap]
    model: nn.Module, x: InputsLike, method: Several, **options: Unpack[_Targets]
) -> list[dict[str, Attribution]]: ...


@overload
def attribute(
    model: nn.Module, x: InputsLike, method: MethodLike = "gradcam", **options: Unpack[_Targets]
) -> list[Attribution]: ...


@keywords(AttributeOptions)
def attribute(
    model: nn.Module,
    x: InputsLike,
    method: MethodLike | Iterable[MethodLike] = "gradcam",
    *,
    target: TargetLike = None,
    targets: Sequence[TargetLike] | None = None,
    top_k: int | None = None,
    **options: Unpack[AttributeOptions],
) -> Any:
    """Attribute one score per image of ``x`` ``(N, C, H, W)``, per video ``(N, C, T, H, W)`` or
    ``(N, T, C, H, W)``, or per signal ``(N, C, L)``; channels may also come last, as in ``(N, H, W,
    C)``.

    One method gives an `Attribution`; several, which share their passes, give a dictionary of them
    by name. With ``targets`` or ``top_k`` there is a list of either, with an entry for each target.

    Modes belong to modules, not to threads: while a model is explained, other threads find it in
    evaluation mode too. To explain a model that another thread trains, explain
    ``explain.hooks.copied(model)``, made between two steps. An explanation that another thread's
    ``train()`` came in between is refused.

    Where a model normalises over the images of a batch, each is explained as it stands among the
    others: by the gradient of its own score, or by altering it alone. Where they depend on each
    other in another way, methods that run altered images do the same, but gradients hold an image's
    part in the other scores too: explain it alone.

    Args:
        model: any ``nn.Module``; it and the caller's autograd state are left exactly as found.
        x: preprocessed images, on the model's device; where the model takes more, a tuple of its
            positional arguments, a mapping of its keyword arguments, or `explain.Inputs`. The first
            image among them is explained. A video has its frames behind the channels or before
            them, as tiles and bags of patches have; see ``layout``.
        method: a name from `list_methods` or a method object, or a list of these; "all" for the
            methods that the network can be explained with in fewer than 200 passes each, or
            "everything" for the others too. Several of one name are called by the options in which
            they differ, such as "occlusion(window=8)".
        target: a class index (-1 is the last) or label for all images, a callable ``output ->
            (N,)``, one of `explain.targets` (a class in a region, a detection, a difference, a
            similarity), or None for each image's top class; or a list or tensor of N of these, one
            for each image.
        targets: several targets for every image, instead of ``target``.
        top_k: the k best classes of each image, instead of ``target``; of a detector and one image,
            the k best detections, or as many as there are.
        layer: a dotted name, a pattern, a module, or several, whose maps are fused; None finds the
            last feature map, or that of each branch of a network, such as an ensemble. A layer
            that is called several times stands for its last call, and ``"name@0"`` for its first.
            Refused where no method looks at a layer.
        fuse: how the maps of several layers become one: "mean", "max" or "product", each divided by
            its maximum, "sum", as they are, or "stages", the product of the sums at each
            resolution. None takes the method's own way, and else the mean of named layers and the
            sum of branches.
        categories: the labels of the model's classes, for a target given as a label.
        placement: where maps of a layer are drawn on the input: "cells", each cell where the
            network looks with it, or "even", spread evenly, as other packages draw them.
        batch_size: for methods that run the model many times, how many inputs at once; None takes
            what fits into memory and is fastest, found in a short trial where the work is long.
        progress: called with the number of such inputs done and their total; True prints them in a
            line. If it takes a third argument, that is the maps so far, by method.
        samples, tolerance, max_seconds: for methods that estimate, how many altered photos to run
            at most; the largest standard error over the largest magnitude that is small enough to
            stop; and after how many seconds to stop.
        keep_partial: whether an interrupt (Ctrl-C) gives what there is by then, with ``finished``
            false.
        activation: what makes probabilities of the model's outputs, for methods that explain one:
            "softmax", "sigmoid", or "none" where they are probabilities already; None finds it out.
        create_graph: keep the graph of ``values`` to the explained inputs and to the weights, to
            train on them; for the families of gradients, paths, class activation maps and
            relevance. The model is explained in evaluation mode here too, and its mode comes back.
            Scores and ``delta`` are detached, and no warnings are given.
        layout: of ``x``, "NHWC" where the model takes images with their channels last, as Keras
            does, or "NCHW"; with five dimensions, "NTCHW" if frames, tiles or patches come before
            the channels, "NCTHW", or "NTHWC"; of signals, "NCL" or "NLC". None finds it out: of
            images, those with one or three channels last, and not second, may have them there. A
            warning says once for each model that frames come first, or what is assumed. Values for
            each channel have the channels first, but for maps ``(N, T, C, H, W)`` of frames that
            come first.
        interventions: what layers give instead, such as ``[explain.hooks.Ablate("layer3",
            channels=[5])]``.

    Raises:
        ExplainError: one line that says which argument does not fit and what would.

    >>> import torch
    >>> model = nn.Sequential(
    ...     nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    ... )
    >>> a = attribute(model, torch.rand(2, 3, 16, 16), "gradcam", target=3)
    >>> a.values.shape, a.heatmap.shape, a.layer, a.target.tolist()
    (torch.Size([2, 14, 14]), torch.Size([2, 16, 16]), '1', [3, 3])
    >>> list(attribute(model, torch.rand(2, 3, 16, 16), ["gradcam", "saliency"], target=[3, 0]))
    ['gradcam', 'saliency']
    >>> [
    ...     found.target.tolist()
    ...     for found in attribute(model, torch.rand(2, 3, 16, 16), targets=[4, 0])
    ... ]
    [[4, 4], [0, 0]]
    """
    interventions = options.get("interventions", ())
    with intervene(model, interventions) if interventions else nullcontext():
        by_target = requested(model, x, method, target, targets, top_k, **options).attributions()
    is_one_name = isinstance(method, str) and method not in GROUPS
    several = isinstance(method, Iterable) and not is_one_name
    results = by_target if several else [next(iter(by_method.values())) for by_method in by_target]
    return results[0] if targets is None and top_k is None else results


@keywords(AttributeOptions)
def plan(
    model: nn.Module,
    x: InputsLike,
    methods: MethodLike | Iterable[MethodLike] = "gradcam",
    *,
    target: TargetLike = None,
    targets: Sequence[TargetLike] | None = None,
    top_k: int | None = None,
    measure: bool = False,
    **options: Unpack[AttributeOptions],
) -> Plan:
    """Say which passes an explanation would take, before they are run; arguments as for
    `attribute`.

    The plan prints itself: forward passes, backward passes and perturbed inputs, each with the
    methods that they are for. To find the layers, the model may be run on one image. With
    ``measure``, it is run on one twice more, and the plan says about how many seconds and how much
    memory it takes here.

    Raises:
        ExplainError: as for `attribute`.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    >>> print(plan(model, torch.rand(1, 3, 4, 4), ["gradcam", "scorecam"]))
    1 forward pass of 1 image, recorded from 1 on: gradcam, scorecam
    1 backward pass from the score to 1: gradcam
    1 perturbed input (the baseline) forward: scorecam
    4 perturbed inputs (the photo seen through each map) forward: scorecam
    in all: 1 forward pass, 1 backward pass, 5 perturbed inputs forward
    """
    with intervene(model, options.get("interventions", ())):
        request = requested(model, x, methods, target, targets, top_k, **options)
        return request.measured() if measure else request.plan()
