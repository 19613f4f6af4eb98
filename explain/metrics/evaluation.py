"""`evaluate`: a model, photos, methods and metrics in, a `Table` out."""

import csv
import io
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, TypeAlias, TypeVar, Unpack

import numpy as np
import torch
from torch import nn

from explain._utils.errors import MetricError, did_you_mean, keywords, shown
from explain._utils.html import aligned, lines_html, table_html
from explain._utils.options import by_name
from explain._utils.progress import duration
from explain._utils.random_numbers import seeded
from explain._utils.rounding import finite_or_none
from explain.attribution.api import attribute, plan
from explain.attribution.diagnostics import image_names
from explain.attribution.options import AttributeOptions, Settings
from explain.attribution.result import Attribution
from explain.baselines.replacements import in_single_or_double
from explain.data.files import as_cell, write_file
from explain.data.inputs import Inputs, InputsLike
from explain.engine import Evidence, validation
from explain.engine.execution import gather
from explain.engine.needs import needs_at
from explain.engine.output_kinds import reading
from explain.engine.perturbations import ScoreKind
from explain.engine.plan import Plan
from explain.hooks import preserve, unwrap
from explain.layers.intervening import intervene
from explain.methods.base import Method, MethodLike, get_method
from explain.methods.masking import whole_score
from explain.metrics import base, localisation
from explain.metrics.base import (
    MapMetric,
    Metric,
    MetricInput,
    MetricLike,
    MetricResult,
    ScoreMetric,
    ScoreRequest,
)
from explain.metrics.intervals import MeanInterval
from explain.metrics.maps import Maps, MapsLike
from explain.metrics.supported import CHECK, Support, lines_of, supports
from explain.metrics.variants import (
    EvaluatedMethod,
    ModelContext,
    ReattributionMetric,
    Results,
    Variant,
    reattribute,
)
from explain.targets import ClassTarget, as_target
from explain.targets.resolve import TargetLike
from explain.targets.text import with_texts

ARROWS = {"more": "↑", "less": "↓"}


class NotEvaluatedError(MetricError, KeyError):
    """A method is not in a table; a ``KeyError`` too, as of any mapping."""


@dataclass(frozen=True, eq=False)
class Table(Mapping[str, Mapping[str, torch.Tensor]]):
    """A figure for each method, metric and image: ``table[method][metric]`` is a tensor ``(N,)``.

    It prints the means over the images with their 95 % intervals, and the paired differences of the
    methods to the first one; an arrow says whether more (↑) or less (↓) is better. NaN, shown as –,
    marks figures that are not defined for an image; means leave it out. Below stand ``notes``:
    remarks on all figures, such as a baseline that the model takes for the class.
    """

    metrics: Mapping[str, Metric]
    results: Mapping[str, Mapping[str, MetricResult]]
    notes: tuple[str, ...] = ()

    def __getitem__(self, method: str) -> Mapping[str, torch.Tensor]:
        """The figures in the table of a method, by metric: tensors ``(N,)``."""
        if method not in self.results:
            raise NotEvaluatedError(
                f"method {method!r} was not evaluated here; {did_you_mean(method, self.results)}"
            )
        return {name: result.value for name, result in self.results[method].items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def curve(self, method: str, metric: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The shares ``(K,)`` and the curves ``(N, K)`` behind a figure.

        Raises:
            MetricError: the metric has no curve, or was not evaluated.
        """
        result = self._one(method, metric)
        if result.curve is None or result.at is None:
            raise MetricError(
                f"metric must have a curve, but {metric!r} has none; table[{method!r}] has its "
                "figures"
            )
        return result.at, result.curve

    def parts(self, method: str, metric: str) -> Mapping[str, torch.Tensor]:
        """What else a metric found for each image, by name."""
        return self._one(method, metric).parts

    def mean(self, method: str, metric: str) -> float:
        """The mean over the images for which the figure is defined; NaN without any."""
        return self.interval(method, metric).mean

    def interval(self, method: str, metric: str) -> MeanInterval:
        """The mean over the images for which the figure is defined, with its 95 % interval."""
        return MeanInterval.of(self._one(method, metric).value)

    def difference(self, method: str, other: str, metric: str) -> MeanInterval:
        """The mean of the differences of a method's figures to those of another one on the same
        images, with its 95 % interval: narrower than those of both means where images differ more
        than methods."""
        figures = self._one(method, metric).value
        return MeanInterval.of(figures - self._one(other, metric).value)

    @cached_property
    def support(self) -> Mapping[str, Support]:
        """What "check" says of each method that was run; empty where its metrics were not
        evaluated."""
        return supports(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain values for JSON: what each metric is, and its figures by
        method, metric and image, None where not defined. The command line prints and saves these
        keys."""
        metrics = {
            name: {
                "about": metric.summary,
                "units": metric.units,
                "better": metric.better,
                "paper": metric.paper,
                "options": repr(metric),
            }
            for name, metric in self.metrics.items()
        }
        values = {
            method: {
                name: [*map(finite_or_none, figures.tolist())] for name, figures in row.items()
            }
            for method, row in self.items()
        }
        return {"metrics": metrics, "values": values, "notes": list(self.notes)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the table as CSV, and write it to ``path`` if there is one: a line for each method
        and image, a column for each metric, empty where a figure is not defined.

        Raises:
            OutputError: the file cannot be written.
        """
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["method", "image", *self.metrics])
        for method, image, figures in self._lines():
            cells = ["" if math.isnan(figure) else repr(figure) for figure in figures]
            # a method's name, which the caller gives, must not run as a formula in a spreadsheet
            writer.writerow([as_cell(method), image, *cells])
        text = out.getvalue()
        if path is not None:
            write_file(path, text, overwrite=True)
        return text

    def to_frame(self) -> Any:
        """Return the table as a `pandas.DataFrame` with a row for each method and image.

        Raises:
            MetricError: pandas is not installed.
        """
        try:
            import pandas  # type: ignore[import-untyped, unused-ignore]
        except ImportError as error:
            raise MetricError(
                "to_frame needs pandas, which is not installed; install it, or use to_csv"
            ) from error
        columns = ["method", "image", *self.metrics]
        rows = [[method, image, *figures] for method, image, figures in self._lines()]
        return pandas.DataFrame(rows, columns=columns).set_index(["method", "image"])

    def to_latex(self) -> str:
        """Return the printed table for LaTeX, with the rules of the package booktabs."""
        head, *rows = [[_latex(cell) for cell in row] for row in self._rows]
        lines = [" & ".join(row) + r" \\" for row in (head, *rows)]
        lines.insert(1, r"\midrule")
        begin = rf"\begin{{tabular}}{{l{'r' * len(self.metrics)}}}"
        return "\n".join([begin, r"\toprule", *lines, r"\bottomrule", r"\end{tabular}", ""])

    def _lines(self) -> Iterator[tuple[str, int, list[float]]]:
        """Yield each method and image with its figures, in the order of the metrics."""
        for method, row in self.items():
            figures = torch.stack([row[name].double() for name in self.metrics], 1)
            for image, image_figures in enumerate(figures.tolist()):
                yield method, image, image_figures

    @property
    def _rows(self) -> list[list[str]]:
        """The cells of the printed table, the first row being the head: means over the images, and
        below, if there are several images and methods, the differences to the first method."""
        first, *further = self.results
        count = len(next(iter(self[first].values()), ()))
        head = [f"{count} images, ± 95 %" if count > 1 else ""]
        head += [f"{name} {ARROWS[metric.better]}" for name, metric in self.metrics.items()]
        rows = [
            [method, *(str(self.interval(method, name)) for name in self.metrics)]
            for method in self.results
        ]
        if count > 1:
            for other in further:
                differences = [str(self.difference(other, first, name)) for name in self.metrics]
                rows.append([f"{other} less {first}", *differences])
        return [head, *rows]

    def _repr_html_(self) -> str:
        head, *rows = self._rows
        notes = [*lines_of(self.support), *(f"note: {note}" for note in self.notes)]
        return table_html(head, rows) + lines_html(notes)

    def __repr__(self) -> str:
        """The table of means as text, with its notes below."""
        rows = self._rows
        lines = aligned(rows, to_the_right=range(1, len(rows[0])))
        lines += lines_of(self.support)
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _one(self, method: str, metric: str) -> MetricResult:
        """The result of one metric for one method; refused with a suggestion if there is none."""
        if metric not in self[method]:
            raise MetricError(
                f"metric {metric!r} was not evaluated here; {did_you_mean(metric, self[method])}"
            )
        return self.results[method][metric]


def _latex(text: str) -> str:
    """A cell of a table with LaTeX's special signs escaped, and signs that are no letters as its
    commands."""
    escaped = re.sub(r"([%&#_{}])", r"\\\1", text)
    signs = {"↑": r"$\uparrow$", "↓": r"$\downarrow$", "±": r"$\pm$", "–": "--"}
    return "".join(signs.get(letter, letter) for letter in escaped)


MapSource: TypeAlias = MethodLike | MapsLike | tuple[Method, Attribution]
M = TypeVar("M", bound=Metric)
T = TypeVar("T")


@dataclass(frozen=True)
class EvaluationPlan:
    """How many passes of one photo an evaluation takes at most: for ``maps``, for ``perturbed``
    photos, and for maps that are made ``again``, forward and backward passes alike; infinite where
    it depends on the evidence. ``seconds`` is about how long they take, one after the other."""

    maps: float
    perturbed: float
    again: float
    seconds: float

    @property
    def passes(self) -> float:
        """All of them together."""
        return self.maps + self.perturbed + self.again

    def __str__(self) -> str:
        """The plan in one line, with all passes, the time, and the passes of each part."""
        parts = (
            f"{self.maps:,.0f} for maps, {self.perturbed:,.0f} of perturbed photos, "
            f"{self.again:,.0f} for maps again"
        )
        return f"about {self.passes:,.0f} passes, {duration(self.seconds)}: {parts}"


@keywords(AttributeOptions)
def evaluate(
    model: nn.Module,
    x: InputsLike,
    methods: MapSource | Iterable[MethodLike | Attribution] | Mapping[str, MapSource],
    metrics: MetricLike | Iterable[MetricLike],
    *,
    target: TargetLike = None,
    boxes: localisation.Boxes | None = None,
    masks: torch.Tensor | np.ndarray[Any, Any] | None = None,
    **options: Unpack[AttributeOptions],
) -> Table:
    """Evaluate methods, or maps, by metrics; all perturbed photos of one call run together, each
    distinct one once.

    Args:
        model: any ``nn.Module``; it is left as it was found.
        x: preprocessed photos ``(N, C, H, W)``, volumes or videos ``(N, C, T, H, W)``, or what
            `explain.attribute` takes for them.
        methods: names or method objects, which are run; or attributions. A mapping gives
            each a name, and may hold arrays too: maps ``(N, h, w)``, or ``(N, C, H, W)`` for each
            pixel (of volumes ``(N, t, h, w)`` and ``(N, C, T, H, W)``); or pairs of a method and
            its attribution.
        metrics: names from `list_metrics`, also with options as "pointinggame(tolerance=0)", or
            metric objects; "check" stands for those that tell whether many photos support a method.
        target: as for `explain.attribute`; None is the attributions' own target, or each image's
            top class.
        boxes: where the object is: ``(N, 4)`` with x0 y0 x1 y1 in input pixels, x1 and y1
            exclusive; or a list with ``(k, 4)`` for each photo, for several objects; of volumes and
            videos x0 y0 z0 x1 y1 z1, where z counts slices or frames.
        masks: the same as truth values ``(N, H, W)`` or ``(N, T, H, W)``; of whole numbers, those
            above 0 are the object.
        options: as for `explain.attribute`: ``layer``, ``categories``, ``batch_size``,
            ``progress`` (True prints the cost first, see `plan_evaluation`, and then a line for
            maps, for perturbed photos, and for maps again) …

    Returns:
        A `Table`: ``table[method][metric]`` is a tensor ``(N,)``.

    Raises:
        MetricError: one line that says which metric, map or box does not fit.
        ExplainError: as for `explain.attribute`.

    >>> model = nn.Sequential(
    ...     nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    ... )
    >>> table = evaluate(
    ...     model, torch.rand(2, 3, 8, 8), ["gradcam", "saliency"], ["deletion", "insertion"]
    ... )
    >>> table["gradcam"]["deletion"].shape, list(table)
    (torch.Size([2]), ['gradcam', 'saliency'])
    """
    evaluation = _begun(model, x, methods, metrics, target, options)
    count = len(evaluation.inputs)
    size = tuple(evaluation.inputs.x.shape[2:])
    known_boxes = None if boxes is None else localisation.boxes_per_image(boxes, count, size)
    regions = localisation.as_regions(masks, known_boxes, count, size)
    truth: dict[str, Any] = {"boxes": known_boxes, "regions": regions}
    only_maps = len(evaluation.given_maps) == len(evaluation.sources)
    # of maps alone: the model does not run
    if only_maps and all(isinstance(metric, MapMetric) for metric in evaluation.metrics.values()):
        images = in_single_or_double(evaluation.inputs.x)
        data = {
            name: MetricInput(Maps.of(name, maps, images), images, **truth)
            for name, maps in evaluation.given_maps.items()
        }
        return evaluation.tabled(evaluation.by_maps(data), data)
    return evaluation.run(partial(evaluation.table, truth))


@keywords(AttributeOptions)
def plan_evaluation(
    model: nn.Module,
    x: InputsLike,
    methods: MapSource | Iterable[MethodLike | Attribution] | Mapping[str, MapSource],
    metrics: MetricLike | Iterable[MetricLike],
    *,
    target: TargetLike = None,
    **options: Unpack[AttributeOptions],
) -> EvaluationPlan:
    """Say how many passes `evaluate` would take and about how long, before it runs; the first photo
    is run a few times for it.

    Arguments and errors are those of `evaluate`. Equal perturbed photos of several maps are run
    once, so that there may be fewer passes.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    >>> plan = plan_evaluation(model, torch.rand(2, 3, 8, 8), "saliency", ["morf(steps=4)", "mprt"])
    >>> plan.maps, plan.perturbed, plan.again
    (4.0, 6.0, 8.0)
    """
    evaluation = _begun(model, x, methods, metrics, target, options)
    return evaluation.run(evaluation.planned)


def with_check(metrics: MetricLike | Iterable[MetricLike]) -> list[MetricLike]:
    """The metrics, of which there may be a single one, with those of `CHECK` in place of
    "check"."""
    several = isinstance(metrics, Iterable) and not isinstance(metrics, str)
    wanted: Any = metrics if several else [metrics]
    listed: list[MetricLike] = []
    for metric in wanted:
        listed += CHECK if metric == "check" else [metric]
    return listed


@dataclass(frozen=True, eq=False)
class _Source:
    """What is evaluated under one name: a method, maps, or maps and the method that made them."""

    method: Method | None
    maps: Any = None

    @classmethod
    def of(cls, source: Any) -> "_Source":
        """One of the values that `evaluate` takes for ``methods``."""
        if isinstance(source, tuple):
            return cls(get_method(source[0]), *source[1:])
        if isinstance(source, (str, Method)):
            return cls(get_method(source))
        return cls(None, source)


@dataclass(eq=False)
class _Evaluation:
    """One call of `evaluate`."""

    model: nn.Module
    inputs: Inputs
    metrics: Mapping[str, Metric]
    sources: Mapping[str, _Source]
    target: TargetLike
    options: AttributeOptions
    notes: list[str] = field(default_factory=list)

    @cached_property
    def settings(self) -> Settings:
        """The options, checked."""
        return Settings(**self.options)

    @cached_property
    def given_maps(self) -> dict[str, Any]:
        """The maps that are there already, by name."""
        return {
            name: source.maps
            for name, source in self.sources.items()
            if source.method is None or source.maps is not None
        }

    def run(self, work: Callable[[], T]) -> T:
        """What ``work`` returns, which runs the model as the options say."""
        wanted = as_target(self.target, self.settings.categories)
        # for a target that is a text, the model becomes one that scores photos by it; of the tokens
        # of explained words, which come third, metrics have no use
        self.model, self.inputs, _ = with_texts(self.model, self.inputs, [wanted])
        settings = self.settings
        # outputs become probabilities in the same way throughout
        reader = reading(self.model, self.inputs, settings.activation, settings.categories)
        with intervene(self.model, settings.interventions), reader:
            return work()

    def table(self, truth: Mapping[str, Any]) -> Table:
        """Run the whole evaluation, in this order: maps, the explained score, metrics of maps
        alone, of perturbed scores, and of methods run again.
        """
        if self.settings.progress is True:
            print(self.planned(), file=sys.stderr)
        maps = self._maps()
        score = self._explained(maps)
        # figures are full-precision numbers without a graph, whatever the caller has switched on
        with preserve.calculating(self.inputs.x.device.type):
            data = {
                name: self.context.data(name, source, score, **truth)
                for name, source in maps.items()
            }
            results = self.by_maps(data)
        results |= self._by_scores(data)
        results |= self._by_reattribution(data, maps)
        return self.tabled(results, data)

    def tabled(self, results: Results, names: Iterable[str]) -> Table:
        """The table of results, by map and metric, in the order of ``names`` (of methods or maps)
        and metrics."""
        ordered = {
            name: {metric: results[name, metric] for metric in self.metrics} for name in names
        }
        return Table(self.metrics, ordered, tuple(self.notes))

    def by_maps(self, data: Mapping[str, MetricInput]) -> Results:
        """The results, by map and metric, of those metrics that see the map alone; nothing is
        run."""
        return {
            (name, metric.name): metric(map_data)
            for metric, (name, map_data) in product(self._of_kind(MapMetric), data.items())
        }

    def planned(self) -> EvaluationPlan:
        """The passes of all photos, counted for the first one, with random numbers for its maps."""
        photos = len(self.inputs)
        first = torch.zeros(1, dtype=torch.long, device=self.inputs.x.device)
        target = as_target(self.target, self.settings.categories).rows(first)
        one = replace(self, inputs=self.inputs.first(), target=target)
        begun = time.perf_counter()
        score = one._explained({})  # one pass, which also makes the context
        seconds_of_pass = time.perf_counter() - begun
        # a map of zeros would need fewer perturbed photos
        stand_in = torch.rand(one.inputs.x[:, 0].shape, generator=seeded(0))
        data = one.context.data("map", stand_in, score)
        samples = 0
        for score_metric in one._of_kind(ScoreMetric):
            for request in score_metric.requests(data):
                samples += len(one.context.samples_of(request.of).owners)
        variants = set[Variant]()  # equal ones of several metrics run once
        for metric in one._of_kind(ReattributionMetric):
            variants.update(metric.variants(one.context, data))
        options: Any = {**self.options, "progress": None}
        # the passes of each method for the maps of all photos
        costs = {
            name: photos * plan(self.model, one.inputs, method, target=target, **options).cost()
            for name, source in self.sources.items()
            if (method := source.method) is not None
        }
        perturbed = float(photos * len(self.sources) * samples)
        made_again = len(variants) * sum(costs.values())
        # methods whose maps are given run for variants only
        maps = sum(cost for name, cost in costs.items() if name not in self.given_maps)
        passes = maps + perturbed + made_again
        return EvaluationPlan(maps, perturbed, made_again, seconds=passes * seconds_of_pass)

    def _explained(self, maps: Mapping[str, MapsLike]) -> torch.Tensor:
        """The score ``(N,)`` that is explained, from an attribution or a forward pass; also fixes
        the target to the explained classes, and makes the ``context``.
        """
        self.resolved = as_target(self.target, self.settings.categories).for_input_size(
            tuple(self.inputs.x.shape[2:])
        )
        # maps that this call has made know the score; of given ones it is not certain
        by_this_call = [
            source
            for name, source in maps.items()
            if isinstance(source, Attribution) and name not in self.given_maps
        ]
        explained: Attribution | Evidence
        if by_this_call:
            explained = by_this_call[0]
            classes = None if isinstance(explained.target, str) else explained.target
        else:
            explained = self._scored([])
            classes = explained.classes
        if classes is not None:
            self.resolved = ClassTarget(tuple(classes.tolist()))
        self.context = ModelContext(
            self.model,
            self.inputs,
            classes,
            explained.logits,
            activation=self.settings.activation,
            target=self.resolved,
        )
        return explained.score

    def _scored(self, requests: Iterable[ScoreRequest]) -> Evidence:
        """Run the model on the perturbed photos of all score requests, equal photos once, and
        return the evidence in which `ScoreRequest.scores` finds the scores."""
        needs = frozenset(need for request in requests for need in request.needs)
        # needs about the scores, at no layer
        passes = Plan({"metrics": needs_at(needs, [])}, targets=1, images=len(self.inputs))
        (evidence_of,) = gather(self.model, self.inputs, passes, [self.resolved], self.settings)
        return evidence_of(None)

    def _of_kind(self, kind: type[M]) -> list[M]:
        """The metrics of this evaluation that are of a ``kind``, in their order."""
        return [metric for metric in self.metrics.values() if isinstance(metric, kind)]

    def _maps(self) -> dict[str, MapsLike]:
        """The maps to evaluate, by name: given ones are checked before methods run, together.
        Without a target, the attributions' common one is taken.
        """
        maps = {**self.given_maps}
        for name, source in maps.items():
            Maps.of(name, source, self.inputs.x)  # refused before anything is run
        waiting = {
            name: method
            for name, source in self.sources.items()
            if (method := source.method) is not None and name not in maps
        }
        attributions = [source for source in maps.values() if isinstance(source, Attribution)]
        if self.target is None and attributions:
            self.target = _common_target(attributions)
        while waiting:  # methods of one name, with other options, run in turn
            # of each name the first one that waits, which in reverse order comes last
            turn = {method.name: name for name, method in reversed(waiting.items())}
            methods = [waiting.pop(name) for name in turn.values()]
            explained = attribute(
                self.model, self.inputs, methods, target=self.target, **self.options
            )
            maps |= {turn[method]: source for method, source in explained.items()}
        return {name: maps[name] for name in self.sources}

    def _by_reattribution(
        self, data: Mapping[str, MetricInput], maps: Mapping[str, MapsLike]
    ) -> Results:
        """The results of metrics that run the methods again (on other photos, for other classes, in
        changed models); refused for a map whose method is not known.
        """
        metrics = self._of_kind(ReattributionMetric)
        if not metrics:
            return {}
        evaluated: dict[str, EvaluatedMethod] = {}
        for name, map_data in data.items():
            attribution = maps[name]
            if not isinstance(attribution, Attribution):
                raise MetricError(
                    f"metric {metrics[0].name!r} needs a method, got the map {name!r}; give its "
                    "method"
                )
            method = self.sources[name].method or attribution.applied()
            evaluated[name] = EvaluatedMethod(method, attribution, map_data)
        options: AttributeOptions = {**self.options, "activation": self.context.outputs.activation}
        return reattribute(metrics, evaluated, self.context, self.resolved, options)

    def _by_scores(self, data: Mapping[str, MetricInput]) -> Results:
        """The results of metrics that need scores of perturbed photos: collects the requests of all
        metrics and maps, runs equal photos once, and hands each metric its scores.
        """
        metrics = self._of_kind(ScoreMetric)
        if not metrics:
            return {}
        device = self.inputs.x.device.type
        requests: dict[tuple[str, str], Sequence[ScoreRequest]] = {}
        with preserve.calculating(device):
            for metric, (name, map_data) in product(metrics, data.items()):
                requests[name, metric.name] = metric.requests(map_data)
        all_requests = [
            request for metric_requests in requests.values() for request in metric_requests
        ]
        kinds = {request.score for request in all_requests}
        if "probability" in kinds and not self.resolved.gives_probability:
            for map_data in data.values():
                map_data.need_probability()  # raises where there is none, before anything runs
        evidence = self._scored(all_requests)
        # The original scores in the same precision as those of the perturbed photos:
        fields: dict[ScoreKind, str] = {"logit": "target_score", "probability": "probability"}
        original_scores: dict[str, Any] = {
            fields[kind]: evidence[whole_score(kind)] for kind in kinds & fields.keys()
        }
        results: Results = {}
        with preserve.calculating(device):
            self.notes += self._recognised(all_requests, evidence)
            for metric, (name, map_data) in product(metrics, data.items()):
                scores = [request.scores(evidence) for request in requests[name, metric.name]]
                results[name, metric.name] = metric(replace(map_data, **original_scores), scores)
        return results

    def _recognised(self, requests: Sequence[ScoreRequest], evidence: Evidence) -> Iterator[str]:
        """Yield notes on photos that keep nine tenths of their probability (above half way from 1 /
        K to 1) though a baseline covers them: curves by it say little.
        """
        if self.context.count is None:
            return
        # of labels, each is true or not, which makes two classes
        class_count = self.context.count if self.context.outputs.kind == "classes" else 2
        for need in dict.fromkeys(
            request.blank for request in requests if request.score == "probability"
        ):
            if need is None:
                continue
            half_way = (1 + 1 / class_count) / 2
            least = (0.9 * evidence[whole_score("probability")]).clamp(min=half_way)
            kept = evidence[need] > least
            if kept.any():
                baseline = need.perturbation.baseline.name  # type: ignore[attr-defined]
                yield (
                    f"image {image_names(kept)} keeps its class with a probability of "
                    f"{evidence[need][kept].min():.2f} or more where the baseline {baseline!r} "
                    "covers all of it, so that figures by it say little; choose another baseline"
                )


def _begun(
    model: nn.Module, x: Any, methods: Any, metrics: Any, target: Any, options: AttributeOptions
) -> _Evaluation:
    """The evaluation that a call asks for, with its arguments checked."""
    model = unwrap.unwrapped(model)
    inputs = validation.check_inputs(model, x, options.get("layout"))
    if inputs.x.ndim not in (4, 5):
        raise MetricError(
            "x must be images (N, C, H, W), volumes or videos (N, C, T, H, W) for metrics, got "
            f"shape {tuple(inputs.x.shape)}; explain another of the inputs"
        )
    named = by_name(with_check(metrics), base.get_metric, MetricError, "metric")
    return _Evaluation(
        model, inputs, metrics=named, sources=_named(methods), target=target, options=options
    )


def _named(methods: Any) -> dict[str, _Source]:
    """Read the argument ``methods`` of `evaluate` as methods and maps by name: a mapping, a single
    one, or several, whose names come from the methods."""
    named: dict[str, Any] = {}
    if isinstance(methods, Mapping):
        named = {str(name): source for name, source in methods.items()}
    elif isinstance(methods, (torch.Tensor, np.ndarray)):
        named = {"map": methods}
    else:
        is_single = isinstance(methods, (str, Attribution, Method)) or not isinstance(
            methods, Iterable
        )
        for source in [methods] if is_single else methods:
            if isinstance(source, (torch.Tensor, np.ndarray)):
                raise MetricError(
                    "methods must have names where they are maps, got a list with "
                    f"{shown(source)}; give a mapping from names to maps"
                )
            name = source.method if isinstance(source, Attribution) else get_method(source).name
            if named.setdefault(name, source) != source:
                raise MetricError(
                    f"methods must have different names, got two of {name!r}; give a mapping from "
                    "names"
                )
    if not named:
        raise MetricError(
            "methods must name at least one method or map, got none; see explain.list_methods()"
        )
    return {name: _Source.of(source) for name, source in named.items()}


def _common_target(attributions: Sequence[Attribution]) -> TargetLike:
    """The classes ``(N,)`` that all attributions explain; refused where they differ, or explain
    something that is no class."""
    first = attributions[0].target
    explained = {
        target if isinstance(target, str) else tuple(target.tolist())
        for target in (attribution.target for attribution in attributions)
    }
    if isinstance(first, str) or len(explained) > 1:
        got = " and ".join(map(str, explained))
        raise MetricError(
            f"attributions must be of the same classes without a target, got {got}; add target="
        )
    return first
