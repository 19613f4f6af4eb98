"""The command and the Python code that repeat an explanation, from its record."""

import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


_SAME = ("model", "weights", "size", "crop", "mean", "std", "interpolation", "activation", "unit")
FLAGS = {name: name for name in _SAME}
FLAGS["categories"] = "labels"
"""The arguments of an `Explainer` that are options of the command line too, and their names there."""

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
    targets = [subject.question.target(index) for index in range(len(subject.results))]
    reasons = [
        *(f"the {part} was your own" for part in subject.origin.own),
        *(f"{name} was made with options that cannot be typed" for name, spec in specs.items() if spec is None),
        *(["a target was an object"] if any(each is not None for each in targets) else []),
        *(["the number of channels was given"] if "channels" in _explainer_arguments(subject) else []),
        *(["the labels were a list"] if isinstance(subject.origin.arguments.get("categories"), list) else []),
        *([] if subject.source else ["the photo had no file"]),
    ]
    python = _python(subject, records, specs)
    if reasons:
        return Reproduction(python, None, "; ".join(dict.fromkeys(reasons)))
    return Reproduction(python, _command(subject, records, [spec for spec in specs.values() if spec is not None]))


def _command(subject: Subject, records: Mapping[str, Any], specs: Iterable[str]) -> str:
    source = str(subject.source)
    words = ["explain", f"./{source}" if source.startswith("-") else source]
    for name, value in _explainer_arguments(subject).items():
        words += [f"--{FLAGS[name]}", ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)]
    for spec in specs:
        words += ["--method", spec]
    for result in subject.results:
        category = next(iter(result.values())).target
        words += ["--target", str(int(category[0]))] if isinstance(category, torch.Tensor) else []
    layer, fuse = _layer_and_fuse(records)
    for name in [layer] if isinstance(layer, str) else layer or []:
        words += ["--layer", name]
    words += ["--fuse", fuse] if fuse else []
    words += ["--check"] if _is_checked(records) else []
    words += ["--bf16"] if subject.question.precision != "full" else []
    return shlex.join([*words, "--html"])


def _python(subject: Subject, records: Mapping[str, Any], specs: Mapping[str, str | None]) -> str:
    arguments = _explainer_arguments(subject)
    labels = arguments.get("categories")
    is_long = isinstance(labels, list) and len(labels) > MAX_LABELS
    named = {name: repr(value) for name, value in arguments.items() if name != "model"}
    if is_long:
        named["categories"] = "categories"
    made = [f"{name}={value}" for name, value in named.items()]
    own = [part for part in subject.origin.own if part != "model"]
    has_own_model = "model" in subject.origin.own
    model = "model" if has_own_model else repr(arguments.get("model", subject.origin.name))
    lines = ["import explain", ""]
    lines += [f"model = ...  # your {subject.origin.name}"] if has_own_model else []
    lines += [f"{part} = ...  # your own" for part in own]
    lines += [f"categories = ...  # your {len(labels)} labels"] if labels and is_long else []
    lines.append(f"explainer = explain.Explainer({', '.join([model, *made, *(f'{part}={part}' for part in own)])})")
    targets = [_target_code(subject, index) for index in range(len(subject.results))]
    target = f"target={targets[0]}" if len(targets) == 1 else f"targets=[{', '.join(targets)}]"
    methods = [_method_code(name, spec, records[name]) for name, spec in specs.items()]
    layer, fuse = _layer_and_fuse(records)
    lines += [
        "explanation = explainer(",
        f"    {repr(subject.source) if subject.source else 'photo'},",
        f"    methods=[{', '.join(methods)}],",
        f"    {target},  # {', '.join(map(printable, subject.targets))}",
        *([f"    layer={layer!r},"] if layer else []),
        *([f"    fuse={fuse!r},"] if fuse else []),
        *([f"    precision={subject.question.precision!r},"] if subject.question.precision != "full" else []),
        ")",
        *(["explanation.check()"] if _is_checked(records) else []),
        f"explanation.to_html({(Path(subject.source).stem if subject.source else 'report') + '.html'!r})",
    ]
    if not subject.source:
        lines.insert(2, "photo = ...  # the photo had no file")
    if any("your_" in line for line in lines):
        lines.insert(2, "# your_...: an object of your own, which records do not hold")
    return "\n".join(lines)


def _explainer_arguments(subject: Subject) -> dict[str, Any]:
    """The arguments that load the model again, without those that have their default."""
    return {
        name: value
        for name, value in subject.origin.arguments.items()
        if name in (*FLAGS, "channels") and value is not None and (name, value) != ("crop", "center")
    }


def _is_checked(records: Mapping[str, Any]) -> bool:
    return any(record.get("verdict") is not None for record in records.values())


def _layer_and_fuse(records: Mapping[str, Any]) -> tuple[str | list[str] | None, str | None]:
    """The layer argument, and how several layers were fused.

    The layer is None where methods had different layers, or where it would move a method that had none.
    """
    for record in records.values():
        with suppress(ExplainError):
            if record["layer"] is None and method_of(record).layer_optional:
                return None, None
    layers = [record["layer"] for record in records.values() if record["layer"] is not None]
    if not layers or any(each != layers[0] for each in layers):
        return None, None
    fuses = {record.get("fuse") for record in records.values()} - {None}
    return layers[0], fuses.pop() if len(fuses) == 1 and isinstance(layers[0], list) else None


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
        inner, others = [], []  # a wrapper's method is written first, without the name of the option
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
        return "your_" + "".join(letter if letter.isalnum() else "_" for letter in name)
    return _call_code("explain.methods", record)


def _target_code(subject: Subject, index: int) -> str:
    encoded = subject.question.target(index)
    if encoded is None:
        category = next(iter(subject.results[index].values())).target
        return str(int(category[0])) if isinstance(category, torch.Tensor) else repr(category)
    return "your_target" if unknown(encoded) else _code(encoded)


def _code(value: Any) -> str:
    """An encoded value as Python code."""
    if isinstance(value, list):
        return f"[{', '.join(map(_code, value))}]"
    if isinstance(value, Mapping):
        if "class" in value:
            return _call_code("explain.targets", value)
        if "tuple" in value:
            return f"({', '.join(map(_code, value['tuple']))},)"
        if "category" in value:
            return str(value["category"])
    found = decode(value)
    if isinstance(found, torch.Tensor):
        return repr(found.tolist()) if found.numel() <= 16 else "your_tensor"
    return repr(found)


def _call_code(module: str, encoded: Mapping[str, Any]) -> str:
    options = ", ".join(f"{name}={_code(value)}" for name, value in encoded["options"].items())
    return f"{module}.{encoded['class']}({options})"
