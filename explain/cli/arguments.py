"""What options mean together: methods and metrics with their budgets, baselines and rules; options without effect."""

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from explain._utils.errors import BaselineError, ExplainError
from explain.attribution.api import GROUPS
from explain.attribution.pictures import Look
from explain.baselines.base import Baseline
from explain.baselines.replacements import get_baseline
from explain.cli.commands import UsageError, as_usage
from explain.engine import Attributions
from explain.engine.perturbations import PerturbationRuns, Scores
from explain.hooks.interventions import Ablate
from explain.methods import LRP, Method
from explain.methods.base import get_method, uses_layer
from explain.methods.base import options as options_of
from explain.metrics import Metric, get_metric
from explain.render.styles import get_style

BUDGET = ("samples", "tolerance", "max_seconds")


def given_budget(options: argparse.Namespace) -> dict[str, float]:
    """The budgets that were given, by the names of the methods' options."""
    found = {name: getattr(options, name) for name in BUDGET}
    return {name: value for name, value in found.items() if value is not None}


def within_budget(methods: Iterable[str | Method], options: argparse.Namespace) -> list[Method]:
    """The methods with the budgets that were typed, as far as each has such an option.

    Raises:
        MethodError: one cannot do with so little.
    """
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
    with as_usage(ExplainError):
        chosen = {metric.name: metric for metric in map(get_metric, options.metric)}
    for name, metric in chosen.items():
        if metric.needs_object and not boxes:
            raise UsageError(f"metric {name!r} needs to know where the object is; use evaluate(..., boxes=...)")
    return list(chosen.values())


def checked_baseline(options: argparse.Namespace, covering: Sequence[object] | None) -> Baseline | None:
    """Return the baseline that was named, if one was; ``covering`` has the methods and metrics, or None for a group.

    Raises:
        UsageError: there is none of that name, a method has its own already, or nothing is covered.
    """
    if options.baseline is None:
        return None
    with as_usage(BaselineError):
        baseline = get_baseline(options.baseline)
    own = [name for name in options.method or () if re.search(r"\bbaseline\s*=", name)]
    if own:
        raise UsageError(f"--baseline {options.baseline} and {own[0]!r} both say what covers pixels; leave one out")
    if covering is not None and not any(map(covers, covering)):
        names = ", ".join(str(getattr(each, "name", each)) for each in covering)
        refuse_without_effect(options, ("baseline", False, f": no pixels are covered for {names}"))
        return None
    return baseline


def covers(each: object) -> bool:
    """Whether a method, or the method within it, or a metric covers pixels."""
    return hasattr(each, "baseline") or (hasattr(each, "method") and covers(each.method))


def with_baseline(each: Any, baseline: Baseline | None) -> Any:
    """The same method or metric with another baseline, if it covers pixels."""
    if baseline is None or not covers(each):
        return each
    if hasattr(each, "baseline"):
        return replace(each, baseline=baseline)
    return replace(each, method=with_baseline(each.method, baseline))


def with_rules(methods: Iterable[Method], composite: str | None) -> list[Method]:
    """Give ``lrp`` the composite that was named, if one was; ``attnlrp`` has its own.

    Raises:
        MethodError: there is no composite of this name.

    >>> from explain.methods.base import get_method
    >>> [getattr(m, "composite", None) for m in with_rules(map(get_method, ["lrp", "attnlrp", "fem"]), "EpsilonBox")]
    ['EpsilonBox', 'AttnLRP', None]
    """
    if composite is None:
        return list(methods)
    LRP(composite)  # the name is checked also where no method takes it
    automatic = LRP().composite
    return [replace(m, composite=composite) if isinstance(m, LRP) and m.composite == automatic else m for m in methods]


def checked_methods(options: argparse.Namespace) -> tuple[list[str], list[Method]]:
    """Return the groups of methods that were named, and the single methods with their rules and budgets.

    Raises:
        UsageError: one is unknown, or an option does not go with them.
    """
    for name in ("target", "text"):
        if options.top_k and getattr(options, name, None):
            raise UsageError(f"--top-k and --{name} cannot both be given; leave one out")
    evidence = ["sufficient", "necessary"] if getattr(options, "evidence", False) else []
    names = [*(options.method or ()), *evidence] or ["gradcam" if options.composite is None else "lrp"]
    groups = [name for name in names if name in GROUPS]
    with as_usage(ExplainError):
        known = with_rules((get_method(name) for name in names if name not in GROUPS), options.composite)
        methods = within_budget(dict.fromkeys(known), options)
        Look(options.style, getattr(options, "colormap", None), getattr(options, "alpha", None))
    if not groups:
        _refuse_unheeded(options, methods)
    return groups, methods


def _refuse_unheeded(options: argparse.Namespace, methods: Sequence[Method]) -> None:
    """Refuse the first option that none of these methods heeds."""
    names = ", ".join(method.name for method in methods)
    styles = [get_style(options.style or method.style) for method in methods]
    several = len(options.layer or ()) > 1 or any(re.search(r"[*?\[]", layer) for layer in options.layer or ())
    evaluates = bool(options.metric or getattr(options, "check", False))
    many = (Attributions, PerturbationRuns, Scores)  # what takes more than the photo itself
    reruns = any(isinstance(need, many) for method in methods for need in method.needs)
    composites = [method.composite for method in methods if isinstance(method, LRP)]
    rules = f"the rules of {names} are chosen already" if composites else f"no rules are chosen for {names}"
    heeded: list[tuple[str, bool, str]] = [
        ("layer", any(uses_layer(m) or m.layer_optional for m in methods), f"no layer is looked at for {names}"),
        ("composite", options.composite in composites, rules),
        ("fuse", several or (not options.layer and any(m.fusion for m in methods)),
         "the maps of one layer are not fused; name several with --layer"),
        ("batch_size", evaluates or reruns, f"the model is run once for {names}"),
        *((name, any(name in options_of(m) for m in methods), f"nothing is estimated by {names}") for name in BUDGET),
        ("bf16", reruns, f"the model is run once for {names}"),
        ("alpha", any(hasattr(style, "alpha") for style in styles), "nothing is drawn as heat"),
        ("colormap", bool(options.style) or any(hasattr(style, "colormap") for style in styles),
         "nothing is drawn with a colour map"),
    ]  # fmt: skip
    refuse_without_effect(options, *((name, is_heeded, f": {reason}") for name, is_heeded, reason in heeded))


def refuse_without_effect(options: argparse.Namespace, *heeded: tuple[str, bool, str]) -> None:
    """Refuse the first option that was given and is not heeded; each has its name, whether it is, and why not.

    Raises:
        UsageError: there is one.
    """
    for name, is_heeded, why in heeded:
        if name in options.given and not is_heeded:
            raise UsageError(f"--{name.replace('_', '-')} would have no effect{why}; leave it out")


def ablation(text: str) -> Ablate:
    """Read what to ablate, as ``layer3`` or ``layer3[12,40]``, ``attn[heads 1]``, ``layer2[region 40,30,90,80]``.

    Raises:
        UsageError: it is written in another way.

    >>> ablation("layer3[12,40]").channels
    (12, 40)
    """
    found = re.fullmatch(r"([^\[\]]+)(?:\[(?:(heads|tokens|channels|region) )?([\d.,\s-]+)\])?", text.strip())
    try:
        if found is None:
            raise ValueError
        layer, units, numbers = found.groups()
        kind: Any = float if units == "region" else int
        chosen: Any = {} if numbers is None else {units or "channels": [kind(each) for each in numbers.split(",")]}
        return Ablate(layer, **chosen)
    except ValueError as error:
        why = f" ({error})" if isinstance(error, ExplainError) else ""
        known = "a layer, also with units as in 'layer3[12,40]', 'attn[heads 1]' or 'layer3[region 40,30,90,80]'"
        raise UsageError(f"--ablate must be {known}, got {text!r}{why}") from None
