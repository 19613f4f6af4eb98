"""What was saved, read back without a model: the values and the record; and computed again where nothing is missing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import numpy as np
import torch
from PIL import Image

from explain._utils.errors import (
    ArgumentError,
    ExplainError,
    ImageError,
    MethodError,
    ModelError,
    RecordError,
    keywords,
    raised,
    shown,
    warn,
)
from explain.attribution.records import decode, described, digest, is_number, is_size, method_of, unknown, upgraded
from explain.attribution.result import Attribution
from explain.data.images import ImageLike, load_image, opened
from explain.engine.settings import Precision
from explain.explanation.concepts import SavedConcepts
from explain.explanation.explainer import Explainer
from explain.explanation.explanation import Explanation
from explain.methods.base import Fusion, Style
from explain.methods.registry import MethodLike, get_method
from explain.models.timm_models import TIMM
from explain.targets.outputs import Activation
from explain.targets.resolve import TargetLike

MOST = 50_000_000  # bytes of a record; those that hold a baseline have a few millions


@dataclass(frozen=True, eq=False)
class Saved:
    """An attribution that was saved: ``record``, as `Explanation.record` returned it, and the values.

    ``values`` is the raw attribution of the one image, float32: ``(h, w)`` at the layer's resolution, or ``(C, H, W)``.
    ``attribution`` is the same as a batch of one, with its ``heatmap``. A record of an older version is brought up to
    date.
    """

    path: Path
    record: Mapping[str, Any] = field(repr=False)
    values: torch.Tensor = field(repr=False)

    @property
    def method(self) -> str:
        return str(self.record["method"])

    @property
    def label(self) -> str:
        """The label of the target."""
        return str(self.record.get("label", self.record["target"]))

    @cached_property
    def attribution(self) -> Attribution:
        """The values as an attribution, a batch of one."""
        record = self.record
        target, layer, delta = record["target"], record["layer"], record.get("delta")
        about = record.get("values", {})
        return Attribution(
            method=self.method,
            values=self.values[None],
            target=target if isinstance(target, str) else torch.tensor([target]),
            score=torch.tensor([record["score"]]),
            layer=tuple(layer) if isinstance(layer, list) else layer,
            size=tuple(about.get("size", record["input_size"])),
            style=about.get("style") or self._default_style(),
            options={name: _decoded(value) for name, value in record["options"].items()},
            delta=None if delta is None else torch.tensor([delta]),
            fuse=record.get("fuse"),
            input=about.get("input"),
            neutral=torch.tensor([about["neutral"]]) if "neutral" in about else None,
        )

    @property
    def heatmap(self) -> torch.Tensor:
        """``(H, W)`` float32 in [0, 1] at the resolution of the model's input."""
        return self.attribution.heatmap[0]

    def _default_style(self) -> Style:
        """The style of the method, for older records without one."""
        try:
            return get_method(self.method).style
        except MethodError:
            return "heat"

    @keywords()
    def repeat(
        self,
        explainer: Explainer | None = None,
        *,
        image: ImageLike | None = None,
        method: MethodLike | None = None,
        target: TargetLike = None,
    ) -> Explanation:
        """Compute what was saved again, from the same photo.

        Args:
            explainer: the one to use; by default, the record's model is loaded by its name.
            image: the photo, where it was not read from a file or the file has moved.
            method: where it was the caller's own.
            target: where it was a function or object of the caller's own.

        Raises:
            RecordError: something is missing, or is not what it was; the message says all of it.
        """
        record = self.record
        reasons = {
            "explainer": self._why_no_model() if explainer is None else "",
            "image": "the photo had no file" if image is None and not record["image"].get("path") else "",
            "method": self._why_no_method() if method is None else "",
            "target": self._why_no_target() if target is None else "",
        }
        missing = [name for name, reason in reasons.items() if reason]
        if missing:
            names, why = ", ".join(f"{name}=..." for name in missing), "; ".join(filter(None, reasons.values()))
            raise RecordError(f"{self._name} cannot be repeated alone: {why}; use repeat({names})")
        photo = self._photo(image)
        explainer = self._explainer() if explainer is None else explainer
        self._check_explainer(explainer, photo)
        if target is None:
            encoded = record.get("asked")
            target = record["target"] if encoded is None else decode(encoded)
        found = explainer(
            photo,
            [method_of(record) if method is None else method],
            targets=[target],
            layer=record["layer"],
            fuse=record.get("fuse"),
            precision=record.get("precision", "full"),
            **self._stop_options(),
        )
        samples, estimate = found.attributions[found.methods[0]].samples, record.get("estimate")
        if method is None and estimate is not None and samples is not None and samples != estimate["samples"]:
            warn(
                f"{self._name} is of {estimate['samples']} samples, but repeating it took {samples}; values may differ"
            )
        self._warn_of_hooks(found)
        return found

    @property
    def _name(self) -> str:
        return f"record {str(self.path)!r}"

    def _why_no_model(self) -> str:
        """Say why the model cannot be loaded by its record; empty where it can."""
        about = self.record["explainer"]
        reasons = [
            f"the model ({self.record['model']}) was only in memory"
            if part == "model"
            else f"the {part} ({self.record.get(part)}) was the caller's own"
            for part in about["own"]
        ]
        arguments = decode(about["arguments"])
        if not isinstance(arguments, dict):
            raise RecordError(f"{self._name} must hold arguments of an Explainer by name; use repeat(explainer=...)")
        model = str(arguments.get("model") or "")
        if ":" in model and not model.startswith(TIMM):
            reasons.append(f"the model ({model}) is code of the caller's own, which no record may run")
        return " and ".join(reasons)

    def _why_no_method(self) -> str:
        parts = unknown(self.record["options"])
        if parts:
            return f"the method ({self.method}) was made with {', '.join(parts)}, which no record holds"
        try:
            method_of(self.record)
        except RecordError as error:
            return f"the method ({self.method}) cannot be made ({error})"
        return ""

    def _why_no_target(self) -> str:
        parts = unknown(self.record.get("asked"))
        return f"the target ({', '.join(parts)}) was a function or object of the caller's own" if parts else ""

    def _photo(self, image: ImageLike | None) -> Image.Image:
        about = self.record["image"]
        try:
            photo = load_image(about["path"] if image is None else image)
        except ImageError as error:
            raise RecordError(f"{self._name} cannot be repeated: {error}; use repeat(image=...)") from None
        if digest(photo.tobytes()) != about.get("sha256"):
            raise RecordError(
                f"image for {self._name} must have the pixels that were explained, but has others; use "
                "repeat(image=...)"
            )
        photo.filename = about.get("path") or ""  # type: ignore[attr-defined]  # as Pillow does for those that it opens
        return photo

    def _explainer(self) -> Explainer:
        """Load the model by its name, with its weights as they were."""
        arguments = decode(self.record["explainer"]["arguments"])
        try:
            made = Explainer(**arguments)
        except (ArgumentError, ModelError, TypeError, ValueError) as error:
            reason = f"they are refused: {error}" if isinstance(error, ExplainError) else raised(error)
            raise RecordError(
                f"{self._name} must hold arguments of an Explainer, but {reason}; use repeat(explainer=...)"
            ) from None
        expected = self.record.get("preprocess")
        if "size" not in arguments and described(made.preprocess) != expected:
            made = Explainer(**arguments, size=self.record["input_size"][0])  # older records do not have the size
        if described(made.preprocess) != expected:
            raise RecordError(
                f"{self._name} must be repeated with the preprocessing {expected}, but that of "
                f"{arguments['model']} is {described(made.preprocess)}; use repeat(explainer=...)"
            )
        return made

    def _check_explainer(self, explainer: Explainer, photo: Image.Image) -> None:
        """Refuse an explainer with other weights, another activation or another size of input."""
        record, name = self.record, f"explainer for {self._name}"
        weights, before = explainer.weights, record.get("weights")
        # a file is identified by its digest, wherever it is
        digests = {str(each).rpartition(" (sha256 ")[2] for each in (weights, before)}
        if None not in (weights, before) and len(digests) > 1:
            raise RecordError(f"{name} must have the weights {before}, got {weights}; load those")
        activation, before = explainer.activation, record.get("activation")
        if None not in (activation, before) and activation != before:
            raise RecordError(f"{name} must have the activation {before!r}, got {activation!r}; give it the same")
        size, before = list(explainer.as_input(photo).shape[-2:]), list(record["input_size"])
        if size != before:
            sizes = [" x ".join(map(str, each)) for each in (before, size)]
            raise RecordError(f"{name} must take inputs of {sizes[0]}, got {sizes[1]}; give it the same preprocessing")

    def _stop_options(self) -> dict[str, Any]:
        """How to stop a method where it was stopped, if no option of it does: by an interrupt after so many samples."""
        estimate, crops = self.record.get("estimate"), self.record.get("crops")
        if estimate is None or not estimate.get("stopped") or ("samples" in self.record["options"] and not crops):
            return {}

        def stop(done: int, total: int) -> None:
            if done >= estimate["samples"]:
                raise KeyboardInterrupt

        return {"batch_size": 1, "keep_partial": True, "progress": stop}

    def _warn_of_hooks(self, found: Explanation) -> None:
        """Warn where the map is another one, and the caller's hooks were or are on the model.

        Hooks that observe cannot be told from those that alter, so that the values decide.
        """
        before, now = self.record["explainer"].get("hooks", []), list(found.origin.hooks)
        values = found.values.float().cpu()
        if not (before or now) or values.shape != self.values.shape:
            return
        largest = float(self.values.abs().max()) or 1.0
        difference = float((values - self.values).abs().max()) / largest
        if not difference <= 1e-3:
            then, these = (", ".join(names) or "none" for names in (before, now))
            warn(
                f"{self._name} must be repeated with the hooks that it was made with ({then}), got {these}, and the "
                f"map differs by {difference:.3g} of its maximum; put the same hooks on the model, or explain the "
                "photo again"
            )


@keywords()
def load(file: str | os.PathLike[str]) -> Saved | SavedConcepts:
    """Read what `Explanation.save` wrote for one method and target, or `PhotoConcepts.save`, without loading a model.

    Args:
        file: the record (``.json``) or the values (``.npy``); the other file is beside it under the same name. Nothing
        in them is run.

    Returns:
        A `Saved`; of concepts, a `SavedConcepts`.

    Raises:
        RecordError: one of the two files is missing or damaged, they do not belong together, or they were written by a
            later version of this package.

    >>> import explain, tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     explain.explain(Image.new("RGB", (30, 20), "red"), "saliency", target=0).save(folder, stem="red")[1].name
    ...     saved = load(f"{folder}/red-saliency.npy")
    'red-saliency.npy'
    >>> saved.method, saved.record["target"], saved.values.ndim
    ('saliency', 0, 3)
    """
    if not isinstance(file, (str, os.PathLike)):
        raise RecordError(
            f"file must be the path of a record (.json) or of its values (.npy), got {shown(file)}; name one of these"
        )
    path = Path(file)
    if path.is_dir():
        inside = sorted(path.glob("*.json"))
        remedy = f"load one of its records, such as {str(inside[0])!r}" if inside else "it has no record"
        raise RecordError(f"file must be a record (.json) or its values (.npy), got the folder {str(path)!r}; {remedy}")
    if path.suffix not in (".json", ".npy"):
        raise RecordError(f"file must be a record (.json) or its values (.npy), got {str(path)!r}; name one of these")
    stem = path.stem.removesuffix("-vectors") if path.stem.endswith("-concepts-vectors") else path.stem
    path = path.with_name(f"{stem}.json")
    name = f"record {str(path)!r}"
    found = _read_record(path, name)
    if isinstance(found, dict) and found.get("kind") == "concepts":
        arrays = (path.with_suffix(".npy"), path.with_name(f"{path.stem}-vectors.npy"))
        return SavedConcepts.read(path, found, *(torch.from_numpy(_read_values(file)) for file in arrays))
    record = upgraded(found, name)
    values = _read_values(path.with_suffix(".npy"))
    _check_fields(record, name)
    about = record.get("values")
    if about is not None and (list(values.shape) != about["shape"] or digest(values.tobytes()) != about["sha256"]):
        raise RecordError(f"{name} must be beside its values, but they differ; save both again")
    return Saved(path, record, torch.from_numpy(values))


def _read_record(path: Path, name: str) -> Any:
    try:
        with opened(path) as file:
            content = file.read(MOST + 1)
    except OSError as error:
        raise RecordError(f"{name} cannot be read: {error.strerror}; check the path") from None
    if len(content) > MOST:
        raise RecordError(f"{name} must have at most {MOST} bytes; give a record that was saved")
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        raise RecordError(f"{name} must hold JSON, but does not, or is damaged; give a record that was saved") from None


def _read_values(path: Path) -> np.ndarray[Any, Any]:
    try:
        opened(path).close()  # which refuses pipes and devices
        mapped = np.lib.format.open_memmap(path, mode="r")  # a damaged header cannot make it take more than the file
        if mapped.dtype != np.float32:
            raise ValueError(f"got {mapped.dtype}")
        values: np.ndarray[Any, Any] = np.array(mapped)
    except OSError as error:
        raise RecordError(f"values {str(path)!r} cannot be read: {error.strerror or error}; put them there") from None
    except Exception as error:  # the text of a damaged header may break its reader anywhere
        raise RecordError(
            f"values {str(path)!r} must be an array of float32 ({' '.join(str(error).split())[:80]}); save them again"
        ) from None
    return values


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


# The type, the choices or a test of each field that is read; a dot leads into a field, and "?" ends an optional one.
_FIELDS: Mapping[str, Any] = {
    "method": str,
    "options": dict,
    "score": is_number,
    "input_size": is_size,
    "target": lambda value: isinstance(value, str) or (type(value) is int and is_number(value)),
    "layer": lambda value: value is None or isinstance(value, str) or _are_texts(value),
    "image": dict,
    "image.path?": str | None,
    "explainer": dict,
    "explainer.arguments": dict,
    "explainer.own": _are_texts,
    "explainer.hooks?": _are_texts,
    "values?": dict,
    "values.shape": lambda value: isinstance(value, list) and all(type(each) is int and each >= 0 for each in value),
    "values.sha256": str,
    "values.size?": is_size,
    "values.neutral?": is_number,
    "values.style?": (None, *get_args(Style)),
    "delta?": lambda value: value is None or is_number(value),
    "fuse?": (None, *get_args(Fusion)),
    "precision?": get_args(Precision),
    "label?": str,
    "activation?": (None, *get_args(Activation)),
    "verdict?": dict | None,
    "estimate?": lambda value: value is None or (isinstance(value, dict) and type(value.get("samples")) is int),
}


def _check_fields(record: Mapping[str, Any], name: str) -> None:
    """Refuse fields with values that no record has."""
    for field_name, rule in _FIELDS.items():
        *outer, last = field_name.removesuffix("?").split(".")
        inside: Any = record
        for key in outer:
            inside = inside.get(key)
        if inside is None or (field_name.endswith("?") and last not in inside):
            continue
        if last not in inside or not _fits(inside[last], rule):
            got = f"{inside[last]!r:.60}" if last in inside else "none"
            full = ".".join([*outer, last])
            raise RecordError(f"{name} must have another value for {full!r}, got {got}; give a record that was saved")


def _fits(value: Any, rule: Any) -> bool:
    if isinstance(rule, tuple):
        return any(value is each or (isinstance(value, str) and value == each) for each in rule)
    return isinstance(value, rule) if isinstance(rule, type | UnionType) else rule(value)


def _decoded(value: Any) -> Any:
    """An option as it was, or as the record has it, if it was the caller's own or is no longer known."""
    try:
        return decode(value)
    except RecordError:
        return value
