"""Metrics that run the method again on variants: other photos, another class, or a randomised copy of the model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from explain._utils.errors import muted
from explain.attribution.api import attribute
from explain.attribution.options import Options
from explain.attribution.result import Attribution
from explain.data.inputs import Inputs
from explain.hooks import untouched
from explain.hooks.preserve import calculating
from explain.layers.calls import summary_of
from explain.methods import Method
from explain.metrics.base import Metric, MetricInput, MetricResult
from explain.metrics.maps import Maps
from explain.metrics.randomised import Randomised
from explain.targets import ClassTarget, Target

AT_ONCE = 16
"""How many perturbed photos are explained in one batch."""


@dataclass(frozen=True, eq=False)
class ModelContext:
    """What a metric may change: the ``model``, N ``images``, and the ``classes`` ``(N,)`` and their number ``K``.

    ``logits`` ``(N, K)`` are the scores of all classes, ``inputs`` are the model's arguments, which contain the photos.
    """

    model: nn.Module
    images: torch.Tensor
    inputs: Inputs
    classes: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    @property
    def count(self) -> int | None:
        return None if self.logits is None else int(self.logits.shape[1])

    @cached_property
    def randomised(self) -> Randomised:
        """A copy of the model, the same one for all metrics, whose layers are reinitialised."""
        alone = summary_of(self.model, self.inputs).alone
        return Randomised(self.model, self.inputs.first() if alone else self.inputs)


@dataclass(frozen=True, eq=False)
class Variant:
    """A variant in which the method runs again; what is None is not changed. Equal keys are equal variants.

    ``images`` makes other photos ``(N, C, H, W)``, ``model`` makes another model, whose layers' names begin with
    ``prefix``, ``classes`` ``(N,)`` are other classes, and ``wrap`` makes another method of the method.
    """

    key: Hashable
    images: Callable[[], torch.Tensor] | None = None
    model: Callable[[], nn.Module] | None = None
    prefix: str = ""
    classes: torch.Tensor | None = None
    wrap: Callable[[Method], Method] | None = None


@dataclass(frozen=True, eq=False)
class VariantResult:
    """The maps and scores of a method in a variant."""

    maps: Maps
    images: torch.Tensor
    score: torch.Tensor
    logits: torch.Tensor | None


@dataclass(frozen=True)
class ReattributionMetric(Metric):
    """A metric that runs the method again: it needs a method, and not only its map."""

    def variants(self, context: ModelContext, data: MetricInput) -> Iterator[Variant]:
        """The variants that the method is run in."""
        raise NotImplementedError

    def compare(self, data: MetricInput, found: VariantResult) -> torch.Tensor:
        """One number for each image ``(N,)``, or several ``(N, k)``, from the maps of a variant."""
        raise NotImplementedError

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        """Return a figure for each image, from the numbers ``(N, V)`` or ``(N, V, k)`` of V variants."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class EvaluatedMethod:
    """A method of an evaluation, its attribution, and the input of metrics."""

    method: Method
    attribution: Attribution
    data: MetricInput


Users = dict[str, list[ReattributionMetric]]
"""The metrics that compare the maps of a variant, by method."""


def reattribute(
    metrics: Sequence[ReattributionMetric],
    methods: Mapping[str, EvaluatedMethod],
    context: ModelContext,
    target: Target,
    options: Options,
) -> dict[tuple[str, str], MetricResult]:
    """Run methods again in all variants that metrics need, each distinct variant once for all of them.

    What the target reads from the output, such as a region, is settled on the unperturbed photos, for all variants.
    """
    if type(target).settled is not Target.settled:
        with untouched(context.model):
            target = target.settled(context.inputs.detached().call(context.model), len(context.inputs))
    variants: dict[Hashable, tuple[Variant, Users]] = {}
    keys: dict[tuple[str, str], list[Hashable]] = {}
    for metric in metrics:
        for name, each in methods.items():
            for variant in metric.variants(context, each.data):
                keys.setdefault((name, metric.name), []).append(variant.key)
                variants.setdefault(variant.key, (variant, {}))[1].setdefault(name, []).append(metric)
    numbers: dict[tuple[str, str, Hashable], torch.Tensor] = {}
    for batch in _batches(list(variants.values()), len(context.images)):
        used = {name: methods[name] for _, users in batch for name in users}
        results = _run([variant for variant, _ in batch], used, context, target, options)
        for (variant, users), found in zip(batch, results, strict=True):
            for name, its_metrics in users.items():
                for metric in its_metrics:
                    with calculating(context.images.device.type):
                        numbers[name, metric.name, variant.key] = metric.compare(methods[name].data, found[name])
    return {
        (name, metric.name): metric(
            each.data, torch.stack([numbers[name, metric.name, key] for key in keys[name, metric.name]], 1)
        )
        for metric in metrics
        for name, each in methods.items()
    }


def _batches(variants: Sequence[tuple[Variant, Users]], images: int) -> Iterator[list[tuple[Variant, Users]]]:
    """Variants of the same methods that only change the photos, or only the class, run together."""
    batch: list[tuple[Variant, Users]] = []
    kind: Any = None
    for variant, users in variants:
        own = (_changes(variant), list(users))
        if batch and (own != kind or not own[0] or len(batch) >= max(1, AT_ONCE // images)):
            yield batch
            batch = []
        kind = own
        batch.append((variant, users))
    if batch:
        yield batch


def _changes(variant: Variant) -> str:
    """What alone the variant changes, "photos" or "classes"; empty if it changes something else, or both."""
    if variant.model is not None or variant.wrap is not None:
        return ""
    if variant.classes is None:
        return "photos"
    return "classes" if variant.images is None else ""


def _run(
    variants: Sequence[Variant],
    methods: Mapping[str, EvaluatedMethod],
    context: ModelContext,
    target: Target,
    options: Options,
) -> list[dict[str, VariantResult]]:
    """The maps of the methods in each variant; the variants run as one batch, or as classes of one."""
    first, count = variants[0], len(context.images)
    model = context.model if first.model is None else first.model()
    classes: list[Target] = [ClassTarget(tuple(v.classes.tolist())) for v in variants if v.classes is not None]
    changed = variants[:1] if classes else variants
    images = torch.cat([context.images if each.images is None else each.images() for each in changed])
    inputs = context.inputs
    if len(changed) > 1 or first.images is not None:
        owners = torch.arange(count, device=images.device).repeat(len(changed))
        inputs = inputs.rows(owners, {inputs.path: images.to(inputs.x)})
        target = target.rows(owners) if len(changed) > 1 else target
    results: list[dict[str, VariantResult]] = [{} for _ in variants]
    for layers, names in _by_layers(methods).items():
        objects = [methods[name].method for name in names]
        objects = objects if first.wrap is None else [first.wrap(method) for method in objects]
        where = None if layers is None else [first.prefix + layer for layer in layers]
        settings: Any = {**options, "layer": where, "progress": None}
        with muted():
            found = attribute(model, inputs, objects, targets=classes or [target], **settings)
        for name, method in zip(names, objects, strict=True):
            for i, result in enumerate(results):
                of_target, start = (found[i], 0) if classes else (found[0], i * count)
                rows = slice(start, start + count)
                own = of_target[method.name][rows]
                result[name] = VariantResult(Maps.of(name, own, images[rows]), images[rows], own.score, own.logits)
    return results


def _by_layers(methods: Mapping[str, EvaluatedMethod]) -> dict[tuple[str, ...] | None, list[str]]:
    """Methods of the same layers run together; those without a layer run with any of them.

    A method that explained the input, and would explain a layer where one is named, runs alone.
    """
    groups: dict[tuple[str, ...] | None, list[str]] = {}
    for name, each in methods.items():
        layer = each.attribution.layer
        groups.setdefault((layer,) if isinstance(layer, str) else layer, []).append(name)
    without = groups.pop(None, [])
    alone = [name for name in without if not groups or methods[name].method.layer_optional]
    if groups:
        groups[next(iter(groups))] += [name for name in without if name not in alone]
    return {**groups, None: alone} if alone else groups
