"""See why a PyTorch vision model said what it said.

    import explain
    explain.explain("cat.jpg").save("out/")

The way through the house, each room importing only from rooms above it:

    version         which version this is
    interrupts      beginnings and ends that no signal can split
    spelling        what a misspelt name may stand for
    errors          what goes wrong, in one line each
    nested          tensors in containers of every kind: found, replaced
    random_numbers  drawn alike under every default dtype and device
    images          files, bytes, arrays and PIL images to RGB; where a model's input lies on a photo
    render/         styles, overlays, captions, sheets, figures, HTML: arrays and PIL images only
    written         names with options, as people type them
    hooks/          every hook handle: lifetime, taps, capture, graph, a model left as found
    training/       gradients clipped and watched during training
    distribution/   gradients exchanged between processes, models packed into archives
    inputs          what a model is called with, and which of it is explained
    layers/         names, feature maps, the default layer
    targets/        from a model's output to one score per image
    engine/         the fewest passes that gather the `Evidence` for all methods
    fills/          what takes the place of covered pixels
    methods/        frozen dataclasses: options and mathematics
    citation        how to cite a method, and the package
    reasons         why a map says nothing
    result          `Attribution`: what a method says about a batch of images
    cautions        what callers are warned of: what a map misses, turns round, or does not say
    request         what is to be explained, and how; how it is answered
    selection       which methods a network can be explained with, and what each costs
    attribution     `attribute`: model and tensors in, `Attribution` out
    concepts        what a layer's feature maps are made of
    metrics/        how good a map is: figures for each image, in a table
    mosaic          several crops of one photo, explained as one
    pictures        what an explanation looks like: overlays, captions, tiles
    output          files that appear complete or not at all
    models/         bundled, torchvision's, the user's own, with preprocessing and labels
    record          what was done, in plain values with a version
    report/         an explanation as a page for any browser: HTML, CSS and JavaScript in one file
    explanation     `Explanation`: a photo explained, as pictures, files and records
    photo_concepts  the concepts in one photo, as a picture, files and a record
    photos          several photos in batches, in order; each failure is reported for its photo
    explainer       `Explainer`: photos and a model in, an `Explanation` of each out
    saved           what was saved, read back without a model, and done again
    runs/           all photos of a folder or data set explained, stored as they come, continued after anything
    watching/       a training watched: photos explained every so many steps, gradients, and how maps moved
    app/            a page to ask a live model in, and the small server behind it
    arguments       the options of the command line
    cli             arguments in, lines and exit codes out

Importing the package is light: torch loads with the first name that needs it; torchvision, matplotlib and OpenCV only
with the features that use them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from explain.version import __version__

_HOME = {
    "Attribution": "explain.attribution",
    "Explainer": "explain.explainer",
    "Explanation": "explain.explanation",
    "ExplainError": "explain.errors",
    "ExplainWarning": "explain.errors",
    "Run": "explain.runs",
    "applicable_methods": "explain.attribution",
    "Concepts": "explain.concepts",
    "Inputs": "explain.inputs",
    "cite": "explain.citation",
    "attribute": "explain.attribution",
    "attribute_all": "explain.attribution",
    "attribute_targets": "explain.attribution",
    "evaluate": "explain.metrics",
    "explain": "explain.explainer",
    "find_concepts": "explain.concepts",
    "insight": "explain.runs.insight",
    "list_layers": "explain.layers",
    "list_methods": "explain.methods",
    "list_metrics": "explain.metrics",
    "load": "explain.saved",
    "open_run": "explain.runs",
    "plan": "explain.attribution",
    "run": "explain.runs",
}
_ROOMS = {
    *(
        "errors",
        "nested",
        "images",
        "render",
        "written",
        "hooks",
        "training",
        "distribution",
        "inputs",
        "layers",
        "targets",
        "engine",
        "fills",
        "methods",
        "citation",
        "reasons",
        "result",
        "cautions",
        "request",
        "selection",
        "attribution",
        "concepts",
        "metrics",
        "mosaic",
    ),
    *(
        "pictures",
        "output",
        "models",
        "record",
        "report",
        "explanation",
        "photo_concepts",
        "photos",
        "explainer",
        "saved",
    ),
    *("runs", "watching", "app"),
    *("arguments", "cli", "version"),
}

__all__ = [
    "Attribution",
    "Concepts",
    "ExplainError",
    "ExplainWarning",
    "Explainer",
    "Explanation",
    "Inputs",
    "Run",
    "__version__",
    "applicable_methods",
    "attribute",
    "attribute_all",
    "attribute_targets",
    "cite",
    "evaluate",
    "explain",
    "find_concepts",
    "insight",
    "list_layers",
    "list_methods",
    "list_metrics",
    "load",
    "open_run",
    "plan",
    "run",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"explain.{name}")
    raise AttributeError(f"module 'explain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])


if TYPE_CHECKING:
    from explain.attribution import Attribution, applicable_methods, attribute, attribute_all, attribute_targets, plan
    from explain.citation import cite
    from explain.concepts import Concepts, find_concepts
    from explain.errors import ExplainError, ExplainWarning
    from explain.explainer import Explainer, explain
    from explain.explanation import Explanation
    from explain.inputs import Inputs
    from explain.layers import list_layers
    from explain.methods import list_methods
    from explain.metrics import evaluate, list_metrics
    from explain.runs import Run, open_run, run
    from explain.runs.insight import insight
    from explain.saved import load
