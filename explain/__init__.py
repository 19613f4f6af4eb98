"""Explain what PyTorch vision models predict: attribution maps, metrics, checks and hooks.

    import explain
    explain.explain("cat.jpg").save("out/")

The package map; each subpackage imports only from those above it:

    _utils/         errors, spelling, containers of tensors, signals, method specs, the version
    data/           image files and arrays to RGB, model inputs, files that appear whole
    render/         styles, overlays, captions, sheets, figures: arrays and PIL images only
    recording/      one forward pass as a list of operations, below Python's names
    hooks/          every hook handle: groups, capture, extractor, inspect, timeline, left as found
    relevance/      a pass recorded as operations and steps; rules, composites, DeepLIFT
    distributed/    communication hooks between processes, models in archives
    targets/        from a model's output to one score per image
    layers/         names, feature-map layouts, the default layer; `explain.hooks.intervene`
    baselines/      what stands for "absent": zero, mean, blur, noise, neighbours, another photo
    engine/         needs, plan, collectors, perturbations, reruns, execution
    methods/        frozen dataclasses: options and mathematics
    attribution/    `attribute`, requests, results, selection, citation, records, concepts
    metrics/        how good a map is: a table of figures for each image; the check
    models/         default, tiny, transformer, detector, segmenter; other packages'; preprocessing
    report/         an explanation as a page for any browser: HTML, CSS and JavaScript in one file
    explanation/    `Explainer`, `Explanation`: photos and a model in, pictures and records out
    answers/        answers of image-text models, explained word by word
    store/          sources of photos; the file that keeps the maps of a run, and its rows
    insight/        what the maps of a run say together: clusters, channels, concepts, directions;
                    the repair of a model
    testing/        assertions for a CI: a region is ignored or used, two models agree
    runs/           all photos of a source explained, stored as they come, continued after anything
    training/       gradients clipped and watched, photos explained during training
    app/            a page to ask a live model in, and the small server behind it
    cli/            arguments in, lines and exit codes out; no logic of its own

Importing the package is light: torch loads with the first name that needs it; torchvision,
matplotlib and OpenCV only with the features that use them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from explain._utils.version import __version__

_HOME = {
    "Attribution": "explain.attribution.result",
    "Concepts": "explain.attribution.concepts",
    "Explainer": "explain.explanation.explainer",
    "Explanation": "explain.explanation.explanation",
    "Inputs": "explain.data.inputs",
    "Run": "explain.runs.result",
    "attribute": "explain.attribution.api",
    "cite": "explain.attribution.citing",
    "evaluate": "explain.metrics",
    "explain": "explain.explanation.explainer",
    "figure": "explain.explanation.figure",
    "find_concepts": "explain.attribution.concepts",
    "lens": "explain.attribution.lens",
    "list_layers": "explain.layers",
    "list_methods": "explain.methods",
    "list_metrics": "explain.metrics",
    "load": "explain.explanation.loading",
    "open_run": "explain.runs.result",
    "plan": "explain.attribution.api",
    "run": "explain.runs.runner",
    "trace": "explain.attribution.trace",
}
_ROOMS = {
    "_utils",
    "answers",
    "app",
    "attribution",
    "baselines",
    "cli",
    "data",
    "distributed",
    "engine",
    "explanation",
    "hooks",
    "insight",
    "layers",
    "methods",
    "metrics",
    "models",
    "recording",
    "relevance",
    "render",
    "report",
    "runs",
    "store",
    "targets",
    "testing",
    "training",
}

__all__ = [
    "AppError",
    "ArgumentError",
    "Attribution",
    "BaselineError",
    "Concepts",
    "ExplainError",
    "ExplainWarning",
    "Explainer",
    "Explanation",
    "FolderError",
    "HookError",
    "ImageError",
    "Inputs",
    "LabelsError",
    "LayerError",
    "MethodError",
    "MetricError",
    "ModelError",
    "NotRecordedError",
    "OutputError",
    "PhotoError",
    "PhotosError",
    "RecordError",
    "Run",
    "RunError",
    "TargetError",
    "UnusedLayerError",
    "__version__",
    "attribute",
    "cite",
    "evaluate",
    "explain",
    "figure",
    "find_concepts",
    "lens",
    "list_layers",
    "list_methods",
    "list_metrics",
    "load",
    "open_run",
    "plan",
    "run",
    "trace",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name) or ("explain._utils.errors" if name in __all__ else None)
    if home is not None:
        value = getattr(importlib.import_module(home), name)
        globals()[name] = value  # to be found at once from now on
        return value
    if name in _ROOMS:
        return importlib.import_module(f"explain.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])


if TYPE_CHECKING:
    # isort: off
    from explain._utils.errors import (
        AppError,
        ArgumentError,
        BaselineError,
        ExplainError,
        ExplainWarning,
        FolderError,
        HookError,
        ImageError,
        LabelsError,
        LayerError,
        MethodError,
        MetricError,
        ModelError,
        NotRecordedError,
        OutputError,
        PhotoError,
        PhotosError,
        RecordError,
        RunError,
        TargetError,
        UnusedLayerError,
    )

    # isort: on
    from explain.attribution.api import attribute, plan
    from explain.attribution.citing import cite
    from explain.attribution.concepts import Concepts, find_concepts
    from explain.attribution.lens import lens
    from explain.attribution.result import Attribution
    from explain.attribution.trace import trace
    from explain.data.inputs import Inputs
    from explain.explanation.explainer import Explainer, explain
    from explain.explanation.explanation import Explanation
    from explain.explanation.figure import figure
    from explain.explanation.loading import load
    from explain.layers import list_layers
    from explain.methods import list_methods
    from explain.metrics import evaluate, list_metrics
    from explain.runs.result import Run, open_run
    from explain.runs.runner import run
