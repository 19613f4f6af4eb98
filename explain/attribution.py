"""`attribute`: a model and a batch of tensors in, `Attribution` values out."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import nn

from explain.engine import ClassWeights, Evidence, Precision, Progress, Work, check_inputs, gather
from explain.errors import (
    ExplainError,
    LayerError,
    MethodError,
    ModelError,
    TargetError,
    image_name,
    muted,
    warn,
)
from explain.hooks import Where, unwrapped
from explain.inputs import Inputs, InputsLike
from explain.layers import default_layer, enlarge, find_layers, forget, stage_layers
from explain.methods import (
    Complete,
    Demanding,
    Fusion,
    ManyLayers,
    Method,
    MethodLike,
    Style,
    get_method,
    list_methods,
    options,
    uses_layer,
)
from explain.methods.base import one_of, over_all
from explain.reasons import why_empty
from explain.targets import Target, TargetLike, TopClass, as_target, settle


@dataclass(frozen=True, eq=False)
class Attribution:
    """What a method says about a batch of N images.

    ``values`` is the raw attribution, detached: ``(N, h, w)`` at the layer's resolution for CAM methods,
    ``(N, C, H, W)`` for pixel methods. ``heatmap`` is its display form. ``score`` ``(N,)`` is what was explained and
    ``target`` the class of each image, or the name of a callable. ``layer`` is the layer's name, a tuple of names where
    several were fused (``maps`` then has each one's values), or None. ``logits`` ``(N, K)`` are the model's class
    scores, if it gave any. ``delta`` ``(N,)`` is by how much values that ought to add up to the score miss it, for
    methods that make this promise; ``fuse`` is how several layers' maps became one. ``input`` names the argument that
    was explained, where the model takes several.

    Of a video ``(N, C, T, H, W)``, all of these have a dimension for frames before height and width.
    """

    method: str
    values: torch.Tensor
    target: torch.Tensor | str
    score: torch.Tensor
    layer: str | tuple[str, ...] | None
    size: tuple[int, ...]
    style: Style = "heat"
    options: Mapping[str, Any] = field(default_factory=dict)
    maps: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)
    logits: torch.Tensor | None = field(default=None, repr=False)
    delta: torch.Tensor | None = None
    fuse: Fusion | None = None
    input: str | None = None

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, which: int | slice) -> Attribution:
        """Return the attribution of one image, or of several in a row, as a batch that keeps nothing of the others."""
        chosen = range(len(self))[which]
        rows = [chosen] if isinstance(chosen, int) else list(chosen)

        def part(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[rows]  # a copy, since it is chosen by a list

        per_image = ("values", "target", "score", "logits", "delta")
        tensors = {name: getattr(self, name) for name in per_image}
        taken: dict[str, Any] = {
            name: part(value) for name, value in tensors.items() if isinstance(value, torch.Tensor)
        }
        return replace(self, maps={name: part(values) for name, values in self.maps.items()}, **taken)

    @cached_property
    def heatmap(self) -> torch.Tensor:
        """``(N, H, W)`` float32 in [0, 1] at input resolution: magnitude divided by its maximum, never shifted.

        Signed CAM maps show their positive part. Pixel methods show the largest magnitude over the channels, or, where
        the values are contributions that may cancel (``style="signed"``), the magnitude of their sum.
        """
        if self._in_pixels:
            return _by_maximum(self.signed.abs() if self.style == "signed" else self.values.float().abs().amax(1))
        return _by_maximum(enlarge(self.values.float().clamp(min=0)[:, None], self.size)[:, 0])

    @cached_property
    def signed(self) -> torch.Tensor:
        """``(N, H, W)`` float32 in [-1, 1] at input resolution: summed over channels, by its largest magnitude."""
        values = self.values.float()
        return _by_maximum(values.sum(1) if self._in_pixels else enlarge(values[:, None], self.size)[:, 0])

    @property
    def _in_pixels(self) -> bool:
        return self.values.ndim == len(self.size) + 2


def _by_maximum(maps: torch.Tensor) -> torch.Tensor:
    """Divide each map by its largest magnitude; an all-zero map stays zero."""
    peak = maps.abs().flatten(1).amax(1)
    return maps / over_all(torch.where(peak > 0, peak, 1), maps)


def attribute(
    model: nn.Module,
    x: InputsLike,
    method: MethodLike = "gradcam",
    *,
    target: TargetLike = None,
    layer: Where | None = None,
    fuse: Fusion | None = None,
    categories: Sequence[str] | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
    precision: Precision = "full",
) -> Attribution:
    """Attribute one score per image of ``x`` ``(N, C, H, W)``, or per video ``(N, C, T, H, W)``, with one method.

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
        batch_size: for methods that run the model many times, how many inputs at once; None takes as many as fit into
            half a gigabyte.
        progress: called with the number of such inputs done and their total.
        precision: "bf16" computes these runs in bfloat16.

    Raises:
        ExplainError: one line that says which argument does not fit and what would.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    >>> a = attribute(model, torch.rand(2, 3, 16, 16), "gradcam", target=3)
    >>> a.values.shape, a.heatmap.shape, a.layer, a.target.tolist()
    (torch.Size([2, 14, 14]), torch.Size([2, 16, 16]), '1', [3, 3])
    """
    method = get_method(method)
    return attribute_targets(
        model, x, [method], [target], layer=layer, fuse=fuse, categories=categories, batch_size=batch_size,
        progress=progress, precision=precision,
    )[0][method.name]  # fmt: skip


def attribute_all(
    model: nn.Module,
    x: InputsLike,
    methods: MethodLike | Iterable[MethodLike],
    *,
    target: TargetLike = None,
    layer: Where | None = None,
    fuse: Fusion | None = None,
    categories: Sequence[str] | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
    precision: Precision = "full",
) -> dict[str, Attribution]:
    """Attribute one score per image with several methods that share their passes; arguments as for `attribute`.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    >>> list(attribute_all(model, torch.rand(1, 3, 4, 4), ["gradcam", "saliency"]))
    ['gradcam', 'saliency']
    """
    return attribute_targets(
        model, x, methods, [target], layer=layer, fuse=fuse, categories=categories, batch_size=batch_size,
        progress=progress, precision=precision,
    )[0]  # fmt: skip


def attribute_targets(
    model: nn.Module,
    x: InputsLike,
    methods: MethodLike | Iterable[MethodLike],
    targets: Sequence[TargetLike] | int,
    *,
    layer: Where | None = None,
    fuse: Fusion | None = None,
    categories: Sequence[str] | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
    precision: Precision = "full",
) -> list[dict[str, Attribution]]:
    """Attribute several scores per image with several methods, in one forward pass; other arguments as for `attribute`.

    Args:
        methods: names or method objects, or "all" for all that the network can be explained with.
        targets: a list of targets, or a number k for each image's k best classes.

    Returns:
        For each target, a dictionary of attributions by method name.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    >>> [a["gradcam"].target.item() for a in attribute_targets(model, torch.rand(1, 3, 4, 4), ["gradcam"], [4, 0])]
    [4, 0]
    """
    model = unwrapped(model)
    inputs = check_inputs(model, x)
    layer = None if layer is None else find_layers(model, inputs, layer)  # a wrong name is told even where none is used
    wanted = _targets(targets, categories)
    chosen = _methods(applicable_methods(model, inputs, layer=layer, target=wanted[0]) if methods == "all" else methods)
    work = Work(batch_size, progress, precision)
    if fuse is not None:
        one_of("attribute", "fuse", fuse, ("mean", "max", "product"))
    explained = partial(_explained, model, inputs, chosen, wanted, work, fuse)
    layers_of = partial(_layers, model, inputs, named=layer, target=wanted[0])
    try:
        return explained({name: layers_of(method) for name, method in chosen.items()})
    except LayerError:
        if layer is not None:
            raise
    # What was chosen leads to another head than this target's, or the network does something else than it did.
    forget(model)
    return explained({name: layers_of(method, refresh=True) for name, method in chosen.items()})


def _explained(
    model: nn.Module,
    inputs: Inputs,
    methods: Mapping[str, Method],
    targets: list[Target],
    work: Work,
    fuse: Fusion | None,
    looked_at: Mapping[str, list[str]],
) -> list[dict[str, Attribution]]:
    """Gather the evidence and run the methods on it, each on that of the layers that it looks at."""
    needs = frozenset().union(*(method.needs for method in methods.values()))
    layers = dict.fromkeys(layer for names in looked_at.values() for layer in names)
    pooled = [layer for name, names in looked_at.items() if ClassWeights() in methods[name].needs for layer in names]
    found = []
    for evidence in gather(model, inputs, needs, targets, layers, work, pooled=pooled):
        of = {item.layer: item for item in evidence}
        whole = [replace(evidence[0], layer=None)]
        used = {name: [of[layer] for layer in names] or whole for name, names in looked_at.items()}
        # The model may run so, but not the mathematics; and what it makes must be good for in-place steps of the model.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(inputs.x.device.type, enabled=False):
            found.append({name: _apply(method, used[name], fuse, inputs.name) for name, method in methods.items()})
        for name, attribution in found[-1].items():
            _warn_if_empty(attribution, used[name])
    return found


def _layers(
    model: nn.Module, inputs: Inputs, method: Method, *, named: list[str] | None, target: Target, refresh: bool = False
) -> list[str]:
    """The layers that a method looks at: those asked for, or its own choice."""
    if not uses_layer(method):
        return []
    if named:
        return named

    def score(output: Any) -> torch.Tensor:
        return settle(target, output, len(inputs)).pick(output, len(inputs))[0]

    if isinstance(method, ManyLayers):
        return stage_layers(model, inputs, score, refresh=refresh)
    return [default_layer(model, inputs, score, refresh=refresh)]


def applicable_methods(
    model: nn.Module, x: InputsLike, *, layer: Where | None = None, target: TargetLike = None
) -> list[str]:
    """Name the methods that this network and target can be explained with: all but those that ask for another kind.

    Those that ask for a kind of network, or for a class as target, are tried on ``x`` ``(N, C, H, W)``.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    >>> sorted(set(list_methods()) - set(applicable_methods(model, torch.rand(1, 3, 4, 4))))
    ['cam', 'legrad', 'rollout']
    """
    model = unwrapped(model)
    inputs = check_inputs(model, x)
    try:
        has_maps = bool(layer) or bool(default_layer(model, inputs))
    except LayerError:
        has_maps = False
    candidates = [method for method in map(get_method, list_methods()) if has_maps or not uses_layer(method)]
    return [method.name for method in candidates if _applies(method, model, inputs, layer, target)]


def _applies(method: Method, model: nn.Module, x: Inputs, layer: Where | None, target: TargetLike) -> bool:
    compares = any(getattr(need, "objective", None) is not None for need in method.needs)
    if not compares and not isinstance(method, Demanding):
        return True
    try:
        with muted():
            attribute(model, x, method, layer=layer, target=target)
    except ExplainError:
        return False
    return True


def _methods(methods: MethodLike | Iterable[MethodLike]) -> dict[str, Method]:
    if isinstance(methods, str) or not isinstance(methods, Iterable):
        methods = [methods]
    chosen: dict[str, Method] = {}
    for given in methods:
        method = get_method(given)
        if repr(chosen.setdefault(method.name, method)) != repr(method):  # a tensor among the options has no one ==
            raise MethodError(
                f"methods must have different names, got two of {method.name!r}; ask for them in two calls"
            )
    if not chosen:
        raise MethodError("methods must name at least one method, got none; see explain.list_methods()")
    return chosen


def _targets(targets: Sequence[TargetLike] | int, categories: Sequence[str] | None) -> list[Any]:
    if isinstance(targets, (str, torch.Tensor, Target)) or callable(targets):
        targets = [targets]
    if not isinstance(targets, Sequence):
        targets = operator.index(targets)
        if targets < 1:
            raise TargetError(f"top_k must be at least 1, got {targets}; leave it out for the top class")
        return [TopClass(rank) for rank in range(targets)]
    if len(targets) == 0:
        raise TargetError("targets must hold at least one target, got none; give None for the top class")
    return [as_target(target, categories) for target in targets]


def _apply(method: Method, evidence: Sequence[Evidence], how: Fusion | None, explained: str | None) -> Attribution:
    """Run a method on the evidence of each layer; fuse where there are several."""
    first = evidence[0]
    for rule, count in first.rectifiers.items():
        if count == 0 and any(getattr(need, "rule", None) == rule for need in method.needs):
            warn(
                f"{method.name} found no rectifier (ReLU or a relative) between the input and the score, so it equals "
                "the plain gradient; use saliency, or a network with rectifiers"
            )
    maps = {str(item.layer): method(item) for item in evidence}
    for name, values in maps.items():
        if not torch.isfinite(values).all():
            where = f" at layer {name}" if uses_layer(method) else ""
            raise ModelError(
                f"model must have finite activations and gradients, but {method.name} found NaN or infinity{where}; "
                "look for a square root, logarithm or division at zero, or for an overflow in half precision"
            )
    names = tuple(maps)
    values = next(iter(maps.values()))
    if len(maps) > 1 or isinstance(method, ManyLayers):
        how = how or (method.fusion if isinstance(method, ManyLayers) else "mean")
        values = fused(list(maps.values()), how)
    return Attribution(
        method=method.name,
        values=values,
        target=first.target if first.classes is None else first.classes,
        score=first.score,
        layer=None if not uses_layer(method) else names[0] if len(names) == 1 else names,
        size=first.size,
        style=method.style,
        options=options(method),
        maps=maps if len(maps) > 1 else {},
        logits=first.logits,
        delta=method.delta(first, values) if isinstance(method, Complete) and len(maps) == 1 else None,
        fuse=how if len(maps) > 1 else None,
        input=explained,
    )


def fused(maps: Sequence[torch.Tensor], how: Fusion = "mean") -> torch.Tensor:
    """Make one map of those of several layers, each divided by its largest magnitude, at the finest one's resolution.

    A product takes the positive parts: two layers that speak against the target do not speak for it together.

    >>> fused([torch.ones(1, 2, 2), torch.zeros(1, 4, 4)])[0, 0]
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    size = max((tuple(m.shape[1:]) for m in maps), key=prod)
    stacked = torch.stack([enlarge(_by_maximum(each)[:, None], size)[:, 0] for each in maps])
    return stacked.mean(0) if how == "mean" else stacked.amax(0) if how == "max" else stacked.clamp(min=0).prod(0)


def _warn_if_empty(attribution: Attribution, evidence: Sequence[Evidence]) -> None:
    reasons: dict[str, list[str]] = {}
    for image in (attribution.values.flatten(1) == 0).all(1).nonzero().flatten().tolist():
        reasons.setdefault(why_empty(evidence, image), []).append(image_name(image))
    for reason, images in reasons.items():
        warn(f"{attribution.method} is zero everywhere for image {', '.join(images)}: {reason}")
