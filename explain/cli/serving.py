"""`explain serve`: the app, in the browser."""

from __future__ import annotations

import argparse
import webbrowser
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from explain.cli import arguments as args
from explain.cli.arguments import UsageError
from explain.cli.inputs import load_explainer
from explain.cli.output import DONE, Command, Output

if TYPE_CHECKING:
    from explain.explanation.explainer import Explainer

MOST_EXAMPLES = 12
LAST_PORT = 65535


def serve(options: argparse.Namespace, answer: Output) -> int:
    """Listen until an interrupt."""
    from explain.app import application
    from explain.app.service import Service
    from explain.app.serving import access_for, address, bound, listen

    if options.port > LAST_PORT:
        raise UsageError(f"--port must be at most {LAST_PORT}, got {options.port}; 0 takes a free one")
    examples = _examples(options.examples)
    access = access_for(options.host)
    explainers = [load_explainer(options, answer), *_beside(options, answer)]
    with closing(Service(explainers, examples=examples)) as service:
        made = application(service, access)
        with bound(options.host, options.port) as socket:
            url = address(options.host, socket.getsockname()[1], access.token)

            def begun() -> None:
                names = ", ".join(explainer.name for explainer in explainers)
                answer.say(f"{names}: {url}", "Ctrl-C ends it.")
                answer.flush()
                if options.open:
                    webbrowser.open(url)

            service.prepare()
            with suppress(KeyboardInterrupt):
                listen(made, socket, begun)
    return DONE


def _beside(options: argparse.Namespace, answer: Output) -> Iterator[Explainer]:
    """The other models, each with its own labels and preprocessing."""
    own = dict.fromkeys(("labels", "weights", "size", "mean", "std", "interpolation", "activation"))
    for name in options.beside or ():
        yield load_explainer(argparse.Namespace(model=name, crop="center", device=options.device, **own), answer)


def _examples(folder: str | None) -> dict[str, Path]:
    """The photos of a folder by their names, the first few."""
    from explain.data.images import EXTENSIONS

    if folder is None:
        return {}
    if not Path(folder).is_dir():
        raise UsageError(f"--examples must be a folder of photos, got {folder!r}; name one, or leave it out")
    found = sorted(path for path in Path(folder).iterdir() if path.suffix.lower() in EXTENSIONS and path.is_file())
    return {path.name: path for path in found[:MOST_EXAMPLES]}


SERVE = Command(
    "serve", "explain photos in the browser as they are dropped there",
    (*args.MODEL, args.BESIDE, args.HOST, args.PORT, args.EXAMPLES, args.OPEN),
    serve, example="explain serve --model resnet50", needs_images=False,
)  # fmt: skip
