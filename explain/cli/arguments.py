"""The options of the command line: what each is called and takes, and the parsers that are made of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from explain._utils.errors import ExplainError
from explain._utils.spelling import close_to, did_you_mean


class UsageError(ExplainError):
    """The command line was typed in a way that cannot be meant."""


@dataclass(frozen=True)
class Option:
    """An option, or, where its name has no dashes, a place for names without one.

    ``default`` is its value where it is not given; ``how`` has further arguments for argparse.
    """

    flags: tuple[str, ...]
    help: str
    default: Any = None
    how: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What its value is called among the options."""
        return self.flags[0].lstrip("-").replace("-", "_")


def _count(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least}, got {text!r}")
    return int(text)


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _opacity(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, got {text!r}")
    return value


def _numbers(text: str) -> float | list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (1, 3):
        raise argparse.ArgumentTypeError(f"must be a number, or one for each channel as in 0.5,0.4,0.3, got {text!r}")
    return values[0] if len(values) == 1 else values


def _crop(text: str) -> str | float:
    if text in CROPS:
        return text
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(
            f"must be {', '.join(CROPS)}, or a share above 0 and up to 1, got {text!r}{_nearest(text, CROPS)}"
        )
    return share


def _nearest(text: str, known: Iterable[str]) -> str:
    close = close_to(text, known, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _many(metavar: str) -> dict[str, Any]:
    return {"action": "append", "metavar": metavar}


_NUMBERS: Mapping[str, Any] = {"type": _numbers, "metavar": "NUMBERS"}
_FLAG: Mapping[str, Any] = {"action": "store_true"}
CROPS = ("center", "whole", "five")

IMAGES = Option(
    ("images",), "photos, and folders of photos", default=(), how={"nargs": "*", "metavar": "IMAGE"}
)  # fmt: skip
METHOD = Option(
    ("--method", "-m"),
    "how to explain: a name, also with options as in 'integratedgradients(steps=20)'; 'all' takes each method of fewer "
    "than 200 passes, 'everything' takes them all; repeatable (default: gradcam)",
    how=_many("NAME"),
)  # fmt: skip
METRIC = Option(
    ("--metric",), "judge the maps by a metric; repeatable ('explain metrics' lists them)", how=_many("NAME")
)  # fmt: skip
FILL = Option(
    ("--baseline",),
    "what takes the place of covered pixels in methods and metrics that cover some: zero, black, mean, blur, noise or "
    "neighbours, also with options as in 'blur(sigma=3)' (default: each one's own)",
    how={"metavar": "NAME"},
)  # fmt: skip
TARGET = Option(("--target", "-t"), "label or index to explain; repeatable (default: the top one)", how=_many("CLASS"))
TOP_K = Option(("--top-k",), "explain the K best classes", how={"type": _count, "metavar": "K"})
LAYER = Option(("--layer",), "layer to look at; repeatable (default: the last feature map)", how=_many("NAME"))
COMPOSITE = Option(
    ("--composite",), "the rules of lrp, such as EpsilonPlusFlat or AttnLRP (default: those that suit the model)",
    how={"metavar": "NAME"},
)  # fmt: skip
FUSE = Option(
    ("--fuse",), "how the maps of several layers become one (default: mean)",
    how={"choices": ["mean", "max", "product"]},
)  # fmt: skip
MODEL = (
    Option(
        ("--model",),
        "efficientnet-lite0 (the default), tiny, tiny-transformer, a torchvision name, timm:NAME, or your own as "
        "package.module:factory",
        how={"metavar": "NAME"},
    ),
    Option(("--weights",), "state dict to load into the model, also as .safetensors", how={"metavar": "FILE"}),
    Option(("--labels",), "the labels of the classes, one a line", how={"metavar": "FILE"}),
    Option(
        ("--activation",), "what makes probabilities of the model's outputs; none where they are some already "
        "(default: found out)", how={"choices": ["softmax", "sigmoid", "none"]},
    ),
    Option(("--size",), "side of the model's input", how={"type": _count, "metavar": "PIXELS"}),
    Option(
        ("--crop",), "the part of a photo that the model sees: center, whole, five, or the share that the centre takes",
        default="center", how={"type": _crop, "metavar": "PART"},
    ),
    Option(("--mean",), "mean of the training data's channels, such as 0.485,0.456,0.406", how=_NUMBERS),
    Option(("--std",), "its standard deviation", how=_NUMBERS),
    Option(("--interpolation",), "how photos are scaled to that size", how={"choices": ["bilinear", "bicubic"]}),
    Option(("--device",), "cpu, cuda, cuda:1, mps, ...", how={"metavar": "NAME"}),
)  # fmt: skip
BATCH_SIZE = Option(
    ("--batch-size",), "inputs at once in methods that run the model many times", how={"type": _count, "metavar": "N"}
)  # fmt: skip
BUDGET = (
    Option(
        ("--samples",), "how many altered photos methods that estimate run", how={"type": _count, "metavar": "N"}
    ),
    Option(
        ("--tolerance",), "end them when the largest error is at most this share of the largest value",
        how={"type": _above_zero, "metavar": "SHARE"},
    ),
    Option(("--max-seconds",), "end each of them after this time", how={"type": _above_zero, "metavar": "S"}),
)  # fmt: skip
BF16 = Option(("--bf16",), "run these in bfloat16", default=False, how=_FLAG)
OUTPUT = Option(("--output", "-o"), "where to write (default: explained)", "explained", how={"metavar": "FOLDER"})
FORCE = Option(("--force",), "overwrite files that are there", default=False, how=_FLAG)
SKIP_EXISTING = Option(
    ("--skip-existing",), "leave photos out whose results are in the folder already", default=False, how=_FLAG
)  # fmt: skip
STYLE = Option(
    ("--style",), "how maps are drawn on the photo (default: heat for maps of a layer, else each method's own)",
    how={"choices": ["heat", "contour", "mask", "spotlight"]},
)  # fmt: skip
ALPHA = Option(("--alpha",), "opacity of the heat, 0 to 1 (default: 0.65)", how={"type": _opacity, "metavar": "A"})
COLORMAP = Option(("--colormap",), "any colour map of matplotlib", how={"metavar": "NAME"})
CHECK = Option(
    ("--check",), "ask whether the maps depend on the model and the class, are faithful and stable; the answers are "
    "marks in pictures, and in records", default=False, how=_FLAG,
)  # fmt: skip
HTML = Option(
    ("--html",), "write a page for any browser too, and one with all photos where there are several", default=False,
    how=_FLAG,
)  # fmt: skip
RECURSIVE = Option(("--recursive", "-r"), "look into the folders inside folders too", default=False, how=_FLAG)
JSON = Option(("--json",), "print one JSON document instead of lines", default=False, how=_FLAG)
COUNT = Option(("--count", "-k"), "how many concepts (default: 4)", 4, how={"type": _count, "metavar": "K"})
PATTERN = Option(("pattern",), "which of them: a name, or a pattern as in '*cam*'", how={"nargs": "?"})
SOURCE = Option(
    ("source",),
    "a folder of photos, a list (.csv, .tsv, .json, .jsonl: path, label, x0, y0, x1, y1), or WebDataset shards (.tar)",
    how={"nargs": "?", "metavar": "SOURCE"},
)  # fmt: skip
RUN_OUTPUT = Option(
    ("--output", "-o"), "the file of the run, or with --ray the folder; continued if it is there (default: run.sqlite)",
    "run.sqlite", how={"metavar": "RUN"},
)  # fmt: skip
WORKERS = Option(
    ("--workers",), "processes that read photos ahead (default: one for every two processors)",
    how={"type": partial(_count, least=0), "metavar": "N"},
)  # fmt: skip
RAY = Option(
    ("--ray",), "run on a Ray cluster, into a folder of Parquet files; without ADDRESS, on one on this machine",
    how={"nargs": "?", "const": "", "metavar": "ADDRESS"},
)  # fmt: skip
ACTORS = Option(
    ("--actors",), "with --ray: processes with a model (default: one for each processor or share of a GPU)",
    how={"type": _count, "metavar": "N"},
)  # fmt: skip
GPUS = Option(
    ("--gpus",), "with --ray: the share of a GPU that each actor takes (default: none)",
    how={"type": _above_zero, "metavar": "SHARE"},
)  # fmt: skip
PICTURES = Option(
    ("--pictures",), "draw the maps of some photos: worst:50 (the least probable labels), best:50, or source for all",
    how={"metavar": "WHICH"},
)  # fmt: skip
HOST = Option(
    ("--host",), "the address to listen at; any but this machine's own needs the token that is printed (default: "
    "127.0.0.1)", "127.0.0.1", how={"metavar": "ADDRESS"},
)  # fmt: skip
PORT = Option(
    ("--port",), "the port to listen at, 0 for a free one (default: 8000)", 8000,
    how={"type": partial(_count, least=0), "metavar": "N"},
)  # fmt: skip
BESIDE = Option(
    ("--beside",), "another model to choose on the page, as it comes by its name; repeatable", how=_many("NAME")
)  # fmt: skip
EXAMPLES = Option(("--examples",), "a folder with photos to pick from", how={"metavar": "FOLDER"})
OPEN = Option(("--open",), "open it in the browser", default=False, how=_FLAG)
RUN_FILE = Option(("run",), "the file of a run", how={"nargs": "?", "metavar": "RUN"})
PHOTO = Option(("photo",), "its name in the run, or the end of it", how={"nargs": "?", "metavar": "PHOTO"})
IN_RUN = (
    Option(("--method", "-m"), "of which method, where the run has several", how={"metavar": "NAME"}),
    Option(("--target", "-t"), "of which label or index, where several were explained", how={"metavar": "CLASS"}),
)
FILM_OUTPUT = Option(
    ("--output", "-o"), "the film, .gif or .webp; a figure is written beside it (default: film.gif)", "film.gif",
    how={"metavar": "FILM"},
)  # fmt: skip
SECONDS_EACH = Option(("--seconds",), "how long each look is shown (default: 0.4)", 0.4,
                      how={"type": _above_zero, "metavar": "S"})  # fmt: skip
FILE = Option(("file",), "where to write: .parquet, .csv or .jsonl", how={"nargs": "?", "metavar": "FILE"})
MAPS_OF = Option(("--method", "-m"), "whose maps (default: the first of the run)", how={"metavar": "NAME"})
ROWS = Option(("--count", "-k"), "rows of each table (default: 10)", 10, how={"type": _count, "metavar": "K"})
PHOTOS_OF = Option(("--source",), "where photos come from that had no file", how={"metavar": "SOURCE"})
CHANNELS = Option(
    ("--channels",), "show what K channels of a layer see, those that do most for --target first",
    how={"type": _count, "metavar": "K"},
)  # fmt: skip
SHARED = Option(("--concepts",), "find K concepts that all photos share", how={"type": _count, "metavar": "K"})
CONCEPT_PHOTOS = Option(
    ("--examples",), "photos that have a concept, at least five: is --target read from it?", how={"metavar": "SOURCE"}
)  # fmt: skip
CLASS = Option(
    ("--target", "-t"), "label or index of the class that --channels and --examples are about",
    how={"metavar": "CLASS"},
)  # fmt: skip
ONE_LAYER = Option(
    ("--layer",), "where channels and concepts are looked for (default: the last feature map)", how={"metavar": "NAME"}
)  # fmt: skip
PICTURES_TO = Option(
    ("--output", "-o"), "write pictures, tables and a page into this folder", how={"metavar": "FOLDER"}
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """One whose complaints are a single line with a hint, and repeat what was typed without obeying it."""

    def error(self, message: str) -> NoReturn:
        told = message.removeprefix("argument ").replace(": ", " ", 1)
        raise UsageError(told if "did you mean" in told else f"{told}; {self.prog} --help shows the options")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Say what may be chosen, and what comes closest."""
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            told = f"must be one of {', '.join(known)}, got {value!r}{_nearest(str(value), known)}"
            raise argparse.ArgumentError(action, told)


def parser(prog: str, about: str, options: Iterable[Option], epilog: str = "") -> argparse.ArgumentParser:
    """Make a parser; options that were not typed are not in what it gives."""
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
    """Return the values of all options, those that were not typed with their defaults; ``given`` names the others.

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
