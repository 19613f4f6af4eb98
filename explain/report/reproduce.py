"""The command and the Python that make an explanation again, from what its record says."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from explain._utils.errors import ExplainError, printable
from explain.attribution.records import decode, method_of, unknown
from explain.baselines.base import Baseline
from explain.methods import Method
from explain.methods.base import options
from explain.methods.registry import get_method
from explain.report.subject import Subject

FLAGS = ("model", "weights", "size", "crop", "mean", "std", "interpolation")
"""The arguments of an `Explainer` that are options of the command line too, under the same names."""


@dataclass(frozen=True)
class Reproduction:
    """How to make a report again. ``command`` is None where it cannot be typed, for the reason ``why``."""

    python: str
    command: str | None = None
    why: str = ""


def again(subject: Subject) -> Reproduction:
    """Say how to make a report again: exactly, or with comments where something was the caller's own."""
    records = {name: subject.record(name) for name in subject.methods}
    methods = {name: _written(record) for name, record in records.items()}
    asked = [subject.question.target(index) for index in range(len(subject.results))]
    reasons = [
        *([f"the {part} was your own" for part in subject.origin.own]),
        *(f"{name} was made with options that cannot be typed" for name, text in methods.items() if text is None),
        *(["a target was an object"] if any(each is not None for each in asked) else []),
        *([] if subject.source else ["the photo had no file"]),
    ]
    python = _python(subject, records, methods, asked)
    if reasons:
        return Reproduction(python, None, "; ".join(dict.fromkeys(reasons)))
    return Reproduction(python, _command(subject, records, [text for text in methods.values() if text is not None]))


def _command(subject: Subject, records: Mapping[str, Any], methods: Sequence[str]) -> str:
    words = ["explain", _path(str(subject.source))]
    for name, value in _arguments(subject).items():
        words += [f"--{name}", ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)]
    for text in methods:
        words += ["--method", text]
    for index in _classes(subject):
        words += ["--target", str(index)]
    layer = _layer(records)
    for name in [layer] if isinstance(layer, str) else layer or []:
        words += ["--layer", name]
    fuse = _common(record.get("fuse") for record in records.values())
    words += ["--fuse", fuse] if fuse and isinstance(layer, list) else []
    words += ["--check"] if _was_checked(records) else []
    words += ["--bf16"] if subject.question.precision == "bf16" else []
    return shlex.join([*words, "--html"])


def _path(source: str) -> str:
    """A path that is not taken for an option."""
    return f"./{source}" if source.startswith("-") else source


def _python(
    subject: Subject, records: Mapping[str, Any], methods: Mapping[str, str | None], asked: Sequence[Any]
) -> str:
    made = [f"{name}={value!r}" for name, value in _arguments(subject).items() if name != "model"]
    own = [part for part in subject.origin.own if part != "model"]
    model = "model" if "model" in subject.origin.own else repr(_arguments(subject).get("model", subject.origin.name))
    lines = ["import explain", ""]
    if subject.origin.own:
        named = [f"model = ...  # your {subject.origin.name}"] if "model" in subject.origin.own else []
        lines += [*named, *(f"{part} = ...  # your own" for part in own)]
    lines.append(f"explainer = explain.Explainer({', '.join([model, *made, *(f'{part}={part}' for part in own)])})")
    targets = [_target(subject, index, each) for index, each in enumerate(asked)]
    given = f"target={targets[0]}" if len(targets) == 1 else f"targets=[{', '.join(targets)}]"
    layer, fuse = _layer(records), _common(record.get("fuse") for record in records.values())
    labels = [printable(label) for label in subject.targets]
    arguments = [
        repr(subject.source) if subject.source else "photo",
        f"methods=[{', '.join(_method(name, text, records[name]) for name, text in methods.items())}]",
        f"{given},  # {', '.join(labels)}",
        *([f"layer={layer!r}"] if layer else []),
        *([f"fuse={fuse!r}"] if fuse and isinstance(layer, list) else []),
        *([f"precision={subject.question.precision!r}"] if subject.question.precision != "full" else []),
    ]
    if not subject.source:
        lines.insert(2, "photo = ...  # the photo had no file")
    stem = Path(subject.source).stem if subject.source else "report"
    inside = "".join(f"    {argument}{'' if '  # ' in argument else ','}\n" for argument in arguments)
    lines += [f"explanation = explainer(\n{inside})", *(["explanation.check()"] if _was_checked(records) else [])]
    lines.append(f"explanation.to_html({stem + '.html'!r})")
    if any("your_" in line for line in lines):
        lines.insert(2, "# what begins with your_ was your own, and no record can hold it")
    return "\n".join(lines)


def _arguments(subject: Subject) -> dict[str, Any]:
    """The arguments that load the model again, without those that are as if they had not been given."""
    plain = {name: value for name, value in subject.origin.arguments.items() if name in FLAGS}
    return {name: value for name, value in plain.items() if value is not None and (name, value) != ("crop", "center")}


def _classes(subject: Subject) -> list[int]:
    chosen = [next(iter(result.values())).target for result in subject.results]
    return [int(each[0]) for each in chosen if isinstance(each, torch.Tensor)]


def _layer(records: Mapping[str, Any]) -> str | list[str] | None:
    """The layer that was named; None where each method found its own, or where naming it would move a method there."""
    moves = [name for name, record in records.items() if record["layer"] is None and _is_movable(record)]
    layers = [record["layer"] for record in records.values() if record["layer"] is not None]
    return None if moves or not layers or any(each != layers[0] for each in layers) else layers[0]


def _is_movable(record: Mapping[str, Any]) -> bool:
    try:
        return method_of(record).layer_optional
    except ExplainError:
        return False


def _was_checked(records: Mapping[str, Any]) -> bool:
    return any(record.get("verdict") is not None for record in records.values())


def _common(values: Any) -> Any:
    found = {value for value in values if value is not None}
    return found.pop() if len(found) == 1 else None


def _written(record: Mapping[str, Any]) -> str | None:
    """A method as it can be typed; None where it cannot."""
    try:
        method = method_of(record)
        text = _as_typed(method)
        return text if text is not None and get_method(text) == method else None
    except (ExplainError, RuntimeError, ValueError):  # options that are tensors cannot be compared
        return None


def _as_typed(method: Method) -> str | None:
    try:
        usual = options(get_method(method.name))
    except ExplainError:
        return None
    wraps = "(" in method.name
    parts: list[str] = []
    for name, value in options(method).items():
        inner = wraps and isinstance(value, Method)
        if name in usual and usual[name] == value and not inner:
            continue
        text = _value(value)
        if text is None:
            return None
        parts.insert(0, text) if inner else parts.append(f"{name}={text}")
    return f"{method.name.split('(')[0]}({', '.join(parts)})" if parts else method.name


def _value(value: Any) -> str | None:
    if isinstance(value, Method):
        return _as_typed(value)
    if isinstance(value, Baseline):
        return value.name
    if isinstance(value, (tuple, list)):
        parts = [_value(each) for each in value]
        return None if None in parts else f"({', '.join(map(str, parts))},)"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else None


def _method(name: str, text: str | None, record: Mapping[str, Any]) -> str:
    if text is not None:
        return repr(text)
    kind = record.get("class")
    if kind is None or unknown(record["options"]):
        return "your_" + "".join(letter if letter.isalnum() else "_" for letter in name)
    inside = ", ".join(f"{option}={_shown(value)}" for option, value in record["options"].items())
    return f"explain.methods.{kind}({inside})"


def _target(subject: Subject, index: int, asked: Any) -> str:
    if asked is None:
        chosen = next(iter(subject.results[index].values())).target
        return str(int(chosen[0])) if isinstance(chosen, torch.Tensor) else repr(chosen)
    return "your_target" if unknown(asked) else _shown(asked)


def _shown(value: Any) -> str:
    """An encoded value as Python."""
    if isinstance(value, Mapping) and "class" in value:
        inside = ", ".join(f"{name}={_shown(each)}" for name, each in value["options"].items())
        return f"explain.targets.{value['class']}({inside})"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, Mapping) and "tuple" in value:
        return f"({', '.join(map(_shown, value['tuple']))},)"
    if isinstance(value, Mapping) and "category" in value:
        return str(value["category"])
    found = decode(value)
    if isinstance(found, torch.Tensor):
        return repr(found.tolist()) if found.numel() <= 16 else "your_tensor"
    return repr(found)
