"""The options of the command line, and the parsers that are made of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from explain._utils.errors import ExplainError
from explain._utils.spelling import close_to, did_you_mean


class UsageError(ExplainError):
    """The command line cannot be meant as it was typed."""


class Option:
    """An option, or a positional argument where its name has no dashes.

    Args:
        flags: its names, such as "--output -o".
        help: one line about it.
        default: its value where it is not given.
        how: further arguments of argparse's ``add_argument``.
    """

    def __init__(self, flags: str, help: str, default: Any = None, **how: Any) -> None:
        self.flags, self.help, self.default, self.how = tuple(flags.split()), help, default, how
        self.name = self.flags[0].lstrip("-").replace("-", "_")


def _number(
    requirement: str, accepted: Callable[[float], bool], kind: Callable[[str], float] = float
) -> Callable[[str], Any]:
    """A reader of numbers for argparse."""

    def read(text: str) -> Any:
        with suppress(ValueError):
            if accepted(kind(text)):
                return kind(text)
        raise argparse.ArgumentTypeError(f"must be {requirement}, got {text!r}")

    return read


def _numbers(text: str) -> float | list[float]:
    with suppress(ValueError):
        values = [float(part) for part in text.split(",")]
        if len(values) in (1, 3):
            return values[0] if len(values) == 1 else values
    raise argparse.ArgumentTypeError(f"must be a number, or one for each channel as in 0.5,0.4,0.3, got {text!r}")


def _crop(text: str) -> Any:
    if text in CROPS:
        return text
    requirement = f"{', '.join(CROPS)}, or a share above 0 and up to 1"
    try:
        return _number(requirement, lambda share: 0 < share <= 1)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}{_nearest(text, CROPS)}") from None


def _nearest(text: str, known: Iterable[str]) -> str:
    close = close_to(text, known, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


CROPS = ("center", "whole", "five")
FLAG: Any = {"action": "store_true"}
NAMES: Any = {"action": "append", "metavar": "NAME"}
POSITIVE = _number("a number above 0", lambda value: 0 < value < float("inf"))
OPACITY = _number("a number from 0 to 1", lambda value: 0 <= value <= 1)
COUNTED: Any = {"type": _number("a whole number from 1", lambda value: value >= 1, int)}
FROM_ZERO = _number("a whole number from 0", lambda value: value >= 0, int)

# fmt: off
# Of photos, models and methods
IMAGES = Option("images", "photos, and folders of photos", (), nargs="*", metavar="IMAGE")
METHOD = Option("--method -m", "how to explain: a name, also with options as in 'integratedgradients(steps=20)'; "
                "'all' takes each method of fewer than 200 passes, 'everything' takes them all; repeatable (default: "
                "gradcam)", **NAMES)
METRIC = Option("--metric", "judge the maps by a metric; repeatable ('explain metrics' lists them)", **NAMES)
BASELINE = Option("--baseline", "the baseline of covered pixels in methods and metrics that cover some: zero, black, "
                  "mean, blur, noise or neighbours, also with options as in 'blur(sigma=3)' (default: each one's own)",
                  metavar="NAME")
TARGET = Option("--target -t", "label or index to explain; repeatable (default: the top one)", action="append",
                metavar="CLASS")
TOP_K = Option("--top-k", "explain the K best classes", **COUNTED, metavar="K")
LAYER = Option("--layer", "layer to explain at; repeatable (default: the last feature map)", **NAMES)
COMPOSITE = Option("--composite", "the rules of lrp, such as EpsilonPlusFlat or AttnLRP (default: those that suit the "
                   "model)", metavar="NAME")
FUSE = Option("--fuse", "how the maps of several layers become one (default: mean)", choices=["mean", "max", "product"])
MODEL = (
    Option("--model", "efficientnet-lite0 (the default), tiny, tiny-transformer, a torchvision name, timm:NAME, or "
           "your own as package.module:factory", metavar="NAME"),
    Option("--weights", "state dict to load into the model, also as .safetensors", metavar="FILE"),
    Option("--labels", "the labels of the classes, one a line", metavar="FILE"),
    Option("--activation", "what makes probabilities of the model's outputs; none where they are some already "
           "(default: found out)", choices=["softmax", "sigmoid", "none"]),
    Option("--size", "side of the model's input", **COUNTED, metavar="PIXELS"),
    Option("--crop", "the part of a photo that the model sees: center, whole, five, or the share that the centre takes",
           "center", type=_crop, metavar="PART"),
    Option("--mean", "mean of the training data's channels, such as 0.485,0.456,0.406", type=_numbers,
           metavar="NUMBERS"),
    Option("--std", "its standard deviation", type=_numbers, metavar="NUMBERS"),
    Option("--interpolation", "how photos are scaled to that size", choices=["bilinear", "bicubic"]),
    Option("--device", "cpu, cuda, cuda:1, mps, ...", metavar="NAME"),
)
BATCH_SIZE = Option("--batch-size", "inputs at once in methods that run the model many times", **COUNTED, metavar="N")
BUDGET = (
    Option("--samples", "how many perturbed photos methods that estimate run", **COUNTED, metavar="N"),
    Option("--tolerance", "end them when the largest error is at most this share of the largest value", type=POSITIVE,
           metavar="SHARE"),
    Option("--max-seconds", "end each of them after this time", type=POSITIVE, metavar="S"),
)
BF16 = Option("--bf16", "run these in bfloat16", False, **FLAG)
RECURSIVE = Option("--recursive -r", "search the folders inside folders too", False, **FLAG)

# Of results
OUTPUT = Option("--output -o", "where to write (default: explained)", "explained", metavar="FOLDER")
FORCE = Option("--force", "overwrite files that exist", False, **FLAG)
SKIP_EXISTING = Option("--skip-existing", "leave photos out whose results are in the folder already", False, **FLAG)
STYLE = Option("--style", "how maps are drawn on the photo (default: heat for maps of a layer, else each method's own)",
               choices=["heat", "contour", "mask", "spotlight"])
ALPHA = Option("--alpha", "opacity of the heat, 0 to 1 (default: 0.65)", type=OPACITY, metavar="A")
COLORMAP = Option("--colormap", "any colour map of matplotlib", metavar="NAME")
CHECK = Option("--check", "check whether the maps depend on the model and the class, are faithful and stable; the "
               "answers are marks in pictures, and in records", False, **FLAG)
HTML = Option("--html", "write a page for any browser too, and one with all photos where there are several", False,
              **FLAG)
JSON = Option("--json", "print one JSON document instead of lines", False, **FLAG)
COUNT = Option("--count -k", "how many concepts (default: 4)", 4, **COUNTED, metavar="K")
PATTERN = Option("pattern", "which of them: a name, or a pattern as in '*cam*'", nargs="?")

# Of runs
SOURCE = Option("source", "a folder of photos, a list (.csv, .tsv, .json, .jsonl: path, label, x0, y0, x1, y1), or "
                "WebDataset shards (.tar)", nargs="?", metavar="SOURCE")
RUN_OUTPUT = Option("--output -o", "the file of the run, or with --ray the folder; continued if it is there (default: "
                    "run.sqlite)", "run.sqlite", metavar="RUN")
WORKERS = Option("--workers", "processes that read photos ahead (default: one for every two processors)",
                 type=FROM_ZERO, metavar="N")
RAY = Option("--ray", "run on a Ray cluster, into a folder of Parquet files; without ADDRESS, on one on this machine",
             nargs="?", const="", metavar="ADDRESS")
ACTORS = Option("--actors", "with --ray: processes with a model (default: one for each processor or share of a GPU)",
                **COUNTED, metavar="N")
GPUS = Option("--gpus", "with --ray: the share of a GPU that each actor takes (default: none)", type=POSITIVE,
              metavar="SHARE")
PICTURES = Option("--pictures", "draw the maps of some photos: worst:50 (the least probable labels), best:50, or "
                  "source for all", metavar="WHICH")
RUN_FILE = Option("run", "the file of a run", nargs="?", metavar="RUN")
TABLE_FILE = Option("file", "where to write: .parquet, .csv or .jsonl", nargs="?", metavar="FILE")

# Of insight
MAPS_OF = Option("--method -m", "the method of the maps (default: the first of the run)", metavar="NAME")
ROWS = Option("--count -k", "rows of each table (default: 10)", 10, **COUNTED, metavar="K")
PHOTOS_OF = Option("--source", "the source of photos that had no file", metavar="SOURCE")
CHANNELS = Option("--channels", "show what K channels of a layer see, those that do most for --target first", **COUNTED,
                  metavar="K")
SHARED = Option("--concepts", "find K concepts that all photos share", **COUNTED, metavar="K")
CONCEPT_PHOTOS = Option("--examples", "photos that have a concept, at least five: is --target read from it?",
                        metavar="SOURCE")
CLASS = Option("--target -t", "label or index of the class that --channels and --examples are about", metavar="CLASS")
ONE_LAYER = Option("--layer", "the layer of channels and concepts (default: the last feature map)", metavar="NAME")
PICTURES_TO = Option("--output -o", "write pictures, tables and a page into this folder", metavar="FOLDER")

# Of films
PHOTO = Option("photo", "its name in the run, or the end of it", nargs="?", metavar="PHOTO")
IN_RUN = (
    Option("--method -m", "of which method, where the run has several", metavar="NAME"),
    Option("--target -t", "of which label or index, where several were explained", metavar="CLASS"),
)
FILM_OUTPUT = Option("--output -o", "the film, .gif or .webp; a figure is written beside it (default: film.gif)",
                     "film.gif", metavar="FILM")
SECONDS_EACH = Option("--seconds", "how long each map is shown (default: 0.4)", 0.4, type=POSITIVE, metavar="S")

# Of the app
HOST = Option("--host", "the address to listen at; any but this machine's own needs the token that is printed "
              "(default: 127.0.0.1)", "127.0.0.1", metavar="ADDRESS")
PORT = Option("--port", "the port to listen at, 0 for a free one (default: 8000)", 8000, type=FROM_ZERO, metavar="N")
BESIDE = Option("--beside", "another model to choose on the page, as it comes by its name; repeatable", **NAMES)
EXAMPLES = Option("--examples", "a folder with photos to pick from", metavar="FOLDER")
OPEN = Option("--open", "open it in the browser", False, **FLAG)
# fmt: on


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line with a hint."""

    def error(self, message: str) -> NoReturn:
        line = message.removeprefix("argument ").replace(": ", " ", 1)
        raise UsageError(line if "did you mean" in line else f"{line}; {self.prog} --help shows the options")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """List the choices, and suggest the closest."""
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            hint = _nearest(str(value), known)
            raise argparse.ArgumentError(action, f"must be one of {', '.join(known)}, got {value!r}{hint}")


def parser(prog: str, about: str, options: Iterable[Option], epilog: str = "") -> argparse.ArgumentParser:
    """Make a parser; options that were not typed are not in its result."""
    made = _Parser(
        prog=prog,
        description=about,
        epilog=epilog,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option in options:
        made.add_argument(*option.flags, help=option.help, **option.how)
    return made


def read(made: argparse.ArgumentParser, options: Sequence[Option], words: Sequence[str]) -> argparse.Namespace:
    """Return the values of all options, with defaults for those that were not typed; ``given`` names the others.

    Raises:
        UsageError: an option is unknown, or has a value that it does not take.
    """
    end = words.index("--") if "--" in words else len(words)  # what follows are names, whatever they begin with
    found, unknown = made.parse_known_intermixed_args(words[:end])
    if unknown:
        raise UsageError(_unknown(made.prog, unknown[0].split("=")[0], options))
    if words[end + 1 :]:
        names = next((option.name for option in options if option.how.get("nargs") == "*"), None)
        if names is None:
            raise UsageError(_unknown(made.prog, words[end + 1], options))
        setattr(found, names, [*getattr(found, names, ()), *words[end + 1 :]])
    given = frozenset(vars(found))
    for option in options:
        if option.name not in given:
            setattr(found, option.name, option.default)
    found.given = given
    return found


def _unknown(prog: str, name: str, options: Sequence[Option]) -> str:
    known = [flag for option in options for flag in option.flags if flag.startswith("--")]
    guess = did_you_mean(name, known) if name.startswith("--") else ""
    hint = guess if guess.startswith("did you mean") else f"{prog} --help shows the options"
    return f"{'option' if name.startswith('-') else 'argument'} {name!r} is unknown; {hint}"
