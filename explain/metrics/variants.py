"""`ReattributionMetric`: metrics that run the method again, on each distinct variant once."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from itertools import groupby, islice, product
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from explain._utils.errors import muted
from explain.attribution.options import AttributeOptions
from explain.attribution.result import Attribution
from explain.attribution.selection import requested
from explain.baselines.replacements import in_single_or_double
from explain.data.inputs import Inputs
from explain.engine import Evidence, Perturbation, PerturbedRows
from explain.engine.output_kinds import outputs_of
from explain.engine.settings import report_progress
from explain.hooks.intervening import active_interventions
from explain.hooks.preserve import calculating, untouched
from explain.layers.grids import share_places
from explain.layers.intervening import intervene
from explain.layers.layouts import Grids
from explain.layers.summary import summary_of
from explain.methods import Method, Smooth
from explain.metrics.base import Metric, MetricInput, MetricResult
from explain.metrics.maps import Maps, MapsLike
from explain.metrics.randomised import Randomised
from explain.targets import ClassTarget, Target
from explain.targets.outputs import Activation, Outputs

AT_ONCE = 16
"""How many perturbed images, slices or frames are explained in one batch."""


@dataclass(eq=False)
class ModelContext:
    """What a metric may vary in an evaluation: the model, N ``images``, their ``classes`` ``(N,)``
    and the ``logits`` ``(N, K)`` of all classes. ``inputs`` are all of the model's arguments."""

    model: nn.Module
    inputs: Inputs
    classes: torch.Tensor | None
    logits: torch.Tensor | None
    activation: InitVar[Activation | None]
    images: torch.Tensor = field(init=False)
    # how logits become probabilities
    outputs: Outputs = field(init=False)
    target: Target | None = None

    def __post_init__(self, activation: Activation | None) -> None:
        """Derive what all metrics share: images in at least single precision, and how the model's
        outputs become probabilities."""
        self.images = in_single_or_double(self.inputs.x)
        self.classes = None if self.classes is None else self.classes.to(self.images.device)
        self.outputs = Outputs()
        if self.logits is not None:
            self.logits = self.logits.to(self.images.device)
            self.outputs = outputs_of(self.model, self.inputs, self.logits, activation)

    @cached_property
    def ranking(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The scores ``(N, K)`` of all classes, also of those in the target's region or box, and
        the classes ``(N,)`` that are explained; None where the target is no class."""
        if self.logits is not None:
            return None if self.classes is None else (self.logits, self.classes)
        if self.target is None:
            return None
        count = len(self.inputs)
        with untouched(self.model), torch.no_grad():
            output = self.inputs.detached().call(self.model)
            return self.target.resolved(output, count).class_scores(output, count)

    def data(self, name: str, source: MapsLike, score: torch.Tensor, **truth: Any) -> MetricInput:
        """The maps called ``name`` with images, explained score ``(N,)`` and probabilities (none of
        a class that is the only one), ``boxes`` and ``regions``.
        """
        probability = None
        logits = self.logits
        if self.classes is not None and logits is not None and logits.shape[1] > 1:
            has_probability = self.outputs.probabilities(logits) is not None
            probability = self.outputs.of_classes(logits, self.classes) if has_probability else None
        maps = Maps.of(name, source, self.images)
        score = score.to(self.images.device)
        return MetricInput(
            maps,
            self.images,
            target_score=score,
            probability=probability,
            classes=self.classes,
            outputs=self.outputs,
            **truth,
        )

    def changed(self, change: Perturbation | None) -> torch.Tensor:
        """The images ``(N, C, H, W)`` after a perturbation that makes one of each; unchanged for
        None.
        """
        if change is None:
            return self.images
        return self.samples_of(change).make(
            torch.arange(len(self.images), device=self.images.device)
        )

    def samples_of(self, perturbation: Perturbation) -> PerturbedRows:
        """The perturbed images."""
        grids = Grids(tuple(self.images.shape[2:]))
        score = self.images.new_zeros(len(self.images))
        # nothing but the images is looked at
        return perturbation.rows(Evidence(self.images, score, classes=None, target="", grids=grids))

    @property
    def count(self) -> int | None:
        return None if self.logits is None else self.logits.shape[1]

    @cached_property
    def randomised(self) -> Randomised:
        """A copy of the model, the same one for all metrics, whose layers are reinitialised."""
        alone = summary_of(self.model, self.inputs).alone
        return Randomised(self.model, self.inputs.first() if alone else self.inputs)


class OtherModel(Protocol):
    """A frozen value that makes another model, whose layers' names begin with ``prefix``."""

    prefix: ClassVar[str]

    def __call__(self, context: ModelContext) -> nn.Module: ...


@dataclass(frozen=True)
class RandomWeights:
    """The model with some layers initialised once more."""

    layers: frozenset[str]
    seed: int

    prefix: ClassVar[str] = ""

    def __call__(self, context: ModelContext) -> nn.Module:
        model = context.randomised.of(self.layers, self.seed)
        share_places(context.model, model)
        return model


@dataclass(frozen=True)
class Variant:
    """Another image, model, class of each image, or wrapper of the method, with which it runs
    again; what is None is not changed. Equal variants are run once."""

    images: Perturbation | None = None
    model: OtherModel | None = None
    classes: tuple[int, ...] | None = None
    wrap: Smooth | None = None


@dataclass(frozen=True, eq=False)
class VariantResult:
    """The maps and scores of a method in a variant."""

    of: Variant
    maps: Maps
    images: torch.Tensor
    score: torch.Tensor
    logits: torch.Tensor | None


def norm(values: torch.Tensor) -> torch.Tensor:
    """The Euclidean norm of each image's values ``(N,)``."""
    return values.flatten(1).norm(dim=1)  # type: ignore[no-any-return]


class ReattributionMetric(Metric):
    """A metric that runs the method again: it needs a method, and not only its map."""

    def variants(self, context: ModelContext, data: MetricInput) -> Iterator[Variant]:
        """Yield the variants that the method is run in, in an order that `__call__` gets its
        numbers in; equal variants of several metrics run once."""
        raise NotImplementedError

    def compare(self, data: MetricInput, variant: VariantResult) -> torch.Tensor:
        """What the metric keeps of one variant: one number for each image ``(N,)``, or several
        ``(N, k)``, from the map and the map of the variant. The maps themselves are not kept.

        By default it is the length of the map's change relative to the map's own length.
        """
        length = norm(data.maps.values)
        return norm(variant.maps.values - data.maps.values) / torch.where(length > 0, length, 1)

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        """Return a figure for each image, from the numbers ``(N, V)`` or ``(N, V, k)`` of V
        variants."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class EvaluatedMethod:
    """A method of an evaluation, its attribution, and what metrics see of it."""

    method: Method
    attribution: Attribution
    data: MetricInput


Results = dict[tuple[str, str], MetricResult]
"""By method and metric."""


def reattribute(
    metrics: Sequence[ReattributionMetric],
    methods: Mapping[str, EvaluatedMethod],
    context: ModelContext,
    target: Target,
    options: AttributeOptions,
) -> Results:
    """Figures by method and metric from methods run in each distinct variant once. What the target
    reads from the output, such as a region, is resolved on unperturbed images.
    """
    with untouched(context.model):
        output = context.inputs.detached().call(context.model)
        target = target.resolved(output, len(context.inputs))
    # the variants by method and metric; and for each variant, by method, the metrics to compare it
    variants: dict[tuple[str, str], list[Variant]] = {}
    comparisons: dict[Variant, dict[str, list[ReattributionMetric]]] = {}
    for metric, (name, method) in product(metrics, methods.items()):
        variants[name, metric.name] = list(metric.variants(context, method.data))
        for variant in variants[name, metric.name]:
            comparisons.setdefault(variant, {}).setdefault(name, []).append(metric)
    numbers: dict[tuple[str, str, Variant], torch.Tensor] = {}
    finished = 0
    slices = math.prod(context.images.shape[2:-2])  # 1 of a photo
    for batch in _batches(comparisons, slices * len(context.images)):
        names = comparisons[batch[0]]  # the same of all in a batch
        results = _run(batch, {name: methods[name] for name in names}, context, target, options)
        with calculating(context.images.device.type):
            for variant, maps in zip(batch, results, strict=True):
                for name, comparing in comparisons[variant].items():
                    for metric in comparing:
                        compared = metric.compare(methods[name].data, maps[name])
                        numbers[name, metric.name, variant] = compared
        finished += len(batch)
        report_progress(options.get("progress"), finished, len(comparisons))
    figures: Results = {}
    for metric, (name, method) in product(metrics, methods.items()):
        key = (name, metric.name)
        of_metric = [numbers[name, metric.name, variant] for variant in variants[key]]
        figures[key] = metric(method.data, torch.stack(of_metric, 1))
    return figures


def _batches(
    comparisons: Mapping[Variant, Mapping[str, Any]], images: int
) -> Iterator[list[Variant]]:
    """Group neighbours in ``comparisons`` that can run together: the same methods, where only the
    images (``images`` each, or slices) change, or only the class.
    """

    def kind(variant: Variant) -> tuple[Any, ...]:
        """A key that is equal for variants that may run in one batch; those that run alone have
        themselves in it."""
        changes_both = variant.classes is not None and variant.images is not None
        runs_alone = variant.model or variant.wrap or changes_both
        names = tuple(comparisons[variant])
        return variant if runs_alone else None, variant.classes is None, names

    in_batch = max(1, AT_ONCE // images)
    for _, group in groupby(comparisons, kind):
        while batch := list(islice(group, in_batch)):
            yield batch


def _run(
    variants: Sequence[Variant],
    methods: Mapping[str, EvaluatedMethod],
    context: ModelContext,
    target: Target,
    options: AttributeOptions,
) -> list[dict[str, VariantResult]]:
    """The maps and scores by method of each of some variants, run as one batch of changed images or
    as classes of the same images, on the model of the first (`_batches`).
    """
    first = variants[0]
    count = len(context.images)
    model = context.model if first.model is None else first.model(context)
    prefix = "" if first.model is None else first.model.prefix
    # a copy of the model lacks its interventions; a wrapper around the model has them
    interventions = () if first.model is None or prefix else active_interventions(context.model)
    # classes of the target's region or box; or of the whole image
    class_target = target.of_classes if context.classes is None else ClassTarget
    classes = [class_target(variant.classes) for variant in variants if variant.classes is not None]
    # several classes share the images of the first variant
    changed = variants[:1] if classes else variants
    images = torch.cat([context.changed(variant.images) for variant in changed])
    inputs = context.inputs
    if len(changed) > 1 or first.images is not None:
        owners = torch.arange(count, device=images.device).repeat(len(changed))
        inputs = inputs.rows(owners, {inputs.path: images.to(inputs.x)})
        target = target.rows(owners) if len(changed) > 1 else target
    results: list[dict[str, VariantResult]] = [{} for _ in variants]
    # by their layers, how the maps of several become one, and where cells are drawn
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, method in methods.items():
        attribution = method.attribution
        layer = attribution.layer
        layers = (layer,) if isinstance(layer, str) else layer
        groups.setdefault((layers, attribution.fuse, attribution.placed), []).append(name)
    for (layers, fuse, placed), names in groups.items():
        to_run = [methods[name].method for name in names]
        if first.wrap is not None:
            to_run = [replace(first.wrap, method=method) for method in to_run]
        layer_names = None if layers is None else [prefix + layer for layer in layers]
        settings: Any = {**options, "layer": layer_names, "fuse": fuse, "progress": None}
        settings["placement"] = placed
        # warnings would be about maps that nobody sees
        with muted(), intervene(model, interventions):
            request = requested(
                model,
                inputs,
                to_run,
                target=None,
                targets=classes or [target],
                top_k=None,
                **settings,
            )
            # rounding errors are as unlike the map as zeros are
            attributions = replace(request, finds_rounding=False).attributions()
        for name, wrapped in zip(names, to_run, strict=True):
            for number, result in enumerate(results):
                # each class has a result for all images; changed images stand in a single one
                samples = slice(None) if classes else slice(number * count, (number + 1) * count)
                attribution = attributions[number if classes else 0][wrapped.name][samples]
                maps = Maps.of(name, attribution, images[samples])
                result[name] = VariantResult(
                    of=variants[number],
                    maps=maps,
                    images=images[samples],
                    score=attribution.score,
                    logits=attribution.logits,
                )
    return results
