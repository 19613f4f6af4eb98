"""`attribute`: a model and a batch of tensors in, `Attribution` values out."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from explain.engine import LAYER_NEEDS, Evidence, check_inputs, gather
from explain.errors import MethodError, ModelError, TargetError, warn
from explain.hooks import Where, select
from explain.layers import default_layer
from explain.methods import Method, MethodLike, Style, get_method, options
from explain.targets import TargetLike, TopClass, as_target


@dataclass(frozen=True, eq=False)
class Attribution:
    """What a method says about a batch of N images.

    ``values`` is the raw attribution, detached: ``(N, h, w)`` at the layer's resolution for CAM methods,
    ``(N, C, H, W)`` for pixel methods. ``heatmap`` is its display form. ``score`` ``(N,)`` is what was explained and
    ``target`` the class of each image, or the name of a callable. ``layer`` is the layer's name, a tuple of names where
    several were fused (``maps`` then has each one's values), or None. ``logits`` ``(N, K)`` are the model's class
    scores, if it gave any.
    """

    method: str
    values: torch.Tensor
    target: torch.Tensor | str
    score: torch.Tensor
    layer: str | tuple[str, ...] | None
    size: tuple[int, int]
    style: Style = "heat"
    options: Mapping[str, Any] = field(default_factory=dict)
    maps: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)
    logits: torch.Tensor | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def heatmap(self) -> torch.Tensor:
        """``(N, H, W)`` float32 in [0, 1] at input resolution: magnitude divided by its maximum, never shifted.

        Signed CAM maps show their positive part. Pixel methods show the largest magnitude over the channels, or, where
        the values are contributions that may cancel (``style="signed"``), the magnitude of their sum.
        """
        if self.values.ndim == 4:
            return _by_maximum(self.signed.abs() if self.style == "signed" else self.values.float().abs().amax(1))
        heat = self.values.float().clamp(min=0)[:, None]
        return _by_maximum(F.interpolate(heat, size=self.size, mode="bilinear", align_corners=False)[:, 0])

    @cached_property
    def signed(self) -> torch.Tensor:
        """``(N, H, W)`` float32 in [-1, 1] at input resolution: summed over channels, by its largest magnitude."""
        values = self.values.float()
        if values.ndim == 4:
            flat = values.sum(1)
        else:
            flat = F.interpolate(values[:, None], size=self.size, mode="bilinear", align_corners=False)[:, 0]
        return _by_maximum(flat)


def _by_maximum(maps: torch.Tensor) -> torch.Tensor:
    """Divide each map by its largest magnitude; an all-zero map stays zero."""
    peak = maps.abs().amax(dim=(-2, -1), keepdim=True)
    return maps / torch.where(peak > 0, peak, torch.ones_like(peak))


def attribute(
    model: nn.Module,
    x: torch.Tensor,
    method: MethodLike = "gradcam",
    *,
    target: TargetLike = None,
    layer: Where | None = None,
    categories: Sequence[str] | None = None,
) -> Attribution:
    """Attribute one score per image of ``x`` ``(N, C, H, W)`` with one method.

    Args:
        model: any ``nn.Module``; it and the caller's autograd state are left exactly as found.
        x: preprocessed images, on the model's device.
        method: a name from `list_methods`, or a method object.
        target: a class index or label for all images, N class indices, a callable ``output -> (N,)``, or None for each
            image's top class.
        layer: a dotted name, a pattern, a module, or several (their maps are fused by the mean); None finds the last
            feature map.
        categories: the labels of the model's classes, for a target given as a label.

    Raises:
        ExplainError: one line that says which argument does not fit and what would.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    >>> a = attribute(model, torch.rand(2, 3, 16, 16), "gradcam", target=3)
    >>> a.values.shape, a.heatmap.shape, a.layer, a.target.tolist()
    (torch.Size([2, 14, 14]), torch.Size([2, 16, 16]), '1', [3, 3])
    """
    return attribute_targets(model, x, [method], [target], layer=layer, categories=categories)[0][
        get_method(method).name
    ]


def attribute_all(
    model: nn.Module,
    x: torch.Tensor,
    methods: Iterable[MethodLike],
    *,
    target: TargetLike = None,
    layer: Where | None = None,
    categories: Sequence[str] | None = None,
) -> dict[str, Attribution]:
    """Attribute one score per image with several methods that share their passes; arguments as for `attribute`.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    >>> list(attribute_all(model, torch.rand(1, 3, 4, 4), ["gradcam", "saliency"]))
    ['gradcam', 'saliency']
    """
    return attribute_targets(model, x, methods, [target], layer=layer, categories=categories)[0]


def attribute_targets(
    model: nn.Module,
    x: torch.Tensor,
    methods: Iterable[MethodLike],
    targets: Sequence[TargetLike] | int,
    *,
    layer: Where | None = None,
    categories: Sequence[str] | None = None,
) -> list[dict[str, Attribution]]:
    """Attribute several scores per image with several methods, in one forward pass; other arguments as for `attribute`.

    Args:
        targets: a list of targets, or a number k for each image's k best classes.

    Returns:
        For each target, a dictionary of attributions by method name.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    >>> [a["gradcam"].target.item() for a in attribute_targets(model, torch.rand(1, 3, 4, 4), ["gradcam"], [4, 0])]
    [4, 0]
    """
    chosen = _methods(methods)
    wanted = _targets(targets, categories)
    check_inputs(model, x)
    needs = frozenset().union(*(method.needs for method in chosen.values()))
    layers = (
        [] if layer is None else list(select(model, layer))
    )  # a wrong name is told even where no method looks at layers
    if needs & LAYER_NEEDS and not layers:
        layers = [default_layer(model, x)]
    gathered = gather(model, x, needs, wanted, layers)
    found = [{name: _apply(method, evidence) for name, method in chosen.items()} for evidence in gathered]
    for attributions in found:
        for attribution in attributions.values():
            _warn_if_empty(attribution)
    return found


def _methods(methods: Iterable[MethodLike]) -> dict[str, Method]:
    if isinstance(methods, str) or not isinstance(methods, Iterable):
        methods = [methods]
    chosen: dict[str, Method] = {}
    for given in methods:
        method = get_method(given)
        if chosen.setdefault(method.name, method) != method:
            raise MethodError(
                f"methods must have different names, got two of {method.name!r}; ask for them in two calls"
            )
    if not chosen:
        raise MethodError("methods must name at least one method, got none; see explain.list_methods()")
    return chosen


def _targets(targets: Sequence[TargetLike] | int, categories: Sequence[str] | None) -> list[Any]:
    if isinstance(targets, (str, torch.Tensor)) or callable(targets):
        targets = [targets]
    if not isinstance(targets, Sequence):
        targets = operator.index(targets)
        if targets < 1:
            raise TargetError(f"the number of top classes must be at least 1, got {targets}")
        return [TopClass(rank) for rank in range(targets)]
    if len(targets) == 0:
        raise TargetError("targets must hold at least one target, got none; give None for the top class")
    return [as_target(target, categories) for target in targets]


def _apply(method: Method, evidence: Sequence[Evidence]) -> Attribution:
    """Run a method on the evidence of each layer; fuse where there are several."""
    uses_layer = bool(method.needs & LAYER_NEEDS)
    used = evidence if uses_layer else evidence[:1]
    first = used[0]
    for rule, count in first.rectifiers.items():
        if count == 0 and any(getattr(need, "rule", None) == rule for need in method.needs):
            warn(
                f"{method.name} found no rectifier (ReLU or a relative) between the input and the score, so it equals "
                "the plain gradient; use saliency, or a network with rectifiers"
            )
    maps = {str(item.layer): method(item) for item in used}
    for name, values in maps.items():
        if not torch.isfinite(values).all():
            where = f" at layer {name}" if uses_layer else ""
            raise ModelError(
                f"model must have finite activations and gradients, but {method.name} found NaN or infinity{where}; "
                "look for a square root, logarithm or division at zero, or for an overflow in half precision"
            )
    names = tuple(maps)
    return Attribution(
        method=method.name,
        values=next(iter(maps.values())) if len(maps) == 1 else fuse(list(maps.values())),
        target=first.target if first.classes is None else first.classes,
        score=first.score,
        layer=None if not uses_layer else names[0] if len(names) == 1 else names,
        size=first.size,
        style=method.style,
        options=options(method),
        maps=maps if len(maps) > 1 else {},
        logits=first.logits,
    )


def fuse(maps: Sequence[torch.Tensor]) -> torch.Tensor:
    """Average maps of several layers, each divided by its largest magnitude, at the resolution of the finest.

    >>> fuse([torch.ones(1, 2, 2), torch.zeros(1, 4, 4)])[0, 0]
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    size = max((tuple(m.shape[-2:]) for m in maps), key=lambda shape: shape[0] * shape[1])
    scaled = []
    for each in maps:
        flat = each if each.ndim == 4 else each[:, None]
        peak = flat.abs().amax(dim=(1, 2, 3), keepdim=True)
        flat = flat / torch.where(peak > 0, peak, torch.ones_like(peak))
        resized = F.interpolate(flat, size=size, mode="bilinear", align_corners=False)
        scaled.append(resized if each.ndim == 4 else resized[:, 0])
    return torch.stack(scaled).mean(0)


def _warn_if_empty(attribution: Attribution) -> None:
    empty = (attribution.values.flatten(1) == 0).all(1).nonzero().flatten().tolist()
    if empty:
        where = f" at layer {attribution.layer}" if attribution.layer else ""
        warn(
            f"{attribution.method} is zero everywhere for image {', '.join(map(str, empty))}: nothing{where} speaks "
            "for the target; try another target or layer"
        )
