"""What else is shown of photos and models: `explain layers`, `inspect`, `concepts`, `trace`."""

from dataclasses import asdict
from typing import Any

import click

from explain._utils.errors import printable
from explain.cli import commands as cli
from explain.cli.commands import COUNT, UsageError, commands, model_options, option
from explain.cli.output import Output, ProgressBar, wrote
from explain.cli.questions import target_of
from explain.cli.several import (
    PhotoResult,
    blaming,
    find_photos,
    for_all,
    load_explainer,
    read_photo,
    takes_whole_files,
)


@commands.command("layers", key="layers", epilog="Example: explain layers --model resnet50")
@cli.any_images
@model_options()
@cli.json
@click.pass_obj
def list_layers(answer: Output, /, images: tuple[str, ...], **model: Any) -> None:
    """List the layers that a model calls for a photo."""
    from PIL import Image

    from explain import layers

    if len(images) > 1:
        raise UsageError(f"layers are listed for one photo, got {len(images)}; name one, or none")
    explainer = load_explainer(answer, **model)
    photo = Image.new("RGB", (256, 256), "gray")  # most models call the same layers for any photo
    if images:
        photo = read_photo(images[0], answer, explainer)
    x = explainer.as_input(photo)
    with blaming(explainer.name):
        chosen = layers.default_layer(explainer.model, x)
        calls = layers.list_layers(explainer.model, x)
    for call in calls:
        grid = None if call.grid is None else str(call.grid)
        is_default = call.label == chosen
        end = (f"{grid} map" if grid else "") + (" (default)" if is_default else "")
        answer.add(
            {
                "name": call.label,
                "kind": call.kind,
                "shape": list(call.shape),
                "map": grid,
                "default": is_default,
            },
            [f"{printable(call.label):<32} {call.kind:<20} {call.shape!s:<24} {end}".rstrip()],
        )


@commands.command(
    "inspect", key="inspected", epilog="Example: explain inspect cat.jpg --model resnet50"
)
@cli.images
@cli.recursive
@model_options()
@cli.json
@click.pass_obj
def inspect(answer: Output, /, images: tuple[str, ...], recursive: bool, **model: Any) -> int:
    """Print the output of every layer for a photo."""
    explainer = load_explainer(answer, **model)
    in_volumes = takes_whole_files(explainer)
    photos = find_photos(images, recursive=recursive, in_volumes=in_volumes)

    def work(path: str, stem: str, bar: ProgressBar) -> PhotoResult:
        """Return the outputs of all layers for one photo, as the lines of `explain inspect`."""
        photo = read_photo(path, answer, explainer)
        with blaming(model["model"]):
            inspection = explainer.inspect(photo)
        lines = str(inspection).splitlines()
        if inspection.first_nonfinite is not None:
            lines.append(f"first NaN or infinity: {inspection.first_nonfinite.name}")
        return PhotoResult(
            {"image": path, "layers": [asdict(row) for row in inspection.rows]}, lines
        )

    return for_all(photos, work, answer, "inspected")


@commands.command("concepts", epilog="Example: explain concepts cat.jpg --count 4")
@cli.images
@cli.recursive
@option("--count -k K", "how many concepts", type=COUNT, default=4)
@cli.layer
@model_options()
@cli.output("explained", "FOLDER", "where to write")
@cli.force
@cli.quiet
@cli.verbose
@cli.json
@click.pass_obj
def draw_concepts(
    answer: Output,
    /,
    images: tuple[str, ...],
    recursive: bool,
    count: int,
    layer: str | None,
    output: str,
    force: bool,
    **model: Any,
) -> int:
    """Draw the concepts that a layer sees in a photo."""
    explainer = load_explainer(answer, **model)
    in_volumes = takes_whole_files(explainer)
    photos = find_photos(images, recursive=recursive, apart_from=output, in_volumes=in_volumes)

    def work(path: str, stem: str, bar: ProgressBar) -> PhotoResult:
        """Find and save the concepts in one photo, as files that begin with ``stem``."""
        photo = read_photo(path, answer, explainer)
        with blaming(model["model"]):
            concepts = explainer.concepts(photo, count, layer=layer)
        files = [str(file) for file in concepts.save(output, stem=stem, overwrite=force)]
        labels = concepts.labels
        document = {
            "image": path,
            "files": files,
            "layer": concepts.concepts.layer,
            "concepts": labels,
        }
        lines = [f"  {line}" for line in [*labels, *wrote(files)]]
        return PhotoResult(document, lines, files, summary=", ".join(labels))

    return for_all(photos, work, answer, "drew", output)


@commands.command(
    "trace", epilog="Example: explain trace cat.jpg cup.jpg --at heads --model tiny-transformer"
)
@cli.images
@option(
    "--at layers|channels|heads|tokens|positions|regions",
    "what is patched one at a time",
    default="layers",
)
@cli.layers
@option(
    "--target -t CLASS", "label or index of the score", show_default="the clean photo's top one"
)
@model_options()
@cli.batch_size
@cli.output(None, "FOLDER", "write the picture into this folder")
@cli.force
@cli.json
@click.pass_obj
def trace(
    answer: Output,
    /,
    images: tuple[str, ...],
    at: Any,
    layer: tuple[str, ...],
    target: str | None,
    batch_size: int | None,
    output: str | None,
    force: bool,
    **model: Any,
) -> None:
    """Find which part of a network tells two photos apart."""
    import explain
    from explain.data.files import Files

    if len(images) != 2:
        raise UsageError(f"two photos must be named, CLEAN and CORRUPTED, got {len(images)}")
    explainer = load_explainer(answer, **model)
    clean, corrupted = (explainer.as_input(read_photo(name, answer, explainer)) for name in images)
    with blaming(model["model"]):
        effects = explain.trace(
            explainer.model,
            clean,
            corrupted,
            at,
            layers=list(layer) or None,
            categories=explainer.categories,
            target=target_of(target),
            batch_size=batch_size,
        )
    document = effects.to_dict()
    lines = str(effects).splitlines()
    if output is not None:
        files = Files(output, overwrite=force)
        files.add_picture("trace.png", effects.picture())
        document["files"] = list(map(str, files.write()))
        lines += wrote(document["files"])
    answer.add(document, lines)
