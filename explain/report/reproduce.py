"""The command and the Python code that repeat an explanation, from its record."""

import re
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from explain._utils.errors import ExplainError, printable
from explain.attribution.encoding import decode, name_of_callable
from explain.attribution.records import ModelOrigin
from explain.attribution.result import Attribution
from explain.baselines.base import Baseline
from explain.data.boxes import Box
from explain.data.inputs import Inputs
from explain.data.scans import stem_of
from explain.methods.base import Method, get_method, method_or_unknown
from explain.targets.outputs import Prediction

if TYPE_CHECKING:
    from jinja2 import Template

    from explain.metrics import Check


@dataclass(frozen=True, eq=False, repr=False)
class Subject(ABC):
    """A photo that was explained; see `explain.Explanation` for each field."""

    photo: Image.Image
    source: str | None
    origin: ModelOrigin
    box: Box
    results: tuple[Mapping[str, Attribution], ...]
    input_size: tuple[int, int]
    asked: Sequence[Any]
    categories: Sequence[str] | None = None
    probabilities: torch.Tensor | None = None
    crops: tuple[Box, ...] = ()
    explainer: Any = None
    session: Any = None
    detections: tuple[Prediction, ...] = ()
    boxes: tuple[Prediction | None, ...] = ()
    checks: "dict[int, Check]" = field(default_factory=dict)
    of_input: tuple[Mapping[str, Attribution], ...] = ()

    @property
    def methods(self) -> list[str]:
        """The names of the methods, in the order of their maps; all targets have the same."""
        return list(self.results[0])

    @property
    def inputs(self) -> Inputs:
        """What the model gets for the photo."""
        return Inputs((self.explainer.as_input(self.photo),), layout=self.explainer.layout)

    def on_input(self, index: int) -> Mapping[str, Attribution]:
        """The attributions of target number ``index`` by method as the model's input has them: of
        tiles, frames and slices, before they were laid on the photo."""
        return self.of_input[index] if self.crops else self.results[index]

    @property
    @abstractmethod
    def targets(self) -> list[str]:
        """The names of the targets, as people read them, in the order of ``results``."""
        ...

    @property
    @abstractmethod
    def predicted(self) -> list[Prediction]:
        """The predictions that a page lists, the likeliest first."""
        ...

    @abstractmethod
    def amount(self, target: int) -> str:
        """The probability of the target with this index, or its score with the unit, as text."""
        ...

    @abstractmethod
    def target_at(self, index: int) -> Any:
        """The target with this index, as `explain.evaluate` takes it."""
        ...

    @abstractmethod
    def record(self, method: str | None = None, target: int | str = 0) -> dict[str, Any]:
        """The record of one map, as plain values, by its method and target."""
        ...


FLAGS = {"categories": "labels"}
ARGUMENTS = (
    "model",
    "weights",
    "categories",
    "size",
    "crop",
    "channels",
    "mean",
    "std",
    "interpolation",
    "window",
    "activation",
    "unit",
)
"""The arguments of an `Explainer` that are options of the command line too; `FLAGS` has those of
another name there."""

LONG = 16  # labels, or numbers of a tensor, from which on Python code does not write them out


@dataclass(frozen=True)
class Reproduction:
    """How to repeat an explanation. ``command`` is None where it cannot be typed; ``why`` is the
    reason."""

    python: str
    command: str | None = None
    why: str = ""


def reproduction(subject: Subject) -> Reproduction:
    """The Python code and command line that repeat a recorded explanation, from ``repeat.txt`` and
    ``command.txt``. For a caller's own objects, a comment and no command.
    """
    origin = subject.origin
    arguments = {
        name: value
        for name, value in origin.arguments.items()
        if name in ARGUMENTS and value is not None
    }
    if arguments.get("crop") == "center":  # the default
        del arguments["crop"]
    # the parts that code cannot make, with a name or a word that stands for each
    callers_parts = {part: origin.name if part == "model" else "own" for part in origin.from_caller}
    labels = arguments.get("categories")
    if isinstance(labels, list) and len(labels) > LONG:  # more than anybody would read in code
        callers_parts["categories"] = f"{len(labels)} labels"
    attributions = list(subject.results[0].values())
    typed = [_typed_method(attribution) for attribution in attributions]
    values = {
        "source": subject.source,
        "model": origin.name,
        "own": callers_parts,
        "arguments": arguments,
        "flags": FLAGS,
        "typed": typed,
        "methods": list(map(_method_code, attributions, typed)),
        "targets": [_target_code(subject, index) for index in range(len(subject.results))],
        "labels": list(map(printable, subject.targets)),
        "options": _layer_options(attributions),
        "is_checked": bool(subject.checks),
        "html": f"{stem_of(subject.source) if subject.source else 'report'}.html",
    }
    python = _template("repeat.txt").render(values)
    reasons = [f"the {part} was your own" for part in origin.from_caller]
    for attribution, text in zip(attributions, typed, strict=True):
        if text is None:
            reasons.append(f"{attribution.method} was made with options that cannot be typed")
    if any(target is not None for target in subject.asked):
        reasons.append("a target was an object")
    if isinstance(labels, list):
        reasons.append("the labels were a list")
    if not subject.source:
        reasons.append("the photo had no file")
    if reasons:
        return Reproduction(python, command=None, why="; ".join(dict.fromkeys(reasons)))
    return Reproduction(python, _template("command.txt").render(values))


@cache
def _template(name: str) -> "Template":
    """A Jinja template by its file's name, read once. Nothing is escaped: results are code. "code"
    writes a value in Python, "typed" as an argument of a shell.
    """
    from jinja2 import Environment, PackageLoader

    templates = Environment(loader=PackageLoader("explain.report", "static"))
    templates.filters |= {"code": repr, "typed": _typed}
    return templates.get_template(name)


def _typed(value: Any) -> str:
    """A value as one quoted argument of a shell; items of lists and tuples are joined by commas, as
    the options of the command line take them."""
    return shlex.quote(",".join(map(str, value)) if isinstance(value, tuple | list) else str(value))


def _layer_options(attributions: Sequence[Attribution]) -> dict[str, Any]:
    """``layer``, ``fuse`` and ``placement`` to repeat one target's maps. As a call has one layer
    for all methods, none where methods had different ones or one would take it wrongly.
    """
    maps_of_layers = [attribution for attribution in attributions if attribution.layer is not None]
    maps_of_pixels = [attribution for attribution in attributions if attribution.layer is None]
    # the layer of the call would be taken by these too, whose maps are of pixels
    would_move = any(
        method_or_unknown(attribution.method).layer_optional for attribution in maps_of_pixels
    )
    if len({attribution.layer for attribution in maps_of_layers}) != 1 or would_move:
        return {}
    layer = maps_of_layers[0].layer
    fuses = {attribution.fuse for attribution in maps_of_layers}
    options: dict[str, Any] = {"layer": layer if isinstance(layer, str) else list(layer or ())}
    if not isinstance(layer, str) and len(fuses) == 1:
        options["fuse"] = fuses.pop()
    # only maps of photos, of two sides, are placed
    if maps_of_layers[0].placed == "even" and len(maps_of_layers[0].size) == 2:
        options["placement"] = "even"
    return options


def _typed_method(attribution: Attribution) -> str | None:
    """The method of a map as it is typed on the command line, as "rise(samples=500)"; None where
    the text, read again, is not the same method."""
    # RuntimeError and ValueError also come from ``==`` where options are tensors or arrays
    with suppress(ExplainError, ValueError, RuntimeError):
        method = attribution.applied()
        text = spelled_out(method, as_python=False)
        return text if get_method(text) == method else None
    return None


def _method_code(attribution: Attribution, typed: str | None) -> str:
    """The method of a map as Python code: its text from `_typed_method` in quotes, else a call of
    its class, else a name like ``your_method`` that stands for the caller's own."""
    if typed is not None:
        return repr(typed)
    with suppress(ExplainError, ValueError):
        return spelled_out(attribution.applied(), as_python=True)
    return "your_" + re.sub(r"\W", "_", attribution.method)


def _target_code(subject: Subject, index: int) -> str:
    """The target with this index as Python code: the index of its class (or its text), else a call
    of the target's class, else ``your_target`` for an object of the caller's own."""
    encoded = subject.asked[index]
    if encoded is None:
        category = next(iter(subject.results[index].values())).target
        return str(int(category[0])) if isinstance(category, torch.Tensor) else repr(category)
    with suppress(ExplainError, ValueError):
        return spelled_out(decode(encoded), as_python=True)
    return "your_target"


def spelled_out(value: Any, *, as_python: bool) -> str:
    """A method, a target or one of their options as code: in Python, or as it is typed on the
    command line. Options that have their default value are left out."""
    kind = type(value)
    if isinstance(value, tuple | list):
        items = "".join(f"{spelled_out(part, as_python=as_python)}, " for part in value)
        # a tuple keeps its last comma, which a single item needs
        return f"({items.rstrip(' ')})" if kind is tuple else f"[{items.rstrip(', ')}]"
    if is_dataclass(kind):
        options = []
        for field in fields(value):
            option = getattr(value, field.name)
            # by their texts: ``==`` of tensors gives no single answer
            if field.init and repr(option) != repr(field.default):
                options.append(f"{field.name}={spelled_out(option, as_python=as_python)}")
        return _call(value, as_python, ", ".join(options))
    if as_python and isinstance(value, torch.Tensor):
        return repr(value.tolist()) if value.numel() <= LONG else "your_tensor"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    raise ValueError(f"{name_of_callable(value)} cannot be written")


def _call(value: Any, as_python: bool, options: str) -> str:
    """The text of a call that makes ``value``, a method, target or other dataclass of this package;
    ``options`` is the text between its brackets.
    """
    kind = type(value)
    if as_python:
        subpackage = ".".join(kind.__module__.split(".")[:2])
        if not subpackage.startswith("explain."):
            raise ValueError(f"{kind.__name__} is the caller's own")
        import_path = (
            subpackage if hasattr(sys.modules[subpackage], kind.__name__) else kind.__module__
        )
        return f"{import_path}.{kind.__name__}({options})"
    if not isinstance(value, Method | Baseline):
        raise ValueError(f"{kind.__name__} cannot be typed")
    name = value.name.partition("(")[0]
    return f"{name}({options})" if options else name
