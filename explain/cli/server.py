"""`explain serve`: the app in the browser."""

from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from explain.cli.answers import asker_of
from explain.cli.commands import UsageError, commands, model_options, models, option
from explain.cli.output import Output
from explain.cli.several import load_explainer

MOST_EXAMPLES = 12


@commands.command("serve", epilog="Example: explain serve --model resnet50")
@model_options()
@option(
    "--beside NAME",
    "another model, by its name, to choose on the page; repeatable",
    multiple=True,
    shell_complete=models,
)
@option(
    "--answers NAME",
    "an image-text model to ask questions about photos: a folder, owner/name or your own code",
)
@option(
    "--host ADDRESS",
    "the address to listen at; any but this machine's own needs the token that is printed",
    default="127.0.0.1",
)
@option(
    "--port N",
    "the port to listen at, 0 for a free one",
    type=click.IntRange(0, 65535),
    default=8000,
)
@option("--examples FOLDER", "a folder with photos to pick from")
@option("--open", "open it in the browser")
@click.pass_obj
def serve(
    answer: Output,
    /,
    beside: tuple[str, ...],
    answers: str | None,
    host: str,
    port: int,
    examples: str | None,
    open: bool,
    **model: Any,
) -> None:
    """Start the app: explain photos in the browser."""
    import webbrowser

    from explain.app import application
    from explain.app.service import Service
    from explain.app.web import access_for, address, bound, listen

    photos = _photos_of(examples)
    access = access_for(host)
    explainers = [load_explainer(answer, **model)]
    explainers += [load_explainer(answer, model=name, device=model["device"]) for name in beside]
    asker = None
    if answers is not None:
        # as options of a command with --ask
        options = SimpleNamespace(model=answers, device=model["device"], batch_size=None)
        asker = asker_of(options, answer)
    with closing(Service(explainers, examples=photos, asker=asker)) as service:
        app = application(service, access)
        with bound(host, port) as socket:
            url = address(host, socket.getsockname()[1], access.token)

            def begin() -> None:
                """Print the address of the app, and open it with --open."""
                names = ", ".join(explainer.name for explainer in explainers)
                answer.say_all([f"{names}: {url}", "Ctrl-C ends it."])
                answer.flush()
                if open:
                    webbrowser.open(url)

            service.prepare()  # in threads: the first photo is then as fast as the others
            with suppress(KeyboardInterrupt):
                listen(app, socket, begin)


def _photos_of(folder: str | None) -> dict[str, Path]:
    """Return the first `MOST_EXAMPLES` photos of the folder that --examples names, paths by file
    names, which the app offers to pick from; empty without the option."""
    if folder is None:
        return {}
    from explain.data.opening import photos_in

    if not Path(folder).is_dir():
        raise UsageError(
            f"--examples must be a folder of photos, got {folder!r}; name one, or leave it out"
        )
    names = [name for name, problem in photos_in(folder, recursive=False) if problem is None]
    return {name: Path(folder, name) for name in names[:MOST_EXAMPLES]}
