"""What the options of `explain PHOTO` and `explain run` ask for: methods, metrics, baseline,
targets."""

import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from explain._utils.errors import BaselineError, ExplainError, TargetError
from explain.cli.commands import UsageError, as_usage, refuse_without_effect, without_effect

if TYPE_CHECKING:
    from explain.baselines.base import Baseline
    from explain.methods import Method
    from explain.metrics import Metric
    from explain.targets import Target

BUDGET = ("samples", "tolerance", "max_seconds")


def methods_of(
    context: click.Context, options: SimpleNamespace
) -> "tuple[str | None, list[Method]]":
    """A group's name and no methods, or None and the methods, each once; "gradcam" by default.
    Typed options that none of them uses are refused; those of a file of defaults that the library
    would refuse (the budget, ``alpha``, ``colormap``) become None in ``options``.
    """
    from explain.attribution.pictures import Look
    from explain.attribution.selection import GROUPS
    from explain.methods.base import get_method

    evidence = ["sufficient", "necessary"] if options.evidence else []
    names = [*options.method, *evidence] or ["gradcam"]
    groups = [name for name in names if name in GROUPS]
    if groups and len(names) > 1:
        raise UsageError(f"--method {groups[0]} takes the others too; leave them out")
    with as_usage(ExplainError):
        methods = [get_method(name) for name in names if name not in groups]
        # It is made for its checks alone: it refuses an unknown style or colour map, and options
        # that the style does not have. `explain run` has --style, and not the other two.
        colormap = getattr(options, "colormap", None)
        Look(options.style, colormap=colormap, alpha=getattr(options, "alpha", None))
    if groups:
        # its methods are chosen once the model is known: until then, nobody can say which options
        # they use
        return groups[0], []
    _refuse_unheeded(context, options, methods)
    return None, list(dict.fromkeys(methods))


def _refuse_unheeded(
    context: click.Context, options: SimpleNamespace, methods: "Sequence[Method]"
) -> None:
    """Refuse a typed option that has no effect with any of these methods, in the order of
    ``effects``; those of a file of defaults that the library would refuse are set to None.
    """
    from explain.engine.perturbations import Attributions, Scores, Searches
    from explain.methods.base import options as options_of
    from explain.methods.base import uses_layer
    from explain.render.styles import get_style

    names = ", ".join(method.name for method in methods)
    styles = [get_style(options.style or method.style) for method in methods]
    layers = options.layer
    # a pattern such as "layer*" may be several
    has_several = len(layers) > 1 or any(re.search(r"[*?\[]", layer) for layer in layers)
    fuses = has_several or (not layers and any(method.fusion for method in methods))
    repeated = (Attributions, Scores, Searches)  # needs for which the model is run many times
    reruns = any(isinstance(need, repeated) for method in methods for need in method.needs)
    evaluates = bool(options.metric or getattr(options, "check", False))
    has_layer = any(uses_layer(method) or method.layer_optional for method in methods)
    # a style that was typed has colours: `Look` in `methods_of` refuses a colour map for others
    has_colours = bool(options.style) or any(hasattr(style, "colormap") for style in styles)
    effects = {
        "layer": (has_layer, f": no layer is looked at for {names}"),
        "fuse": (fuses, ": the maps of one layer are not fused; name several with --layer"),
        "placement": (has_layer, f": no layer is looked at for {names}"),
        "batch_size": (evaluates or reruns, f": the model is run once for {names}"),
        "alpha": (any(hasattr(style, "alpha") for style in styles), ": nothing is drawn as heat"),
        "colormap": (has_colours, ": nothing is drawn with a colour map"),
    }
    for name in BUDGET:
        estimates = any(name in options_of(method) for method in methods)
        effects[name] = estimates, f": nothing is estimated by {names}"
        if not estimates:  # typed ones are refused below; this is for defaults of a file
            setattr(options, name, None)
    for name, (has_effect, why) in effects.items():
        refuse_without_effect(context, name, why, unless=has_effect)
        # it was not typed, but is in a file: pictures would be refused with it
        if not has_effect and name in ("alpha", "colormap"):
            setattr(options, name, None)


def metrics_of(names: Sequence[str], *, has_boxes: bool = False) -> "list[Metric]":
    """Return the metrics that --metric names, each once; ``has_boxes`` says whether the photos may
    come with the boxes of objects, as in a data set.
    """
    if not names:
        return []
    from explain.metrics import get_metric  # slow to load

    with as_usage(ExplainError):
        metrics = {metric.name: metric for metric in map(get_metric, names)}
    for name, metric in metrics.items():
        if metric.needs_object and not has_boxes:
            raise UsageError(
                f"metric {name!r} needs to know where the object is; use 'explain run' with a list "
                "of photos that has their boxes"
            )
    return list(metrics.values())


def baseline_of(
    context: click.Context,
    name: str | None,
    *,
    typed_methods: Sequence[str],
    users: Sequence[Any] | None,
) -> "Baseline | None":
    """The baseline that --baseline names; None without it. Refused if a method was typed with a
    baseline of its own, or if none of the ``users`` (methods and metrics; None where they are not
    chosen yet) covers pixels.
    """
    if name is None:
        return None
    from explain.baselines.replacements import get_baseline

    with as_usage(BaselineError):
        baseline = get_baseline(name)
    for text in typed_methods:
        if re.search(r"\bbaseline\s*=", text):  # as in "occlusion(baseline='blur')"
            raise UsageError(
                f"--baseline {name} and {text!r} both say what covers pixels; leave one out"
            )
    if users is not None:
        names = ", ".join(user.name for user in users)
        has_effect = any(map(_covers, users))
        refuse_without_effect(
            context, "baseline", f": no pixels are covered for {names}", unless=has_effect
        )
    return baseline


def _covers(user: Any) -> bool:
    """Whether a method or metric covers pixels (has a baseline), itself or by the method that it
    wraps."""
    return hasattr(user, "baseline") or (hasattr(user, "method") and _covers(user.method))


def with_baseline(user: Any, baseline: "Baseline | None") -> Any:
    """Return a method or metric with another baseline, also within the method that it wraps; it is
    returned as it is without a baseline, or if it covers no pixels."""
    if baseline is None or not _covers(user):
        return user
    if hasattr(user, "baseline"):
        return replace(user, baseline=baseline)
    return replace(user, method=with_baseline(user.method, baseline))


def target_of(name: str | None) -> int | str | None:
    """Return the text of --target as the library takes it: the index of a class if it is a whole
    number, else a label; None without any."""
    if name is not None and re.fullmatch(r"-?\d+", name):
        return int(name)
    return name


def targets_of(
    names: Sequence[str],
    categories: Sequence[str] | None,
    texts: Sequence[str] = (),
    thresholds: Sequence[str] = (),
) -> "list[Target] | None":
    """The targets of --target and --text, each once, in that order, by the labels ``categories``;
    None without any, which means the best class. ``thresholds`` are those of --threshold.
    """
    from explain.targets import Predicted, Text
    from explain.targets.resolve import as_targets

    if not names and not texts:
        if thresholds:
            raise without_effect("--threshold", " without --target predicted or all")
        return None
    wanted: list[Any] = [*map(target_of, names), *map(Text, texts)]
    with as_usage(TargetError):
        targets = list(dict.fromkeys(as_targets(targets=wanted, categories=categories)))
        if not thresholds:
            return targets
        if not any(isinstance(target, Predicted) for target in targets):
            raise without_effect("--threshold", " without --target predicted or all")
        predicted = Predicted(thresholds_of(thresholds, categories))
    return [predicted if isinstance(target, Predicted) else target for target in targets]


def thresholds_of(
    texts: Sequence[str], categories: Sequence[str] | None
) -> float | dict[int, float] | None:
    """The probabilities that --threshold names, as "0.3" for all labels or "Edema=0.2" for one: a
    single one, or by the index of the class; None without any. Refused if one is no probability."""
    from explain.targets import Predicted
    from explain.targets.labels import find_category

    for_all: float | None = None
    of_classes: dict[int, float] = {}
    for text in texts:
        label, equals, share = text.rpartition("=")
        try:
            number = float(share)
        except ValueError:
            raise UsageError(
                f"--threshold must be a probability, or LABEL=PROBABILITY, got {text!r}; give 0.3"
            ) from None
        if equals:
            of_classes[find_category(label, categories)] = number
        else:
            for_all = number
    thresholds = of_classes or for_all
    if of_classes and for_all is not None:
        # the one for all holds for the classes that have none of their own
        thresholds = dict.fromkeys(range(len(categories or ())), for_all) | of_classes
    Predicted(thresholds)  # which refuses numbers beyond 0 to 1
    return thresholds


def call_options(options: SimpleNamespace) -> dict[str, Any]:
    """Return the options of the command line that an explainer takes under the same names, with
    the layers in its form."""
    names = ("fuse", "batch_size", "top_k", *BUDGET)
    values = {name: getattr(options, name) for name in names}
    return {
        **values,
        "layer": list(options.layer) or None,
        **({"placement": options.placement} if options.placement else {}),
    }
