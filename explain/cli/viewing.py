"""Views of a network: `explain layers`, `inspect`, `concepts`, `trace`."""

import argparse
from dataclasses import asdict

from PIL import Image

from explain import layers
from explain._utils.errors import printable
from explain.attribution import effects
from explain.cli import each
from explain.cli.commands import UsageError
from explain.cli.each import PhotoResult, PhotoSource, blaming, for_all, load_explainer, photos_of, read_photo
from explain.cli.explaining import target_of
from explain.cli.output import Output, ProgressBar
from explain.data.files import Files


def draw_concepts(options: argparse.Namespace, answer: Output) -> int:
    """Draw the concepts of each photo."""
    photos, explainer = photos_of(options), load_explainer(options, answer)

    def work(source: PhotoSource, stem: str, bar: ProgressBar) -> PhotoResult:
        photo = read_photo(source, answer)
        with blaming(options.model):
            found = explainer.concepts(photo, options.count, layer=options.layer)
        written = [str(path) for path in found.save(options.output, stem=stem, overwrite=options.force)]
        document = {"image": str(source), "files": written, "layer": found.concepts.layer, "concepts": found.labels}
        lines = [*(f"  {name}" for name in found.labels), *(f"  wrote {file}" for file in written)]
        return PhotoResult(document, lines, written, summary=", ".join(found.labels))

    return for_all(photos, work, answer, "drew", options.output)


def inspect(options: argparse.Namespace, answer: Output) -> int:
    """Print the outputs of all layers for each photo."""
    photos, explainer = photos_of(options), load_explainer(options, answer)

    def work(source: PhotoSource, stem: str, bar: ProgressBar) -> PhotoResult:
        photo = read_photo(source, answer)
        with blaming(options.model):
            found = explainer.inspect(photo)
        first = found.first_nonfinite
        lines = [*str(found).split("\n"), *([] if first is None else [f"first NaN or infinity: {first.name}"])]
        return PhotoResult({"image": str(source), "layers": [asdict(row) for row in found.rows]}, lines)

    return for_all(photos, work, answer, "inspected")


def trace(options: argparse.Namespace, answer: Output) -> None:
    """Patch each part of a network from the first photo into the second, and print the effects."""
    if len(options.images) != 2:
        raise UsageError(f"two photos must be named, CLEAN and CORRUPTED, got {len(options.images)}")
    explainer = load_explainer(options, answer)
    clean, corrupted = (explainer.as_input(read_photo(each.source_of(name), answer)) for name in options.images)
    with blaming(options.model):
        found = effects.trace(
            explainer.model, clean, corrupted, options.at, layers=options.layer, categories=explainer.categories,
            target=target_of(options.target, explainer.categories), batch_size=options.batch_size,
        )  # fmt: skip
    document, wrote = found.to_dict(), []
    if options.output is not None:
        files = Files(options.output, overwrite=options.force)
        files.add_picture("trace.png", found.picture())
        document["files"] = list(map(str, files.write()))
        wrote = [f"wrote {path}" for path in document["files"]]
    answer.add(document)
    answer.say(*str(found).split("\n"), *wrote)


def list_layers(options: argparse.Namespace, answer: Output) -> None:
    """List the layers of a model by the names of their calls for one photo."""
    if len(options.images) > 1:
        raise UsageError(f"layers are listed for one photo, got {len(options.images)}; name one, or none")
    explainer = load_explainer(options, answer)
    photos = [read_photo(each.source_of(name), answer) for name in options.images]
    x = explainer.as_input(*photos or [Image.new("RGB", (256, 256), "gray")])
    with blaming(explainer.name):
        chosen, calls = layers.default_layer(explainer.model, x), layers.list_layers(explainer.model, x)
    for call in calls:
        grid, default = None if call.grid is None else str(call.grid), call.label == chosen
        answer.add({"name": call.label, "kind": call.kind, "shape": list(call.shape), "map": grid, "default": default})
        end = (f"{grid} map" if grid else "") + (" (default)" if default else "")
        answer.say(f"{printable(call.label):<32} {call.kind:<20} {call.shape!s:<24} {end}".rstrip())
