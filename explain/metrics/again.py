"""Metrics that ask the method again: of altered photos, of another class, of a randomised copy of the model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from explain.attribution import attribute_targets
from explain.errors import MetricError, muted
from explain.hooks import calculating
from explain.inputs import Inputs
from explain.methods import Method, Movable
from explain.metrics.base import Case, Judged, Metric
from explain.metrics.maps import Maps
from explain.request import Options
from explain.result import Attribution
from explain.targets import ClassTarget, Target, for_rows

AT_ONCE = 16
"""How many altered photos a method is asked about in one batch."""


@dataclass(frozen=True, eq=False)
class World:
    """What a metric may alter: the ``model``, N ``images``, and the ``classes`` ``(N,)`` and their number ``K``."""

    model: nn.Module
    images: torch.Tensor
    classes: torch.Tensor | None
    count: int | None


@dataclass(frozen=True, eq=False)
class Setting:
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
    def only_photos(self) -> bool:
        return self.model is None and self.classes is None and self.wrap is None


@dataclass(frozen=True, eq=False)
class Found:
    """What a method said in a setting."""

    maps: Maps
    images: torch.Tensor
    score: torch.Tensor
    logits: torch.Tensor | None


@runtime_checkable
class OfMethod(Metric, Protocol):
    """A metric that asks the method again, so that a map alone cannot be judged by it."""

    def settings(self, world: World, case: Case) -> Iterator[Setting]:
        """The settings that it wants the method asked in."""
        ...

    def compare(self, case: Case, found: Found) -> torch.Tensor:
        """One number for each image ``(N,)``, or several ``(N, k)``, from the maps in a setting."""
        ...

    def __call__(self, case: Case, numbers: torch.Tensor) -> Judged:
        """A figure for each image, from the numbers of all settings ``(N, settings)``, or ``(N, settings, k)``."""
        ...


@dataclass(frozen=True, eq=False)
class Asked:
    """A method of an evaluation, with the layers that it looked at."""

    method: Method
    attribution: Attribution
    case: Case


def asked_again(
    metrics: Sequence[OfMethod],
    methods: Mapping[str, Asked],
    world: World,
    inputs: Inputs,
    target: Target,
    options: Options,
) -> dict[tuple[str, str], Judged]:
    """Ask methods again in all settings that metrics want, each distinct setting once for all of them."""
    wanted: dict[Hashable, tuple[Setting, dict[str, list[OfMethod]]]] = {}
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
    judged: dict[tuple[str, str], Judged] = {}
    for metric in metrics:
        for name, asked in methods.items():
            mine = numbers[name, metric.name]
            in_order = torch.stack([mine[key] for key in orders[name, metric.name]], 1)
            judged[name, metric.name] = metric(asked.case, in_order)
    return judged


Wanted = tuple[Setting, dict[str, list[OfMethod]]]


def _batched(wanted: Sequence[Wanted], images: int) -> Iterator[list[Wanted]]:
    """Settings that only alter photos, and are of the same methods, go together."""
    most, batch = max(1, AT_ONCE // images), list[Wanted]()
    for each in wanted:
        fits = batch and each[0].only_photos and batch[0][0].only_photos and list(each[1]) == list(batch[0][1])
        if batch and not (fits and len(batch) < most):
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


class _Asking:
    def __init__(
        self, methods: Mapping[str, Asked], world: World, inputs: Inputs, target: Target, options: Options
    ) -> None:
        self.methods, self.world, self.inputs, self.target, self.options = methods, world, inputs, target, options

    def maps(self, settings: Sequence[Setting], names: Sequence[str]) -> list[dict[str, Found]]:
        """The maps of these methods in each of the settings, which are run as one batch."""
        count, first = len(self.world.images), settings[0]
        model = self.world.model if first.model is None else first.model()
        images = torch.cat([self.world.images if each.images is None else each.images() for each in settings])
        owners = torch.arange(count, device=images.device).repeat(len(settings))
        altered = {self.inputs.path: images.to(self.inputs.x)}
        several = len(settings) > 1 or first.images is not None
        inputs = self.inputs.rows(owners, altered) if several else self.inputs
        target = for_rows(self.target, owners) if len(settings) > 1 else self.target
        if first.classes is not None:
            target = ClassTarget(tuple(first.classes.tolist()))
        found: list[dict[str, Found]] = [{} for _ in settings]
        for layers, group in self._by_layers(names).items():
            methods = [self.methods[name].method for name in group]
            methods = methods if first.wrap is None else [first.wrap(method) for method in methods]
            where = None if layers is None else [first.prefix + layer for layer in layers]
            options: Any = {**self.options, "layer": where, "progress": None}
            with muted():
                answers = attribute_targets(model, inputs, methods, [target], **options)[0]
            for name, method in zip(group, methods, strict=True):
                for i, part in enumerate(found):
                    part[name] = self._found(name, answers[method.name], images, slice(i * count, (i + 1) * count))
        return found

    def _by_layers(self, names: Iterable[str]) -> dict[tuple[str, ...] | None, list[str]]:
        """Methods that look at the same layers are run together; those that look at none go along with any.

        A method that explained the input, and would explain a layer where one is named, stays by itself.
        """
        groups: dict[tuple[str, ...] | None, list[str]] = {}
        for name in names:
            layer = self.methods[name].attribution.layer
            groups.setdefault((layer,) if isinstance(layer, str) else layer, []).append(name)
        without = groups.pop(None, [])
        alone = [name for name in without if isinstance(self.methods[name].method, Movable)]
        others = [name for name in without if name not in alone]
        if groups:
            groups[next(iter(groups))] += others
        else:
            alone = without
        return {**groups, **({None: alone} if alone else {})}

    def _found(self, name: str, answer: Attribution, images: torch.Tensor, rows: slice) -> Found:
        part = answer[rows]
        maps = Maps.of(name, part, images[rows])
        return Found(maps, images[rows], part.score, part.logits)


def must_be_method(metric: Metric, name: str) -> MetricError:
    """What is said of a map where a method is needed."""
    return MetricError(
        f"metric {metric.name!r} asks the method again, so it needs a method, got the map {name!r}; give the method "
        "instead of its map"
    )
