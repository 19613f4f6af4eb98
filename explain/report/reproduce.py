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
from explain.data.scans import stem_of
from explain.methods.base import Method, get_method, method_or_unknown
from explain.targets.outputs import Prediction

if TYPE_CHECKING:
    from jinja2 import Template

    from explain.metrics import Verdict


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
    request: Any = None
    detections: tuple[Prediction, ...] = ()
    boxes: tuple[Prediction | None, ...] = ()
    verdicts: "dict[int, Verdict]" = field(default_factory=dict)

    @property
    def methods(self) -> list[str]:
        """The names of the methods."""
        return list(self.results[0])

    @property
    @abstractmethod
    def targets(self) -> list[str]: ...
    @property
    @abstractmethod
    def predicted(self) -> list[Prediction]: ...
    @abstractmethod
    def amount(self, target: int) -> str: ...
    @abstractmethod
    def target_at(self, index: int) -> Any: ...
    @abstractmethod
    def record(self, method: str | None = None, target: int | str = 0) -> dict[str, Any]: ...


FLAGS = {"categories": "labels"}
ARGUMENTS = (
    *("model", "weights", "categories", "size", "crop", "channels", "mean", "std", "interpolation"),
    *("window", "activation", "unit"),
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
    """Return how to repeat an explanation: exactly, or with comments where something was the
    caller's own."""
    origin = subject.origin
    arguments = {
        name: value
        for name, value in origin.arguments.items()
        if name in ARGUMENTS and value is not None
    }
    if arguments.get("crop") == "center":
        del arguments["crop"]
    callers_parts = {part: origin.name if part == "model" else "own" for part in origin.from_caller}
    labels = arguments.get("categories")
    if isinstance(labels, list) and len(labels) > LONG:
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
        "is_bf16": any(attribution.precision == "bf16" for attribution in attributions),
        "is_checked": bool(subject.verdicts),
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
        return Reproduction(python, None, "; ".join(dict.fromkeys(reasons)))
    return Reproduction(python, _template("command.txt").render(values))


@cache
def _template(name: str) -> "Template":
    """A template of commands or code, read once."""
    from jinja2 import Environment, PackageLoader

    templates = Environment(loader=PackageLoader("explain.report", "static"))
    templates.filters |= {"code": repr, "typed": _typed}
    return templates.get_template(name)


def _typed(value: Any) -> str:
    """A value as a shell takes it."""
    return shlex.quote(",".join(map(str, value)) if isinstance(value, tuple | list) else str(value))


def _layer_options(attributions: Sequence[Attribution]) -> dict[str, Any]:
    """The layer argument, and how several layers were fused.

    The layer is left out where methods had different layers, or where it would move a method that
    had none.
    """
    of_layers = [attribution for attribution in attributions if attribution.layer is not None]
    of_pixels = [attribution for attribution in attributions if attribution.layer is None]
    would_move = any(
        method_or_unknown(attribution.method).layer_optional for attribution in of_pixels
    )
    if len({attribution.layer for attribution in of_layers}) != 1 or would_move:
        return {}
    layer = of_layers[0].layer
    if isinstance(layer, str):
        return {"layer": layer}
    fuses = {attribution.fuse for attribution in of_layers}
    return {"layer": list(layer or ()), **({"fuse": fuses.pop()} if len(fuses) == 1 else {})}


def _typed_method(attribution: Attribution) -> str | None:
    """A method as it is typed on the command line, as "rise(samples=500)"; None where it cannot
    be."""
    # also of options that are tensors: none can be compared
    with suppress(ExplainError, ValueError, RuntimeError):
        method = attribution.applied()
        text = spelled_out(method, as_python=False)
        return text if get_method(text) == method else None
    return None


def _method_code(attribution: Attribution, typed: str | None) -> str:
    """A method as Python code: as it is typed, else a call, else a name that stands for the
    caller's own."""
    if typed is not None:
        return repr(typed)
    with suppress(ExplainError, ValueError):
        return spelled_out(attribution.applied(), as_python=True)
    return "your_" + re.sub(r"\W", "_", attribution.method)


def _target_code(subject: Subject, index: int) -> str:
    """A target as Python code: its index, else a call, else a name that stands for the caller's
    own."""
    encoded = subject.asked[index]
    if encoded is None:
        category = next(iter(subject.results[index].values())).target
        return str(int(category[0])) if isinstance(category, torch.Tensor) else repr(category)
    with suppress(ExplainError, ValueError):
        return spelled_out(decode(encoded), as_python=True)
    return "your_target"


def spelled_out(value: Any, *, as_python: bool) -> str:
    """A method, a target or one of their options, without what is as by default: in Python, or as
    it is typed.

    Raises:
        ValueError: it is the caller's own, or cannot be typed.

    >>> from explain.methods import RISE
    >>> (
    ...     spelled_out(RISE(samples=500), as_python=True),
    ...     spelled_out(RISE(samples=500), as_python=False),
    ... )
    ('explain.methods.RISE(samples=500)', 'rise(samples=500)')
    """
    kind = type(value)
    if isinstance(value, tuple | list):
        items = "".join(f"{spelled_out(part, as_python=as_python)}, " for part in value)
        return f"({items.rstrip(' ')})" if kind is tuple else f"[{items.rstrip(', ')}]"
    if is_dataclass(kind):
        options = []
        for field in fields(value):
            option = getattr(value, field.name)
            if field.init and repr(option) != repr(field.default):
                options.append(f"{field.name}={spelled_out(option, as_python=as_python)}")
        return _call(value, as_python, ", ".join(options))
    if as_python and isinstance(value, torch.Tensor):
        return repr(value.tolist()) if value.numel() <= LONG else "your_tensor"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    raise ValueError(f"{name_of_callable(value)} cannot be written")


def _call(value: Any, as_python: bool, options: str) -> str:
    """How a method or another part of this package is made with these options."""
    kind = type(value)
    if as_python:
        room = ".".join(kind.__module__.split(".")[:2])
        if not room.startswith("explain."):
            raise ValueError(f"{kind.__name__} is the caller's own")
        home = room if hasattr(sys.modules[room], kind.__name__) else kind.__module__
        return f"{home}.{kind.__name__}({options})"
    if not isinstance(value, Method | Baseline):
        raise ValueError(f"{kind.__name__} cannot be typed")
    name = value.name.partition("(")[0]
    return f"{name}({options})" if options else name
