"""Tables of metrics of one photo that was explained, such as an `explain.Explanation`."""

from collections.abc import Mapping, Sequence
from typing import Any

from explain._utils.errors import MetricError, naming
from explain.methods.base import Method
from explain.metrics.base import Metric, MetricLike, get_metric
from explain.metrics.evaluation import Table, evaluate
from explain.metrics.variants import ReattributionMetric


def table_of(
    subject: Any,
    index: int,
    maps: Mapping[str, Any],
    metrics: Sequence[Metric],
    **options: Any,
) -> Table:
    """Evaluate the ``maps`` by name, or methods for metrics that run them again, of target number
    ``index`` by metrics, with the subject's model, photo and interventions.
    """
    return evaluate(
        subject.explainer.model,
        subject.inputs,
        maps,
        metrics,
        target=subject.target_at(index),
        activation=subject.explainer.activation,
        interventions=next(iter(subject.results[index].values())).interventions,
        **options,
    )


def figures_in(table: Table) -> dict[str, dict[str, float | None]]:
    """Return the values of a table of metrics as a page has them, ``{method: {metric: value}}``; of
    each metric, the value of the first image, since the table is of one photo."""
    values = table.to_dict()["values"]
    return {
        name: {metric: of_images[0] for metric, of_images in row.items()}
        for name, row in values.items()
    }


def tables_of(
    subject: Any,
    metrics: Sequence[MetricLike],
    methods: Sequence[Method] = (),
    **options: Any,
) -> list[Table]:
    """A table of metrics for each target of the subject, in order; empty without metrics.
    ``methods`` made the maps; ``options`` as of `explain.evaluate`.
    """
    if not metrics:
        return []
    if subject.explainer is None:
        raise MetricError("metrics need an explanation with its explainer; leave metrics out")
    wanted = [get_metric(metric) for metric in metrics]
    runs_again = any(isinstance(metric, ReattributionMetric) for metric in wanted)
    tables = []
    for index in range(len(subject.results)):
        maps = subject.on_input(index)
        maps_or_methods: Any = maps
        if runs_again:  # the method is needed beside its map
            maps_or_methods = {
                name: attribution.applied(methods) for name, attribution in maps.items()
            }
        with naming([subject.source]):
            tables.append(table_of(subject, index, maps_or_methods, wanted, **options))
    return tables
