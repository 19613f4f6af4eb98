"""Options that change methods: samples, baselines, rules; metrics; options without effect are refused."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from explain._utils.errors import BaselineError, ExplainError
from explain.cli.arguments import BUDGET, UsageError

if TYPE_CHECKING:
    from explain.baselines.base import Baseline
    from explain.methods import Method
    from explain.metrics import Metric


def given_budget(options: argparse.Namespace) -> dict[str, float]:
    """The budgets that were typed, by the names of the methods' options."""
    return {option.name: getattr(options, option.name) for option in BUDGET if option.name in options.given}


def within_budget(methods: Iterable[str | Method], options: argparse.Namespace) -> list[Method]:
    """The methods with the budgets that were typed, as far as each has such an option.

    Raises:
        MethodError: one cannot do with so little.
    """
    from explain.methods.base import options as options_of
    from explain.methods.registry import get_method

    found = []
    for method in map(get_method, methods):
        mine = {name: value for name, value in given_budget(options).items() if name in options_of(method)}
        found.append(replace(method, **mine) if mine else method)
    return found


def checked_metrics(options: argparse.Namespace, *, boxes: bool = False) -> list[Metric]:
    """Return the metrics that were named, and refuse what cannot be meant; ``boxes`` may come with the photos."""
    asked = [name for name in ("metric", "check") if getattr(options, name, None)]
    if asked and options.crop == "five":
        raise UsageError(f"--{asked[0]} judges maps of one crop, and --crop five makes one map of five; leave one out")
    if not options.metric:
        return []
    from explain.metrics import get_metric

    try:
        chosen = {metric.name: metric for metric in map(get_metric, options.metric)}
    except ExplainError as error:
        raise UsageError(str(error)) from None
    for name, metric in chosen.items():
        if metric.needs_object and not boxes:
            raise UsageError(
                f"metric {name!r} needs to know where the object is, which cannot be typed; use explain.evaluate(..., "
                "boxes=...) in Python, or another metric"
            )
    return list(chosen.values())


T = TypeVar("T")
_OWN = re.compile(r"\bbaseline\s*=")


def checked_baseline(options: argparse.Namespace, covering: Sequence[object] | None) -> Baseline | None:
    """Return the baseline that was named, if one was; ``covering`` has the methods and metrics, or None for a group.

    Raises:
        UsageError: there is none of that name, a method has its own already, or nothing is covered.
    """
    if options.baseline is None:
        return None
    from explain.baselines.registry import get_baseline

    try:
        baseline = get_baseline(options.baseline)
    except BaselineError as error:
        raise UsageError(str(error)) from None
    own = [name for name in options.method or () if _OWN.search(name)]
    if own:
        raise UsageError(f"--baseline {options.baseline} and {own[0]!r} both say what covers pixels; leave one out")
    if covering is not None and not any(map(covers, covering)):
        names = ", ".join(str(getattr(each, "name", each)) for each in covering)
        raise UsageError(f"--baseline would have no effect: no pixels are covered for {names}; leave it out")
    return baseline


def covers(each: object) -> bool:
    """Whether a method, or the method within it, or a metric covers pixels."""
    return hasattr(each, "baseline") or (hasattr(each, "method") and covers(each.method))


def with_baseline(each: T, baseline: Baseline | None) -> T:
    """The same method or metric with another baseline, if it covers pixels."""
    if baseline is None or not covers(each):
        return each
    thing: Any = each
    changed = (
        {"baseline": baseline} if hasattr(thing, "baseline") else {"method": with_baseline(thing.method, baseline)}
    )
    found: T = replace(thing, **changed)
    return found


def with_rules(methods: Iterable[Method], composite: str | None) -> list[Method]:
    """Give ``lrp`` the composite that was named, if one was; ``attnlrp`` has its own.

    Raises:
        MethodError: there is no composite of this name.

    >>> from explain.methods.registry import get_method
    >>> [getattr(m, "composite", None) for m in with_rules(map(get_method, ["lrp", "attnlrp", "fem"]), "EpsilonBox")]
    ['EpsilonBox', 'AttnLRP', None]
    """
    from explain.methods import LRP

    if composite is None:
        return list(methods)
    LRP(composite)  # the name is checked also where no method takes it
    automatic = LRP().composite
    return [replace(m, composite=composite) if isinstance(m, LRP) and m.composite == automatic else m for m in methods]


def refuse_without_effect(options: argparse.Namespace, methods: Sequence[Method]) -> None:
    """Refuse the first option that none of these methods heeds.

    Raises:
        UsageError: there is one.
    """
    from explain.methods import LRP
    from explain.methods.base import options as options_of
    from explain.methods.base import uses_layer
    from explain.render.styles import get_style

    names = ", ".join(method.name for method in methods)
    own = [get_style(options.style or method.style) for method in methods]
    several = len(options.layer or ()) > 1 or any(re.search(r"[*?\[]", layer) for layer in options.layer or ())
    fuses = several or (not options.layer and any(method.fusion for method in methods))
    heeded = {
        "layer": (
            any(uses_layer(m) or m.layer_optional for m in methods),
            f"no layer is looked at for {names}",
        ),
        "composite": (
            any(isinstance(m, LRP) and m.composite == options.composite for m in methods),
            f"the rules of {names} are chosen already"
            if any(isinstance(m, LRP) for m in methods)
            else f"no rules are chosen for {names}",
        ),
        "fuse": (fuses, "the maps of one layer are not fused; name several with --layer"),
        "batch_size": (
            bool(options.metric or getattr(options, "check", False)) or any(map(_reruns, methods)),
            f"the model is run once for {names}",
        ),
        **{
            option: (any(option in options_of(m) for m in methods), f"nothing is estimated by {names}")
            for option in ("samples", "tolerance", "max_seconds")
        },
        "bf16": (any(map(_reruns, methods)), f"the model is run once for {names}"),
        "alpha": (any(hasattr(style, "alpha") for style in own), "nothing is drawn as heat"),
        "colormap": (
            bool(options.style) or any(hasattr(style, "colormap") for style in own),
            "nothing is drawn with a colour map",
        ),
    }
    for name, (is_heeded, reason) in heeded.items():
        if name in options.given and not is_heeded:
            raise UsageError(f"--{name.replace('_', '-')} would have no effect: {reason}; leave it out")


def _reruns(method: Method) -> bool:
    """Whether a method runs the model on more than the photo itself."""
    from explain.engine import Attributions
    from explain.engine.perturbations import PerturbationRuns, Scores

    return any(isinstance(need, (Attributions, PerturbationRuns, Scores)) for need in method.needs)
