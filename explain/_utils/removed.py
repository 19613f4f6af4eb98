"""Public names that are gone, and what replaces them; a use of one says so until version 1.0."""

from __future__ import annotations

NAMES = {
    "attribute_all": "explain.attribute, with a list of methods",
    "attribute_targets": "explain.attribute, with targets=[...] or top_k=",
    "errors": "explain itself, as in explain.MethodError",
    "FillError": "explain.BaselineError",
    "fills": "explain.baselines",
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
}
"""Names and modules of the package's top level."""

OPTIONS = {
    "runs": "samples",
    "until": "tolerance",
    "seconds": "max_seconds",
    "fill": "baseline",
}
"""Arguments, where what is called takes the new one."""
