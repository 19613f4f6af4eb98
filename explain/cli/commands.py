"""The group of all commands, what each of them does beside its own work, and the options that
several share.

Defaults of options come from ``explain.toml``; what cannot be meant is told in one line.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from explain._utils.errors import ExplainError
from explain._utils.plugins import load_plugins
from explain._utils.spelling import close_to, did_you_mean
from explain.cli.output import Output

F = TypeVar("F", bound=Callable[..., Any])
PHOTOS = ""
"""The name of the command `explain PHOTO`, which is meant where no command is named; empty, so that
nobody can type it."""
COUNT = click.IntRange(min=1)
POSITIVE = click.FloatRange(min=0, min_open=True)


class UsageError(ExplainError):
    """The command line cannot be done as it was typed, whatever the photo; the exit code is 2."""


@contextmanager
def as_usage(kinds: type[ExplainError] | tuple[type[ExplainError], ...]) -> Iterator[None]:
    """Turn errors of these kinds within the block into a `UsageError` with the same message: for
    errors that are due to what was typed, so that the exit code is 2."""
    try:
        yield
    except kinds as error:
        raise UsageError(str(error)) from error


def print_help(context: click.Context, option: click.Parameter, is_asked: bool) -> None:
    """Print the help of a command, and end it. With --json, the help is part of the document."""
    if not is_asked or context.resilient_parsing:
        return
    answer: Output = context.obj
    answer.key = "help"
    text = context.get_help()
    answer.add(text, text.splitlines())
    context.exit()


class Command(click.Command):
    """A command, with defaults from a file and errors in one line; ``key`` is what the list of
    results is called in a JSON document.
    """

    def __init__(self, *, key: str = "results", **settings: Any) -> None:
        """Make a command of the command line with an option --help of its own, which goes through
        `Output`; ``key`` names the list of results in the JSON document."""
        super().__init__(**settings)
        self.key = key
        flags = ["-h", "--help"]
        text = "show this help"
        self.params.append(
            click.Option(
                flags,
                is_flag=True,
                is_eager=True,
                expose_value=False,
                help=text,
                callback=print_help,
            )
        )

    @property
    def flags(self) -> dict[str, click.Parameter]:
        """The options of the command by what is typed for each: "--layer", "-t"."""
        return {flag: param for param in self.params for flag in param.opts if flag.startswith("-")}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words after a command's name: click's reading, defaults from a file (with a note
        which), and errors as a one-line `UsageError`.
        """
        if ctx.resilient_parsing:  # a shell asks for completions: nothing may be printed
            return super().parse_args(ctx, args)
        answer: Output = ctx.obj
        answer.key = self.key
        file, ctx.default_map = options_from_file(self)  # from which click takes what is not typed
        try:
            rest = super().parse_args(ctx, args)
        except click.UsageError as error:
            raise self._in_one_line(ctx, file, error) from None
        if ctx.default_map:
            answer.note(f"options from {file}: {', '.join(ctx.default_map)}".replace("_", "-"))
        return rest

    def _in_one_line(
        self, context: click.Context, file: str, error: click.UsageError
    ) -> UsageError:
        """Return click's error about a wrong command line as one line that says what to do; where
        the value came from a file of defaults, the line names the ``file``."""
        line = error.format_message().rstrip(".")
        param = getattr(error, "param", None)
        if (
            param is not None
            and context.get_parameter_source(param.name) is ParameterSource.DEFAULT_MAP
        ):
            return UsageError(f"{file}: {line}")
        if isinstance(error, click.NoSuchOption):
            # the group of all `commands` knows it as an option of `explain PHOTO`: it is spelt
            # right, but of no use to this command
            if error.option_name in commands.photos.flags:
                return without_effect(error.option_name, f" with {context.command_path}")
            # click's message suggests similar options already
            if error.possibilities:
                return UsageError(line)
        return UsageError(f"{line}; {context.command_path} --help shows the options")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the end of a command's help, the example; before it, in the help of `explain PHOTO`
        (which is that of `explain`), the list of all other commands. Overrides click."""
        if self.name == PHOTOS:
            commands.format_commands(ctx, formatter)
        super().format_epilog(ctx, formatter)


class Commands(click.Group):
    """The group of all commands: the first word may name one; without that, `explain PHOTO` is
    meant. A photo with the name of a command is written with its folder, as "./run".
    """

    command_class = Command

    @property
    def photos(self) -> Command:
        """The command `explain PHOTO`, which is meant where no command is named."""
        command = self.commands[PHOTOS]
        assert isinstance(command, Command)
        return command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands that can be typed, with those of plug-ins, sorted;
        overrides click, which shows them in help and completions."""
        load_plugins()
        return sorted(name for name in self.commands if name != PHOTOS)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put a command before the words where the first is none: `explain cat.jpg` becomes
        `PHOTOS`, --version `version`. One close to a command's name is refused as misspelt.
        """
        words = ["version", *args[1:]] if args[:1] == ["--version"] else args
        # it may be a plug-in's command, which is in the group once plug-ins are loaded; photos,
        # which have endings, need not wait for that
        if words and words[0] not in self.commands and re.fullmatch(r"[a-z][a-z0-9-]*", words[0]):
            load_plugins()
        names = sorted(name for name in self.commands if name != PHOTOS)
        if not words or words[0] not in names:
            if words and not ctx.resilient_parsing:  # while a shell completes a word, it is cut off
                _refuse_misspelt(words[0], names)
            words = [PHOTOS, *words]
        # after "--", click takes all words for arguments: options belong to the command
        return super().parse_args(ctx, ["--", *words])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command's name as messages and help show it ("explain run"), the command, and
        the words after it; overrides click. `parse_args` has put a known name first."""
        name, *rest = args
        return f"explain {name}".rstrip(), self.commands[name], rest


def _refuse_misspelt(word: str, names: list[str]) -> None:
    """Refuse a first word of the command line that is no file, but close to the name of a command;
    it would otherwise be taken for a photo that is missing."""
    if not (word.isascii() and word.isalpha()) or os.path.lexists(word):
        return
    for name in close_to(word, names, 1):
        raise UsageError(
            f"{word!r} is neither a file nor a command; did you mean 'explain {name}'?"
        )


commands = Commands("explain", add_help_option=False)
"""The group itself, which each command is added to."""


def without_effect(flag: str, why: str) -> UsageError:
    """Return the error that refuses an option which would have no effect. ``flag`` is the option as
    typed ("--fuse"); ``why`` goes on from "would have no effect" (" without --pictures")."""
    return UsageError(f"{flag} would have no effect{why}; leave it out")


def is_typed(context: click.Context, name: str) -> bool:
    """Whether an option was typed on the command line, and does not come from its default or from a
    file of defaults. ``name`` is the parameter's: "map_format"."""
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def refuse_without_effect(context: click.Context, name: str, why: str, *, unless: bool) -> None:
    """Refuse an option that was typed (not one from a file of defaults, which serves all commands)
    and has no effect; ``why`` goes on from "would have no effect".
    """
    if not unless and is_typed(context, name):
        raise without_effect(f"--{name.replace('_', '-')}", why)


CONFIGS = {"explain.toml": (), "pyproject.toml": ("tool", "explain")}
"""Files of the current folder that may hold options, and the table that has them."""


def options_from_file(command: Command) -> tuple[str, dict[str, Any]]:
    """The file of defaults (``explain.toml``, or ``[tool.explain]`` in ``pyproject.toml``), ""
    without, and its values as click's ``default_map``: for all commands, then its own table.
    """
    for file, keys in CONFIGS.items():
        table = _table(file, keys)
        values = {key: value for key, value in table.items() if not isinstance(value, dict)}
        values |= table.get(command.name or "explain", {})  # `explain PHOTO` has the name ""
        if values:
            # options of other commands are no mistake: one file serves all
            names = [
                flag.removeprefix("--")
                for any_command in commands.commands.values()
                for flag in any_command.flags  # type: ignore[attr-defined]
                if flag.startswith("--")
            ]
            for key in values:
                if key not in names:
                    raise UsageError(
                        f"{file}: option {key!r} is unknown; {did_you_mean(key, names)}"
                    )
            return file, dict(_defaults(command, values))
    return "", {}


def _table(file: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """Return a table of a TOML file in the current folder as a dictionary; ``keys`` lead to it from
    the top. Without the file or the table, it is empty."""
    if not Path(file).is_file():
        return {}
    import tomllib

    try:
        table = tomllib.loads(Path(file).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} must hold TOML, but {error}; mend it") from None
    for key in keys:
        table = table.get(key, {})
    return table


def _defaults(command: Command, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values of a command's options in a file of defaults. A list for an option of
    one text gives its first entry, a single value for one of several becomes a list.
    """
    for key, value in values.items():
        param = command.flags.get(f"--{key}")
        if param is None or param.name is None:  # an option of other commands
            continue
        if isinstance(value, list) and param.type is click.STRING and not param.multiple:
            value = next(iter(value), None)
        elif param.multiple and not isinstance(value, list):
            value = [value]
        yield param.name, value


# The options that several commands have


def together(options: Sequence[Callable[[Any], Any]]) -> Callable[[F], F]:
    """Return several option decorators of click as one, which shows them in this order in help."""

    def decorate(function: F) -> F:
        """Add all the options to a command's function."""
        for option in reversed(options):  # the lowest decorator acts first
            function = option(function)
        return function

    return decorate


def option(words: str, help: str, **settings: Any) -> Callable[[F], F]:
    """The click decorator of an option, written as help shows it: ``--samples N`` takes a value,
    ``--fuse mean|max`` one of these words, and ``--quiet -q`` is a flag.
    """
    names = [word for word in words.split() if word.startswith("-")]
    values = words.split()[len(names) :]
    if not values:
        settings["is_flag"] = True
    elif "|" in values[0]:
        settings["type"] = click.Choice(values[0].split("|"))
    else:
        settings["metavar"] = values[0]
    if "default" in settings:
        settings["show_default"] = True
    return click.option(*names, help=help, **settings)


def numbers(
    text: Any, kind: Callable[[str], Any] = float, separators: str = ",", *, several: bool = False
) -> Any:
    """The number in a text such as --mean's, or one for each part of it ("0.5,0.4,0.3"), always
    with ``several``; any other text as it is, which `Explainer` takes or refuses.
    """
    try:
        values = tuple(map(kind, re.split(separators, text)))
    except (TypeError, ValueError):  # of a file of defaults, it may be a number already
        return text
    return values if several or len(values) > 1 else values[0]


def _tell_output(context: click.Context, option: click.Parameter, value: bool) -> None:
    """Set --quiet or --verbose in the command's `Output`. A shell that asks for completions has no
    `Output`.
    """
    if context.obj is not None:
        setattr(context.obj, str(option.name), value)


Complete = Callable[[click.Context, click.Parameter, str], list[Any]]
"""Returns what a shell may complete a word with."""


def names_of(kind: str) -> Complete:
    """Return a function for shell completion of names; ``kind`` is "methods" or "metrics". The
    package is imported at the call: the command line must start without it."""

    def complete(context: click.Context, option: click.Parameter, begin: str) -> list[Any]:
        """Return the names that begin as typed."""
        import explain

        names: list[str] = getattr(explain, f"list_{kind}")(f"{begin}*")
        return names

    return complete


def complete_words(*known_words: str) -> Complete:
    """Return a function for shell completion that offers the known words that begin as typed."""
    return lambda context, option, begin: [word for word in known_words if word.startswith(begin)]


models = complete_words(
    "efficientnet-lite0", "tiny", "tiny-transformer", "tiny-clip", "nanodet", "person-segmenter"
)


def _first_word(context: click.Context, argument: click.Parameter, begin: str) -> list[Any]:
    """Return what a shell may complete the first word with: names of commands that begin as typed,
    or otherwise files (as for all later words, since the first was a photo)."""
    may_be_command = begin and not context.params.get("images")
    names = [
        name
        for name in commands.list_commands(context)
        if may_be_command and name.startswith(begin)
    ]
    return names or [CompletionItem(begin, type="file")]


def _at_least_one(
    context: click.Context, argument: click.Parameter, names: tuple[str, ...]
) -> tuple[str, ...]:
    """Refuse an empty list of images."""
    if not names:
        raise click.UsageError("name at least one image", context)
    return names


any_images = click.argument("images", nargs=-1, metavar="[IMAGE]...")
images = click.argument(
    "images", nargs=-1, metavar="IMAGE...", callback=_at_least_one, shell_complete=_first_word
)
run_file = click.argument("run_file", metavar="RUN")
recursive = option("--recursive -r", "search the folders inside folders too")
quiet = option("--quiet -q", "print errors only", expose_value=False, callback=_tell_output)
verbose = option(
    "--verbose -v",
    "print all lines of each of several photos too",
    expose_value=False,
    callback=_tell_output,
)
json = option("--json", "print one JSON document instead of lines", expose_value=False)
force = option("--force", "overwrite files that exist")
method = option(
    "--method -m NAME",
    "how to explain: a name, also with options as in 'integratedgradients(steps=20)'; "
    "'all' takes each method of fewer than 200 passes, 'everything' takes them all; "
    "repeatable",
    multiple=True,
    show_default="gradcam",
    shell_complete=names_of("methods"),
)
method_of_run = option(
    "--method -m NAME", "the method of the maps", show_default="the first of the run"
)
ask = option(
    "--ask TEXT",
    "a question or an instruction for an image-text model, named by --model as a folder or "
    "owner/name; each word of its answer is explained; '' for captioners",
)
answer = option("--answer TEXT", "the answer that is explained", show_default="the model's own")
words = option("--words LIST", "its words to explain, as 'cup, table'", show_default="all")
evidence = option(
    "--evidence",
    "find the smallest parts of each photo that are enough for the answer, and that it "
    "needs (--method sufficient --method necessary)",
)
metric = option(
    "--metric NAME",
    "evaluate the maps by a metric ('explain metrics' lists them); repeatable",
    multiple=True,
    shell_complete=names_of("metrics"),
)
targets = option(
    "--target -t CLASS",
    "label or index to explain (of a detector all its boxes together), 'predicted' or 'all' for a "
    "map of each label or box above a threshold, also 'cup@2' (the second cup that a detector "
    "finds), 'person@320,200' or 'box 120,40,300,380' (in pixels of the photo); repeatable",
    multiple=True,
    show_default="the top one",
)
threshold = option(
    "--threshold SHARE",
    "with --target predicted or all: from which probability on a label or box is explained, or of "
    "one label, as Edema=0.2; repeatable",
    multiple=True,
    show_default="0.5, of boxes 0.35",
)
top_k = option("--top-k K", "explain the K best classes", type=COUNT)
layers = option(
    "--layer NAME",
    "layer to explain at; repeatable",
    multiple=True,
    show_default="the last feature map",
)
layer = option("--layer NAME", "the layer", show_default="the last feature map")
fuse = option(
    "--fuse mean|max|product|sum|stages",
    "how the maps of several layers become one",
    show_default="mean",
)
placement = option(
    "--placement cells|even",
    "where maps of a layer are drawn: each cell where it looks, or all spread evenly",
    show_default="cells",
)
batch_size = option(
    "--batch-size N", "inputs at once in methods that run the model many times", type=COUNT
)
budget = together(
    [
        option("--samples N", "number of perturbed photos, for methods that estimate", type=COUNT),
        option(
            "--tolerance SHARE",
            "stop them when no error is above this share of the peak",
            type=POSITIVE,
        ),
        option("--max-seconds S", "end each of them after this time", type=POSITIVE),
    ]
)
style = option(
    "--style heat|contour|mask|spotlight",
    "how maps are drawn on the photo",
    show_default="heat for maps of a layer, else each method's own",
)


def output(default: str | None, metavar: str, help: str) -> Callable[[F], F]:
    """Return the decorator of --output, by which each command says where it writes, with its own
    default and help text."""
    return option(f"--output -o {metavar}", help, default=default)


MODEL_SETTINGS = (
    "weights",
    "labels",
    "activation",
    "unit",
    "size",
    "crop",
    "channels",
    "mean",
    "std",
    "interpolation",
    "window",
    "bands",
    "device",
)
"""The options that say which model is explained, and how it sees photos, besides its name."""


def model_options(*, several: bool = False, colours: bool = True) -> Callable[[F], F]:
    """The options of the model and of how it sees photos, as one decorator: --model repeatable with
    ``several``, no --channels without ``colours``. Names are as in `MODEL_SETTINGS`.
    """
    of_colours = option(
        "--channels N",
        "1 for a model of photos in grey, 3 for colours, or how many bands images have",
        type=COUNT,
        show_default="by its first convolution",
    )
    repeatable = "; repeatable" if several else ""
    options = [
        option(
            "--model NAME",
            "efficientnet-lite0 (the default), tiny, tiny-transformer, tiny-clip, nanodet, "
            "person-segmenter, a "
            "torchvision name, timm:NAME, or your own as package.module:factory, "
            "./file.py:factory, or a file of "
            f"TorchScript, torch.export (.pt2) or ONNX{repeatable}",
            multiple=several,
            shell_complete=models,
        ),
        option("--weights FILE", "state dict to load into the model, also as .safetensors"),
        option("--labels FILE", "the labels of the classes, or the name of the number, one a line"),
        option(
            "--activation softmax|sigmoid|none",
            (
                "how the model's outputs become probabilities; none if they are some already, or "
                "numbers"
            ),
            show_default="detected",
        ),
        option("--unit TEXT", "the unit of a model's number, as years"),
        option(
            "--size PIXELS",
            "side of the model's input, or its HEIGHTxWIDTH",
            type=lambda text: numbers(text, kind=int, separators="[x×,]"),
        ),
        option(
            "--crop PART",
            "the part of a photo that the model sees: center, whole, or the centre's share",
            type=numbers,
            default="center",
        ),
        *([of_colours] if colours else []),
        option(
            "--mean NUMBERS",
            "mean of the training data's channels, as 0.485,0.456,0.406",
            type=numbers,
        ),
        option("--std NUMBERS", "its standard deviation", type=numbers),
        option("--interpolation bilinear|bicubic", "how photos are scaled to that size"),
        option(
            "--window LEVEL,WIDTH",
            "the values of a scan that are shown from black to white, as 40,400",
            type=numbers,
            show_default="the file's, or by what is there",
        ),
        option(
            "--bands NUMBERS",
            "of images of several bands, which are red, green and blue in pictures, as 4,3,2",
            type=lambda text: numbers(text, kind=int, several=True),
            default="",
            show_default="1,2,3",
        ),
        option("--device NAME", "cpu, cuda, cuda:1, mps, ..."),
    ]
    return together(options)
