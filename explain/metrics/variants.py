"""Metrics that run the method again: on perturbed photos, another class, or a randomised copy of the model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from explain._utils.errors import muted
from explain.attribution.api import attribute
from explain.attribution.options import Options
from explain.attribution.result import Attribution
from explain.data.inputs import Inputs, as_inputs
from explain.hooks import untouched
from explain.hooks.preserve import calculating
from explain.layers.calls import remembered
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

    ``logits`` ``(N, K)`` are the scores of all classes, ``inputs`` what the model is called with, the photos in them.
    """

    model: nn.Module
    images: torch.Tensor
    classes: torch.Tensor | None
    count: int | None
    logits: torch.Tensor | None = None
    inputs: Inputs | None = None

    @cached_property
    def called_with(self) -> Inputs:
        return as_inputs(self.images) if self.inputs is None else self.inputs

    @cached_property
    def randomised(self) -> Randomised:
        """A copy of the model, the same one for all metrics, whose layers are initialised once more."""
        alone = remembered(self.model, self.called_with).alone
        return Randomised(self.model, self.called_with.first() if alone else self.called_with)


@dataclass(frozen=True, eq=False)
class Variant:
    """What is changed when the method runs again; None stays as it is. Equal keys are equal variants.

    ``images`` makes other photos ``(N, C, H, W)``, ``model`` makes another model, whose layers are found behind
    ``prefix``, ``classes`` ``(N,)`` are other classes, and ``wrap`` makes another method of the method.
    """

    key: Hashable
    images: Callable[[], torch.Tensor] | None = None
    model: Callable[[], nn.Module] | None = None
    prefix: str = ""
    classes: torch.Tensor | None = None
    wrap: Callable[[Method], Method] | None = None

    @property
    def changes(self) -> str:
        """What alone is changed, "photos" or "classes": several such variants run together. Otherwise nothing."""
        if self.model is not None or self.wrap is not None or (self.images is not None and self.classes is not None):
            return ""
        return "photos" if self.classes is None else "classes"


@dataclass(frozen=True, eq=False)
class VariantResult:
    """The maps and scores of a method in a variant."""

    maps: Maps
    images: torch.Tensor
    score: torch.Tensor
    logits: torch.Tensor | None


@dataclass(frozen=True)
class ReattributionMetric(Metric):
    """A metric that runs the method again, so that it needs a method, and not only its map."""

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
    """A method of an evaluation, its attribution, and what metrics see of it."""

    method: Method
    attribution: Attribution
    data: MetricInput


def reattribute(
    metrics: Sequence[ReattributionMetric],
    methods: Mapping[str, EvaluatedMethod],
    context: ModelContext,
    inputs: Inputs,
    target: Target,
    options: Options,
) -> dict[tuple[str, str], MetricResult]:
    """Run methods again in all variants that metrics want, each distinct variant once for all of them.

    What the target reads from the output, such as a region, is settled on the unperturbed photos, for all variants.
    """
    if type(target).settled is not Target.settled:
        with untouched(context.model):
            target = target.settled(inputs.detached().call(context.model), len(inputs))
    wanted: dict[Hashable, WantedVariant] = {}
    keys: dict[tuple[str, str], list[Hashable]] = {}
    for metric in metrics:
        for name, each in methods.items():
            for variant in metric.variants(context, each.data):
                keys.setdefault((name, metric.name), []).append(variant.key)
                wanted.setdefault(variant.key, (variant, {}))[1].setdefault(name, []).append(metric)
    numbers: dict[tuple[str, str, Hashable], torch.Tensor] = {}
    rerun = _Reattribution(methods, context, inputs, target, options)
    for batch in _batched(list(wanted.values()), len(context.images)):
        names = list(dict.fromkeys(name for _, users in batch for name in users))
        found = rerun.maps([variant for variant, _ in batch], names)
        for (variant, users), maps in zip(batch, found, strict=True):
            for name, its_metrics in users.items():
                for metric in its_metrics:
                    with calculating(context.images.device.type):
                        numbers[name, metric.name, variant.key] = metric.compare(methods[name].data, maps[name])
    return {
        (name, metric.name): metric(
            each.data, torch.stack([numbers[name, metric.name, key] for key in keys[name, metric.name]], 1)
        )
        for metric in metrics
        for name, each in methods.items()
    }


WantedVariant = tuple[Variant, dict[str, list[ReattributionMetric]]]
"""A variant, and by method the metrics that compare its maps."""


def _batched(wanted: Sequence[WantedVariant], images: int) -> Iterator[list[WantedVariant]]:
    """Variants of the same methods that only change the photos, or only the class, go together."""
    most, batch = max(1, AT_ONCE // images), list[WantedVariant]()
    for each in wanted:
        alike = batch and each[0].changes == batch[0][0].changes != "" and list(each[1]) == list(batch[0][1])
        if batch and not (alike and len(batch) < most):
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


@dataclass(frozen=True, eq=False)
class _Reattribution:
    methods: Mapping[str, EvaluatedMethod]
    context: ModelContext
    inputs: Inputs
    target: Target
    options: Options

    def maps(self, variants: Sequence[Variant], names: Sequence[str]) -> list[dict[str, VariantResult]]:
        """The maps of these methods in each of the variants, which run as one batch, or as classes of one."""
        first = variants[0]
        model = self.context.model if first.model is None else first.model()
        classes = [each.classes for each in variants if each.classes is not None]
        images, inputs, target = self._photos(variants[:1] if classes else variants)
        targets: list[Target] = [ClassTarget(tuple(each.tolist())) for each in classes] or [target]
        found: list[dict[str, VariantResult]] = [{} for _ in variants]
        for layers, group in self._by_layers(names).items():
            methods = [self.methods[name].method for name in group]
            methods = methods if first.wrap is None else [first.wrap(method) for method in methods]
            where = None if layers is None else [first.prefix + layer for layer in layers]
            options: Any = {**self.options, "layer": where, "progress": None}
            with muted():
                answers = attribute(model, inputs, methods, targets=targets, **options)
            for name, method in zip(group, methods, strict=True):
                for i, part in enumerate(found):
                    answer, place = (answers[i], 0) if classes else (answers[0], i)
                    rows = slice(place * len(self.context.images), (place + 1) * len(self.context.images))
                    own = answer[method.name][rows]
                    part[name] = VariantResult(Maps.of(name, own, images[rows]), images[rows], own.score, own.logits)
        return found

    def _photos(self, variants: Sequence[Variant]) -> tuple[torch.Tensor, Inputs, Target]:
        """The photos of the variants one after the other, what the model is called with for them, and the target."""
        images = torch.cat([self.context.images if each.images is None else each.images() for each in variants])
        if len(variants) == 1 and variants[0].images is None:
            return images, self.inputs, self.target
        owners = torch.arange(len(self.context.images), device=images.device).repeat(len(variants))
        inputs = self.inputs.rows(owners, {self.inputs.path: images.to(self.inputs.x)})
        return images, inputs, self.target.rows(owners) if len(variants) > 1 else self.target

    def _by_layers(self, names: Iterable[str]) -> dict[tuple[str, ...] | None, list[str]]:
        """Methods that look at the same layers are run together; those that look at none go along with any.

        A method that explained the input, and would explain a layer where one is named, stays by itself.
        """
        groups: dict[tuple[str, ...] | None, list[str]] = {}
        for name in names:
            layer = self.methods[name].attribution.layer
            groups.setdefault((layer,) if isinstance(layer, str) else layer, []).append(name)
        without = groups.pop(None, [])
        alone = [name for name in without if self.methods[name].method.layer_optional]
        others = [name for name in without if name not in alone]
        if groups:
            groups[next(iter(groups))] += others
        else:
            alone = without
        return {**groups, **({None: alone} if alone else {})}
