"""The command and the Python code that repeat an explanation, from its record."""

import re
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from explain._utils.errors import ExplainError, printable
from explain.attribution.encoding import decode, method_of, unknown
from explain.attribution.records import ModelOrigin, RecordedRequest
from explain.attribution.result import Attribution
from explain.baselines.base import Baseline
from explain.data.boxes import Box
from explain.methods.base import Method, get_method, options
from explain.targets.outputs import Prediction

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True, eq=False, repr=False)
class Subject(ABC):
    """A photo that was explained; see `explain.Explanation` for each field."""

    photo: Image.Image
    source: str | None
    origin: ModelOrigin
    box: Box
    results: tuple[Mapping[str, Attribution], ...]
    input_size: tuple[int, int]
    question: RecordedRequest
    categories: Sequence[str] | None = None
    probabilities: torch.Tensor | None = None
    crops: tuple[Box, ...] = ()
    explainer: Any = None
    detections: tuple[Prediction, ...] = ()
    boxes: tuple[Prediction | None, ...] = ()

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
    def record(self, method: str | None = None, target: int | str = 0) -> dict[str, Any]: ...


FLAGS = {"categories": "labels"}
ARGUMENTS = (
    *("model", "weights", "categories", "size", "crop", "channels", "mean", "std", "interpolation"),
    *("activation", "unit"),
)
"""The arguments of an `Explainer` that are options of the command line too; `FLAGS` has those of another name there."""

MAX_LABELS = 16  # of a list that Python code writes out


@dataclass(frozen=True)
class Reproduction:
    """How to repeat an explanation. ``command`` is None where it cannot be typed; ``why`` is the reason."""

    python: str
    command: str | None = None
    why: str = ""


def reproduction(subject: Subject) -> Reproduction:
    """Return how to repeat an explanation: exactly, or with comments where something was the caller's own."""
    records = {name: subject.record(name) for name in subject.methods}
    specs = {name: _spec(record) for name, record in records.items()}
    arguments = {
        name: value
        for name, value in subject.origin.arguments.items()
        if name in ARGUMENTS and value is not None and (name, value) != ("crop", "center")
    }
    options = {**_layer_and_fuse(records.values()), "precision": subject.question.precision}
    options = {name: value for name, value in options.items() if value not in (None, "full")}
    is_checked = any(record.get("verdict") is not None for record in records.values())
    methods = [_method_code(name, spec, records[name]) for name, spec in specs.items()]
    python = _python(subject, arguments, methods, options, is_checked)
    reasons = [f"the {part} was your own" for part in subject.origin.own]
    reasons += [f"{name} was made with options that cannot be typed" for name, spec in specs.items() if spec is None]
    if any(subject.question.target(index) is not None for index in range(len(subject.results))):
        reasons.append("a target was an object")
    if isinstance(arguments.get("categories"), list):
        reasons.append("the labels were a list")
    if not subject.source:
        reasons.append("the photo had no file")
    if reasons:
        return Reproduction(python, None, "; ".join(dict.fromkeys(reasons)))
    return Reproduction(python, _command(subject, arguments, specs.values(), options, is_checked))


def _command(
    subject: Subject,
    arguments: Mapping[str, Any],
    specs: Iterable[str | None],
    options: Mapping[str, Any],
    is_checked: bool,
) -> str:
    source = str(subject.source)
    words = ["explain", f"./{source}" if source.startswith("-") else source]
    for name, value in arguments.items():
        text = ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
        words += [f"--{FLAGS.get(name, name)}", text]
    for spec in specs:
        words += ["--method", str(spec)]
    for result in subject.results:
        category = next(iter(result.values())).target
        if isinstance(category, torch.Tensor):
            words += ["--target", str(int(category[0]))]
    layer = options.get("layer", [])
    for name in [layer] if isinstance(layer, str) else layer:
        words += ["--layer", name]
    if "fuse" in options:
        words += ["--fuse", options["fuse"]]
    if is_checked:
        words.append("--check")
    if "precision" in options:
        words.append("--bf16")
    return shlex.join([*words, "--html"])


def _python(
    subject: Subject,
    arguments: Mapping[str, Any],
    methods: Sequence[str],
    options: Mapping[str, Any],
    is_checked: bool,
) -> str:
    own = {part: subject.origin.name if part == "model" else "own" for part in subject.origin.own}
    codes = {"model": repr(subject.origin.name)}
    codes |= {name: repr(value) for name, value in arguments.items()}
    labels = arguments.get("categories")
    if isinstance(labels, list) and len(labels) > MAX_LABELS:
        own["categories"] = f"{len(labels)} labels"
    codes |= {name: name for name in own}
    targets = [_target_code(subject, index) for index in range(len(subject.results))]
    stem = Path(subject.source).stem if subject.source else "report"
    return _template().render(
        source=repr(subject.source) if subject.source else "",
        own=own,
        arguments=[codes.pop("model"), *(f"{name}={code}" for name, code in codes.items())],
        methods=methods,
        target=f"target={targets[0]}" if len(targets) == 1 else f"targets=[{', '.join(targets)}]",
        labels=map(printable, subject.targets),
        options={name: repr(value) for name, value in options.items()},
        is_checked=is_checked,
        is_incomplete=any("your_" in code for code in (*methods, *targets)),
        html=repr(f"{stem}.html"),
    )


@cache
def _template() -> "Template":
    from jinja2 import Environment, PackageLoader

    return Environment(loader=PackageLoader("explain.report", "static")).get_template("repeat.txt")


def _layer_and_fuse(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The layer argument, and how several layers were fused.

    The layer is left out where methods had different layers, or where it would move a method that had none.
    """
    layers = []
    fuses = set()
    for record in records:
        if record["layer"] is not None:
            layers.append(record["layer"])
            fuses.add(record.get("fuse"))
        else:
            with suppress(ExplainError):  # a method of the caller's own
                if method_of(record).layer_optional:
                    return {}
    if not layers or any(layer != layers[0] for layer in layers):
        return {}
    fuse = fuses.pop() if len(fuses) == 1 and isinstance(layers[0], list) else None
    return {"layer": layers[0], "fuse": fuse}


def _spec(record: Mapping[str, Any]) -> str | None:
    """A method as it is typed on the command line, as "rise(samples=500)"; None where it cannot be."""
    with suppress(ExplainError, RuntimeError, ValueError):  # also of options that are tensors: none can be compared
        method = method_of(record)
        text = _value_spec(method)
        return text if get_method(text) == method else None
    return None


def _value_spec(value: Any) -> str:
    """An option as it is typed; a ValueError where it cannot be."""
    if isinstance(value, Method):
        defaults = options(get_method(value.name))
        others: list[str] = []
        inner: list[str] = []  # a wrapper's method is written first, without the name of the option
        for name, each in options(value).items():
            if "(" in value.name and isinstance(each, Method):
                inner.append(_value_spec(each))
            elif name not in defaults or defaults[name] != each:
                others.append(f"{name}={_value_spec(each)}")
        return f"{value.name.split('(')[0]}({', '.join(inner + others)})" if inner or others else value.name
    if isinstance(value, Baseline):
        return value.name
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_value_spec, value))},)"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    raise ValueError


def _method_code(name: str, spec: str | None, record: Mapping[str, Any]) -> str:
    if spec is not None:
        return repr(spec)
    if record.get("class") is None or unknown(record["options"]):
        return "your_" + re.sub(r"\W", "_", name)
    return _code(method_of(record))


def _target_code(subject: Subject, index: int) -> str:
    encoded = subject.question.target(index)
    if encoded is None:
        category = next(iter(subject.results[index].values())).target
        return str(int(category[0])) if isinstance(category, torch.Tensor) else repr(category)
    return "your_target" if unknown(encoded) else _code(decode(encoded))


def _code(value: Any) -> str:
    """A method, a target or one of their options as Python code."""
    if isinstance(value, torch.Tensor):
        return repr(value.tolist()) if value.numel() <= 16 else "your_tensor"
    if isinstance(value, list):
        return f"[{', '.join(map(_code, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_code, value))},)"
    if not is_dataclass(value):
        return repr(value)
    kind = type(value)
    room = ".".join(kind.__module__.split(".")[:2])
    home = room if hasattr(sys.modules[room], kind.__name__) else kind.__module__
    options = [f"{field.name}={_code(getattr(value, field.name))}" for field in fields(value) if field.init]
    return f"{home}.{kind.__name__}({', '.join(options)})"
