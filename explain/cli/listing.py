"""`explain methods`, `metrics`, `models`, `layers`, `inspect`, `concepts`, `version`: lists, and views of a model."""

from __future__ import annotations

import argparse
import fnmatch
from dataclasses import asdict, fields
from types import NoneType
from typing import Any

from explain._utils.errors import printable
from explain._utils.spelling import did_you_mean
from explain._utils.version import __version__
from explain.cli import arguments as args
from explain.cli.arguments import FLAG, Option, UsageError
from explain.cli.each import PhotoResult, for_all
from explain.cli.inputs import PhotoSource, blaming, load_explainer, photos_of, read_photo
from explain.cli.output import DONE, Command, Output
from explain.cli.progress import ProgressBar


def draw_concepts(options: argparse.Namespace, answer: Output) -> int:
    """Draw the concepts of each photo."""
    photos, missing = photos_of(options)
    explainer = load_explainer(options, answer)

    def work(source: PhotoSource, stem: str, bar: ProgressBar) -> PhotoResult:
        photo = read_photo(source, answer)
        with blaming(options.model):
            found = explainer.concepts(photo, options.count, layer=options.layer)
        written = [str(path) for path in found.save(options.output, stem=stem, overwrite=options.force)]
        document = {"image": str(source), "files": written, "layer": found.concepts.layer, "concepts": found.labels}
        lines = [*(f"  {name}" for name in found.labels), *(f"  wrote {file}" for file in written)]
        return PhotoResult(document, lines, written)

    return for_all(photos, missing, work, answer, verb="drew", folder=options.output)


def inspect(options: argparse.Namespace, answer: Output) -> int:
    """Print the outputs of all layers for each photo."""
    photos, missing = photos_of(options)
    explainer = load_explainer(options, answer)

    def work(source: PhotoSource, stem: str, bar: ProgressBar) -> PhotoResult:
        photo = read_photo(source, answer)
        with blaming(options.model):
            found = explainer.inspect(photo)
        first = found.first_nonfinite
        lines = [*str(found).split("\n"), *([] if first is None else [f"first NaN or infinity: {first.name}"])]
        return PhotoResult({"image": str(source), "layers": [asdict(row) for row in found.rows]}, lines)

    return for_all(photos, missing, work, answer, verb="inspected")


def list_methods(options: argparse.Namespace, answer: Output) -> int:
    """List the methods by family; of those that are named, the options too."""
    from explain.methods import list_methods
    from explain.methods.base import FAMILIES
    from explain.methods.base import options as options_of
    from explain.methods.registry import family, get_method

    found = _matching(list_methods(), options, "method")
    width = max(map(len, [*found, "augmented(METHOD)"]))
    lines: dict[str, list[str]] = {}
    for method in map(get_method, found):
        only = method.only_for or None
        values = {name: _plain(value) for name, value in options_of(method).items()}
        answer.add({"name": method.name, "about": method.about, "paper": method.paper, "only_for": only,
                    "family": family(method), "options": values})  # fmt: skip
        suffix = f"; for {only}" if only else ""
        own = lines.setdefault(family(method), [])
        own.append(f"  {method.name:<{width}}  {method.about} ({method.paper}){suffix}")
        own += [f"  {'':<{width}}  {line}" for line in _lines_of(values, options)]
    if _pattern(options) is None:
        lines["any of them"] = [
            f"  {'smooth(METHOD)':<{width}}  on average over noisy copies of the photo",
            f"  {'augmented(METHOD)':<{width}}  over flips and scales of the photo",
        ]
    for each in (*FAMILIES, "any of them"):
        if each in lines:
            answer.say(each, *lines[each])
    return DONE


def list_metrics(options: argparse.Namespace, answer: Output) -> int:
    """List the metrics; of those that are named, the options too."""
    from explain.metrics import get_metric, list_metrics
    from explain.metrics.table import ARROWS

    for metric in map(get_metric, _matching(list_metrics(), options, "metric")):
        values = {each.name: str(getattr(metric, each.name)) for each in fields(metric)}
        answer.add({"name": metric.name, "about": metric.about, "paper": metric.paper, "units": metric.units,
                    "better": metric.better, "options": values})  # fmt: skip
        answer.say(f"{metric.name:<24} {ARROWS[metric.better]} {metric.about} ({metric.paper})")
        answer.say(*(f"{'':<24} {line}" for line in _lines_of(values, options)))
    return DONE


def list_models(options: argparse.Namespace, answer: Output) -> int:
    """List the models that have a name."""
    from explain.models import list_models

    for name in _matching(list_models(), options, "model"):
        answer.add(name)
        answer.say(name)
    return DONE


def _pattern(options: argparse.Namespace) -> str | None:
    return getattr(options, "pattern", None)  # which the options of plain `explain` lack


def _matching(names: list[str], options: argparse.Namespace, kind: str) -> list[str]:
    """The names that fit the pattern; all of them without one."""
    pattern = _pattern(options)
    found = names if pattern is None else fnmatch.filter(names, pattern.lower())
    if not found:
        raise UsageError(f"{kind} {pattern!r} is unknown; {did_you_mean(str(pattern), names)}")
    return found


def _lines_of(values: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """The options of a method or metric that was named."""
    told = ", ".join(f"{name}={value}" for name, value in values.items())
    return [f"options: {told}"] if told and _pattern(options) is not None else []


def _plain(value: Any) -> Any:
    """An option's value as it is typed, and as JSON has it."""
    if isinstance(value, (bool, int, float, str, NoneType)):
        return value
    return getattr(value, "name", None) or str(value)


def list_layers(options: argparse.Namespace, answer: Output) -> int:
    """List the layers of a model by the names of their calls for one photo."""
    from PIL import Image

    from explain.layers import default_layer, list_layers

    if len(options.images) > 1:
        raise UsageError(f"layers are listed for one photo, got {len(options.images)}; name one, or none")
    explainer = load_explainer(options, answer)
    photo = Image.new("RGB", (256, 256), "gray")
    if options.images:
        photo = read_photo(PhotoSource.of(options.images[0]), answer)
    x = explainer.as_input(photo)
    with blaming(explainer.name):
        chosen, calls = default_layer(explainer.model, x), list_layers(explainer.model, x)
    for call in calls:
        grid, default = None if call.grid is None else str(call.grid), call.label == chosen
        answer.add({"name": call.label, "kind": call.kind, "shape": list(call.shape), "map": grid, "default": default})
        end = (f"{grid} map" if grid else "") + (" (default)" if default else "")
        answer.say(f"{printable(call.label):<32} {call.kind:<20} {call.shape!s:<24} {end}".rstrip())
    return DONE


def tell_version(options: argparse.Namespace, answer: Output) -> int:
    """Print the version."""
    answer.add(__version__)
    answer.say(f"explain {__version__}")
    return DONE


# fmt: off
CONCEPTS = Command(
    "concepts", "draw the concepts that a layer sees in a photo",
    (args.IMAGES, args.RECURSIVE, args.COUNT, args.LAYER, *args.MODEL, args.OUTPUT, args.FORCE, args.JSON),
    draw_concepts, value="count", example="explain concepts cat.jpg --count 4",
    flag=Option("--concepts", "draw the K concepts that a layer sees in the image, and stop", **args.COUNTED,
                metavar="K"),
)
INSPECT = Command(
    "inspect", "print the output of every layer of the model for a photo",
    (args.IMAGES, args.RECURSIVE, *args.MODEL, args.JSON), inspect, "inspected",
    Option("--inspect", "print the output of every layer of the model for the image, and stop", False, **FLAG),
    example="explain inspect cat.jpg --model resnet50",
)
METHODS = Command(
    "methods", "list the methods, with their options if one is named", (args.PATTERN, args.JSON), list_methods,
    "methods", Option("--list-methods", "list the methods and stop", False, **FLAG), example="explain methods '*cam*'",
)
METRICS = Command(
    "metrics", "list the metrics, with their options if one is named", (args.PATTERN, args.JSON), list_metrics,
    "metrics", example="explain metrics '*mprt*'",
)
MODELS = Command(
    "models", "list the models that have a name", (args.PATTERN, args.JSON), list_models, "models",
    Option("--list-models", "list the models that have a name and stop", False, **FLAG),
    example="explain models 'resnet*'",
)
LAYERS = Command(
    "layers", "list a model's layers, by their calls for a photo", (args.IMAGES, *args.MODEL, args.JSON), list_layers,
    "layers", Option("--list-layers", "list the model's layers and stop", False, **FLAG),
    example="explain layers --model resnet50", needs_images=False,
)
VERSION = Command(
    "version", "print the version", (args.JSON,), tell_version, "version",
    Option("--version", "print the version and stop", False, **FLAG),
)
# fmt: on
