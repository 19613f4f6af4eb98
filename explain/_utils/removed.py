"""Public names that are gone, and what replaces them: to use one is an error that says so, until 1.0."""

from __future__ import annotations

NAMES = {
    "attribute_all": "explain.attribute with a list of methods",
    "attribute_targets": "explain.attribute with targets=[...] or top_k=",
    "errors": "explain itself, as in explain.MethodError",
    "FillError": "explain.BaselineError",
    "fills": "explain.baselines",
    "perturbations": "explain.engine",
    "watching": "explain.training",
    "distribution": "explain.distributed",
    "images": "explain.data.images",
    "inputs": "explain.data.inputs",
    "output": "explain.data.files",
    "pictures": "explain.render",
    "saved": "explain.explanation.loading",
    "record": "explain.attribution.records",
    "explainer": "explain.explanation.explainer",
    "result": "explain.attribution.result",
    "request": "explain.attribution.request",
    "photo_concepts": "explain.explanation.concepts",
    "runs.insight": "explain.insight",
    "runs.RunFolder": "explain.open_run",
    "metrics.verdict": "explain.checks",
    "metrics.Reading": 'score="logit" or score="probability"',
    "hooks.GradientClipper": "explain.training.GradientClipper",
    "hooks.GradientFlow": "explain.training.GradientFlow",
    "hooks.DeadUnits": "explain.training.DeadUnits",
    "hooks.distributed": "explain.distributed.communication",
    "hooks.packaging": "explain.distributed.packaging",
    "targets.as_list": "explain.targets.as_targets",
    "baselines.Photo": "explain.baselines.OtherPhoto",
    "render.heat": "explain.render.overlay",
}
"""Modules and names below ``explain.``"""

OPTIONS = {
    "runs": "samples",
    "until": "tolerance",
    "seconds": "max_seconds",
    "fill": "baseline",
    "baselines": "baseline",
    "reading": "score",
}
"""Options of functions, methods and metrics, where these have the new one."""
