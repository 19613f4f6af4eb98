"""`explain methods`, `models`, `layers`, `inspect` and `concepts`: what there is to choose from and to look at."""

from __future__ import annotations

import argparse
import fnmatch
from dataclasses import asdict
from types import NoneType
from typing import Any

from explain._utils.errors import printable
from explain._utils.spelling import did_you_mean
from explain._utils.version import __version__
from explain.cli.arguments import (
    COUNT,
    FORCE,
    IMAGES,
    JSON,
    LAYER,
    MODEL,
    OUTPUT,
    PATTERN,
    RECURSIVE,
    Option,
    UsageError,
)
from explain.cli.each import PhotoResult, for_all
from explain.cli.inputs import PhotoSource, blaming, load_explainer, named, photos_of, read_photo
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
        written = [str(place) for place in found.save(options.output, stem=stem, overwrite=options.force)]
        names = found.labels
        about = {"image": str(source), "files": written, "layer": found.concepts.layer, "concepts": names}
        return PhotoResult(about, [*(f"  {name}" for name in names), *(f"  wrote {file}" for file in written)], written)

    return for_all(photos, missing, work, answer, verb="drew", folder=options.output)


CONCEPTS = Command(
    "concepts", "draw the concepts that a layer sees in a photo",
    (IMAGES, RECURSIVE, COUNT, LAYER, *MODEL, OUTPUT, FORCE, JSON), draw_concepts,
    flag=Option(
        ("--concepts",), "draw the K concepts that a layer sees in the image, and stop", None,
        {"type": COUNT.how["type"], "metavar": "K"},
    ),
    value="count", example="explain concepts cat.jpg --count 4",
)  # fmt: skip


def inspect(options: argparse.Namespace, answer: Output) -> int:
    """Print what the layers do with each photo."""
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


INSPECT = Command(
    "inspect", "print what every layer of the model does with a photo", (IMAGES, RECURSIVE, *MODEL, JSON), inspect,
    "inspected",
    Option(
        ("--inspect",), "print what every layer of the model does with the image, and stop", False,
        {"action": "store_true"},
    ),
    example="explain inspect cat.jpg --model resnet50",
)  # fmt: skip


_FLAG = {"action": "store_true"}


def _matching(names: list[str], pattern: str | None, what: str) -> list[str]:
    """The names that fit a pattern; all of them without one."""
    found = names if pattern is None else fnmatch.filter(names, pattern.lower())
    if not found:
        raise UsageError(f"{what} {pattern!r} is unknown; {did_you_mean(str(pattern), names)}")
    return found


def list_methods(options: argparse.Namespace, answer: Output) -> int:
    """List the methods by family; of those that are named, the options too."""
    from explain.methods import list_methods
    from explain.methods.base import FAMILIES
    from explain.methods.base import options as options_of
    from explain.methods.registry import family, get_method

    pattern = getattr(options, "pattern", None)
    found = _matching(list_methods(), pattern, "method")
    width = max(map(len, [*found, "augmented(METHOD)"]))
    lines: dict[str, list[str]] = {}
    for method in map(get_method, found):
        only = method.only_for or None
        values = {name: _plain(value) for name, value in options_of(method).items()}
        told = {"name": method.name, "about": method.about, "paper": method.paper, "only_for": only}
        answer.add({**told, "family": family(method), "options": values})
        said = lines.setdefault(family(method), [])
        said.append(f"  {method.name:<{width}}  {method.about} ({method.paper}){f'; for {only}' if only else ''}")
        if pattern is not None and values:
            said.append(f"  {'':<{width}}  options: {', '.join(f'{name}={value}' for name, value in values.items())}")
    if pattern is None:
        about = {"smooth(METHOD)": "on average over noisy copies", "augmented(METHOD)": "over flips and scales"}
        lines["any of them"] = [f"  {name:<{width}}  {how} of the photo" for name, how in about.items()]
    for each in (*FAMILIES, "any of them"):
        for line in [each, *lines[each]] if each in lines else ():
            answer.say(line)
    return DONE


def _plain(value: Any) -> Any:
    """An option's value as it is typed, and as JSON has it."""
    plain = isinstance(value, (bool, int, float, str, NoneType))
    return value if plain else getattr(value, "name", None) or str(value)


def list_models(options: argparse.Namespace, answer: Output) -> int:
    """List the models that have a name."""
    from explain.models import list_models

    for name in _matching(list_models(), getattr(options, "pattern", None), "model"):
        answer.add(name)
        answer.say(name)
    return DONE


def list_layers(options: argparse.Namespace, answer: Output) -> int:
    """List the layers of a model, as they are called for one photo."""
    from PIL import Image

    from explain.layers import default_layer, list_layers

    if len(options.images) > 1:
        raise UsageError(f"layers are listed for one photo, got {len(options.images)}; name one, or none")
    explainer = load_explainer(options, answer)
    photo = read_photo(named(options.images[0]), answer) if options.images else Image.new("RGB", (256, 256), "gray")
    x = explainer.as_input(photo)
    with blaming(explainer.name):
        chosen, calls = default_layer(explainer.model, x), list_layers(explainer.model, x)
    for call in calls:
        grid = None if call.grid is None else str(call.grid)
        found = {"name": call.label, "kind": call.kind, "shape": list(call.shape), "map": grid}
        answer.add({**found, "default": call.label == chosen})
        default = " (default)" if call.label == chosen else ""
        map_ = f"{grid} map" if grid else ""
        answer.say(f"{printable(call.label):<32} {call.kind:<20} {call.shape!s:<24} {map_}{default}".rstrip())
    return DONE


def tell_version(options: argparse.Namespace, answer: Output) -> int:
    """Print the version."""
    answer.add(__version__)
    answer.say(f"explain {__version__}")
    return DONE


METHODS = Command(
    "methods", "list the methods, with their options if one is named", (PATTERN, JSON), list_methods, "methods",
    Option(("--list-methods",), "list the methods and stop", False, _FLAG), example="explain methods '*cam*'",
)  # fmt: skip
MODELS = Command(
    "models", "list the models that have a name", (PATTERN, JSON), list_models, "models",
    Option(("--list-models",), "list the models that have a name and stop", False, _FLAG),
    example="explain models 'resnet*'",
)  # fmt: skip
LAYERS = Command(
    "layers", "list a model's layers, as they are called for a photo", (IMAGES, *MODEL, JSON), list_layers, "layers",
    Option(("--list-layers",), "list the model's layers and stop", False, _FLAG),
    example="explain layers --model resnet50", needs_images=False,
)  # fmt: skip
VERSION = Command(
    "version", "print the version", (JSON,), tell_version, "version",
    Option(("--version",), "print the version and stop", False, _FLAG),
)  # fmt: skip
