"""What was saved, read back without a model: the values and the record; and computed again where nothing is missing."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, get_args

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
        """What was explained, as people call it."""
        return str(self.record.get("label", self.record["target"]))

    @cached_property
    def attribution(self) -> Attribution:
        """The values with what the record says about them, as a batch of one."""
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
            style=about.get("style") or self._style(),
            options={name: _if_known(value) for name, value in record["options"].items()},
            delta=None if delta is None else torch.tensor([delta]),
            fuse=record.get("fuse"),
            input=about.get("input"),
            neutral=torch.tensor([about["neutral"]]) if "neutral" in about else None,
        )

    @property
    def heatmap(self) -> torch.Tensor:
        """``(H, W)`` float32 in [0, 1] at the resolution of the model's input."""
        return self.attribution.heatmap[0]

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
        missing = {
            "explainer": "" if explainer is not None else self._why_no_model(),
            "image": "" if image is not None or self.record["image"].get("path") else "the photo had no file",
            "method": "" if method is not None else self._why_no_method(),
            "target": "" if target is not None else self._why_no_target(),
        }
        reasons = [reason for reason in missing.values() if reason]
        if reasons:
            names = ", ".join(f"{name}=..." for name, reason in missing.items() if reason)
            raise RecordError(f"{self._name} cannot be repeated alone: {'; '.join(reasons)}; use repeat({names})")
        photo = self._photo(image)
        explainer = self._explainer() if explainer is None else explainer
        self._check(explainer, photo)
        record = self.record
        asked = record.get("asked")
        given = target if target is not None else record["target"] if asked is None else decode(asked)
        found = explainer(
            photo,
            [method_of(record) if method is None else method],
            targets=[given],
            layer=record["layer"],
            fuse=record.get("fuse"),
            precision=record.get("precision", "full"),
            **self._ending(),
        )
        samples, estimate = found.attributions[found.methods[0]].samples, record.get("estimate")
        if method is None and estimate is not None and samples is not None and samples != estimate["samples"]:
            warn(
                f"{self._name} is of {estimate['samples']} samples, but repeating it took {samples}; values may differ"
            )
        self._compare(found)
        return found

    def _ending(self) -> dict[str, Any]:
        """How to stop a method where it was stopped, if it has no option for it: row by row, by an interrupt."""
        estimate = self.record.get("estimate")
        if estimate is None or not estimate.get("stopped") or ("samples" in self.record["options"] and not self._crops):
            return {}

        def end(done: int, total: int) -> None:
            if done >= estimate["samples"]:
                raise KeyboardInterrupt

        return {"batch_size": 1, "keep_partial": True, "progress": end}

    @property
    def _crops(self) -> bool:
        return bool(self.record.get("crops"))

    @property
    def _name(self) -> str:
        return f"record {str(self.path)!r}"

    def _style(self) -> Style:
        """How a method is shown if an older record has only its name."""
        try:
            return get_method(self.method).style
        except MethodError:
            return "heat"

    def _why_no_model(self) -> str:
        about = self.record["explainer"]
        reasons = [self._own_part(part) for part in about["own"]]
        arguments = decode(about["arguments"])
        if not isinstance(arguments, dict):
            raise RecordError(f"{self._name} must hold arguments of an Explainer by name; use repeat(explainer=...)")
        model = str(arguments.get("model") or "")
        if ":" in model and not model.startswith(TIMM):
            reasons.append(f"the model ({model}) is code of the caller's own, which no record may run")
        return " and ".join(reasons)

    def _own_part(self, part: str) -> str:
        if part == "model":
            return f"the model ({self.record['model']}) was only in memory"
        return f"the {part} ({self.record.get(part)}) was the caller's own"

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
            told = f"they are refused: {error}" if isinstance(error, ExplainError) else raised(error)
            raise RecordError(
                f"{self._name} must hold arguments of an Explainer, but {told}; use repeat(explainer=...)"
            ) from None
        size = self.record["input_size"]
        if "size" not in arguments and described(made.preprocess) != self.record.get("preprocess"):
            made = Explainer(**arguments, size=size[0])  # an older record did not say
        if described(made.preprocess) != self.record.get("preprocess"):
            raise RecordError(
                f"{self._name} must be repeated with the preprocessing {self.record.get('preprocess')}, but that of "
                f"{arguments['model']} is {described(made.preprocess)}; use repeat(explainer=...)"
            )
        return made

    def _compare(self, found: Explanation) -> None:
        """Say so where the map is another one, and hooks of the caller's own were or are on the model.

        Hooks that observe cannot be told from those that alter; the values tell.
        """
        before, now = self.record["explainer"].get("hooks", []), list(found.origin.hooks)
        values = found.values.float().cpu()
        if not (before or now) or values.shape != self.values.shape:
            return
        most = float(self.values.abs().max()) or 1.0
        off = float((values - self.values).abs().max()) / most
        if not off <= 1e-3:
            then, these = (", ".join(names) or "none" for names in (before, now))
            warn(
                f"{self._name} must be repeated with the hooks that it was made with ({then}), got {these}, and the "
                f"map differs by {off:.3g} of its maximum; put the same hooks on the model, or explain the photo again"
            )

    def _check(self, explainer: Explainer, photo: Image.Image) -> None:
        """Refuse an explainer with other weights, or another size of input."""
        weights, before = explainer.weights, self.record.get("weights")
        if None not in (weights, before) and _content(str(weights)) != _content(str(before)):
            raise RecordError(f"explainer for {self._name} must have the weights {before}, got {weights}; load those")
        now, then = explainer.activation, self.record.get("activation")
        if None not in (now, then) and now != then:
            raise RecordError(
                f"explainer for {self._name} must have the activation {then!r}, got {now!r}; give it the same"
            )
        size, expected = list(explainer.as_input(photo).shape[-2:]), list(self.record["input_size"])
        if size != expected:
            raise RecordError(
                f"explainer for {self._name} must take inputs of {_by(expected)}, got {_by(size)}; give it the same "
                "preprocessing"
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
        raise RecordError(_not_a_folder(path))
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
        raise RecordError(f"{name} must lie beside the values that it tells of, but they differ; save both again")
    return Saved(path, record, torch.from_numpy(values))


def _not_a_folder(path: Path) -> str:
    inside = sorted(path.glob("*.json"))
    remedy = f"load what is in it, such as {str(inside[0])!r}" if inside else "it holds none"
    return f"file must be a record (.json) or its values (.npy), got the folder {str(path)!r}; {remedy}"


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
        with opened(path) as file:
            shape, by_columns, dtype = _header(file)
            size = os.fstat(file.fileno()).st_size - file.tell()
            if dtype != np.float32 or size != dtype.itemsize * math.prod(shape):  # before there is room for it
                raise ValueError(f"{size} bytes are not {dtype} of shape {shape}")
            values: np.ndarray[Any, Any] = np.frombuffer(bytearray(file.read()), dtype)
            values = values.reshape(shape, order="F" if by_columns else "C")
    except OSError as error:
        raise RecordError(f"values {str(path)!r} cannot be read: {error.strerror or error}; put them there") from None
    except Exception as error:  # the text of a damaged header may break its reader anywhere
        raise RecordError(
            f"values {str(path)!r} must be an array of float32 ({' '.join(str(error).split())[:80]}); save them again"
        ) from None
    return values


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """The shape, the order and the type that a file of NumPy says it holds."""
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"version {version} of the format is unknown")
    found: tuple[tuple[int, ...], bool, np.dtype[Any]] = read(file)
    return found


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


# What the fields of a record are, as far as it is read; a dot leads into a field, and "?" ends one that may be missing.
_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    **{"method": _is(str), "options": _is(dict), "score": is_number, "input_size": is_size},
    **{"target": lambda value: isinstance(value, str) or (type(value) is int and is_number(value))},
    **{"layer": lambda value: _is_text(value) or _are_texts(value), "image": _is(dict), "image.path?": _is_text},
    **{"explainer": _is(dict), "explainer.arguments": _is(dict), "explainer.own": _are_texts},
    **{"explainer.hooks?": _are_texts},
    **{"values?": _is(dict), "values.shape": _is_shape, "values.sha256": _is(str), "values.size?": is_size},
    **{"values.neutral?": is_number},
    **{"values.style?": lambda value: value is None or value in get_args(Style)},
    **{
        "delta?": lambda value: value is None or is_number(value),
        "fuse?": lambda value: value in (None, *get_args(Fusion)),
    },
    **{"precision?": lambda value: value in get_args(Precision), "label?": _is(str)},
    **{"activation?": lambda value: value is None or value in get_args(Activation)},
    **{"verdict?": lambda value: value is None or isinstance(value, dict)},
    **{"estimate?": lambda value: value is None or (isinstance(value, dict) and type(value.get("samples")) is int)},
}


def _check_fields(record: Mapping[str, Any], name: str) -> None:
    """Refuse fields that hold something else than a record does."""
    for field_name, fits in _FIELDS.items():
        *outer, last = field_name.removesuffix("?").split(".")
        inside: Any = record
        for key in outer:
            inside = inside.get(key)
        if inside is None or (field_name.endswith("?") and last not in inside):
            continue  # of what may be missing, all is
        if last not in inside or not fits(inside[last]):
            got = f"{inside[last]!r:.60}" if last in inside else "none"
            whole = ".".join([*outer, last])
            raise RecordError(f"{name} must have another value for {whole!r}, got {got}; give a record that was saved")


def _if_known(value: Any) -> Any:
    """An option as it was, or what the record says of it, if it was the caller's own or is no longer known."""
    try:
        return decode(value)
    except RecordError:
        return value


def _content(weights: str) -> str:
    """What identifies weights: a file's digest, wherever the file is."""
    return weights.rpartition(" (sha256 ")[2]


def _by(size: Any) -> str:
    return " x ".join(map(str, size))
