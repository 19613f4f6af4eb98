"""Metrics that ask the method again: of altered photos, of another class, of a randomised copy of the model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from explain._utils.errors import MetricError, muted
from explain.attribution.api import attribute
from explain.attribution.options import Options
from explain.attribution.result import Attribution
from explain.data.inputs import Inputs, as_inputs
from explain.hooks import calculating, untouched
from explain.layers.calls import remembered
from explain.methods import Method
from explain.metrics.base import Metric, MetricInput, MetricResult
from explain.metrics.maps import Maps
from explain.metrics.randomised import Randomised
from explain.targets import ClassTarget, Settles, Target, for_rows, settle

AT_ONCE = 16
"""How many altered photos a method is asked about in one batch."""


@dataclass(frozen=True, eq=False)
class ModelContext:
    """What a metric may alter: the ``model``, N ``images``, and the ``classes`` ``(N,)`` and their number ``K``.

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
    """In which the method is asked again; what is None stays as it is. Equal keys are equal settings.

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
    def alters(self) -> str:
        """What alone is altered, "photos" or "classes": several such settings are run together. Else nothing."""
        if self.model is not None or self.wrap is not None or (self.images is not None and self.classes is not None):
            return ""
        return "photos" if self.classes is None else "classes"


@dataclass(frozen=True, eq=False)
class VariantResult:
    """What a method said in a setting."""

    maps: Maps
    images: torch.Tensor
    score: torch.Tensor
    logits: torch.Tensor | None


@runtime_checkable
class ReattributionMetric(Metric, Protocol):
    """A metric that asks the method again, so that a map alone cannot be judged by it."""

    def settings(self, world: ModelContext, case: MetricInput) -> Iterator[Variant]:
        """The settings that it wants the method asked in."""
        ...

    def compare(self, case: MetricInput, found: VariantResult) -> torch.Tensor:
        """One number for each image ``(N,)``, or several ``(N, k)``, from the maps in a setting."""
        ...

    def __call__(self, case: MetricInput, numbers: torch.Tensor) -> MetricResult:
        """A figure for each image, from the numbers of all settings ``(N, settings)``, or ``(N, settings, k)``."""
        ...


@dataclass(frozen=True, eq=False)
class EvaluatedMethod:
    """A method of an evaluation, with the layers that it looked at."""

    method: Method
    attribution: Attribution
    case: MetricInput


def asked_again(
    metrics: Sequence[ReattributionMetric],
    methods: Mapping[str, EvaluatedMethod],
    world: ModelContext,
    inputs: Inputs,
    target: Target,
    options: Options,
) -> dict[tuple[str, str], MetricResult]:
    """Ask methods again in all settings that metrics want, each distinct setting once for all of them.

    What the target reads from the output, such as a region, it reads from the photos as they are, for all settings.
    """
    if isinstance(target, Settles):
        with untouched(world.model):
            target = settle(target, inputs.detached().call(world.model), len(inputs))
    wanted: dict[Hashable, tuple[Variant, dict[str, list[ReattributionMetric]]]] = {}
    orders: dict[tuple[str, str], list[Hashable]] = {}
    for metric in metrics:
        for name, asked in methods.items():
            for setting in metric.settings(world, asked.case):
                orders.setdefault((name, metric.name), []).append(setting.key)
                wanted.setdefault(setting.key, (setting, {}))[1].setdefault(name, []).append(metric)
    numbers: dict[tuple[str, str], dict[Hashable, torch.Tensor]] = {}
    asking = _Asking(methods, world, inputs, target, options)
    for batch in _batched(list(wanted.values()), len(world.images)):
        names = list(dict.fromkeys(name for _, by_name in batch for name in by_name))
        found = asking.maps([setting for setting, _ in batch], names)
        for (setting, by_name), maps in zip(batch, found, strict=True):
            for name, each in by_name.items():
                for metric in each:
                    with calculating(world.images.device.type):
                        number = metric.compare(methods[name].case, maps[name])
                    numbers.setdefault((name, metric.name), {})[setting.key] = number
    judged: dict[tuple[str, str], MetricResult] = {}
    for metric in metrics:
        for name, asked in methods.items():
            mine = numbers[name, metric.name]
            in_order = torch.stack([mine[key] for key in orders[name, metric.name]], 1)
            judged[name, metric.name] = metric(asked.case, in_order)
    return judged


Wanted = tuple[Variant, dict[str, list[ReattributionMetric]]]


def _batched(wanted: Sequence[Wanted], images: int) -> Iterator[list[Wanted]]:
    """Settings that only alter photos, or only the class, and are of the same methods, go together."""
    most, batch = max(1, AT_ONCE // images), list[Wanted]()
    for each in wanted:
        alike = batch and each[0].alters == batch[0][0].alters != "" and list(each[1]) == list(batch[0][1])
        if batch and not (alike and len(batch) < most):
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


class _Asking:
    def __init__(
        self,
        methods: Mapping[str, EvaluatedMethod],
        world: ModelContext,
        inputs: Inputs,
        target: Target,
        options: Options,
    ) -> None:
        self.methods, self.world, self.inputs, self.target, self.options = methods, world, inputs, target, options

    def maps(self, settings: Sequence[Variant], names: Sequence[str]) -> list[dict[str, VariantResult]]:
        """The maps of these methods in each of the settings, which are run as one batch, or as classes of one."""
        first = settings[0]
        model = self.world.model if first.model is None else first.model()
        classes = [each.classes for each in settings if each.classes is not None]
        images, inputs, target = self._photos(settings[:1] if classes else settings)
        targets: list[Target] = [ClassTarget(tuple(each.tolist())) for each in classes] or [target]
        found: list[dict[str, VariantResult]] = [{} for _ in settings]
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
                    part[name] = self._found(name, answer[method.name], images, place)
        return found

    def _photos(self, settings: Sequence[Variant]) -> tuple[torch.Tensor, Inputs, Target]:
        """The photos of settings one after the other, what the model is called with for them, and the target."""
        images = torch.cat([self.world.images if each.images is None else each.images() for each in settings])
        if len(settings) == 1 and settings[0].images is None:
            return images, self.inputs, self.target
        owners = torch.arange(len(self.world.images), device=images.device).repeat(len(settings))
        inputs = self.inputs.rows(owners, {self.inputs.path: images.to(self.inputs.x)})
        return images, inputs, for_rows(self.target, owners) if len(settings) > 1 else self.target

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

    def _found(self, name: str, answer: Attribution, images: torch.Tensor, place: int) -> VariantResult:
        count = len(self.world.images)
        rows = slice(place * count, (place + 1) * count)
        part = answer[rows]
        maps = Maps.of(name, part, images[rows])
        return VariantResult(maps, images[rows], part.score, part.logits)


def must_be_method(metric: Metric, name: str) -> MetricError:
    """What is said of a map where a method is needed."""
    return MetricError(
        f"metric {metric.name!r} asks the method again, so it needs a method, got the map {name!r}; give the method "
        "instead of its map"
    )
