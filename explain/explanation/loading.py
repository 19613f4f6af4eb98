"""What was saved, read back without a model: the values and the record; computed again; or left as
it still holds."""

import json
import math
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from explain._utils.errors import (
    ExplainError,
    ImageError,
    RecordError,
    keywords,
    raised,
    shown,
    warn,
)
from explain.attribution import records, result
from explain.attribution.encoding import decode, method_of, name_of_callable
from explain.data.bands import as_read
from explain.data.files import restored
from explain.data.images import ImageLike, load_image
from explain.data.opening import open_for_reading
from explain.data.scans import npy_header
from explain.engine import Evidence
from explain.explanation.explainer import Explainer
from explain.explanation.explanation import Explanation
from explain.hooks.interventions import Intervention
from explain.layers.placement import Placement
from explain.methods.base import Method, MethodLike
from explain.methods.evidence import EvidenceSets
from explain.models.files import is_file_or_code
from explain.targets.resolve import TargetLike

TOLERANCE = 1e-3  # share of a map's largest value by which a repeated map may differ


@dataclass(frozen=True, eq=False)
class Saved:
    """An attribution that was saved: what its record says, and the values. ``values`` is the raw
    attribution of the one image, float32: ``(h, w)`` at the layer's resolution, or ``(C, H, W)``.
    ``attribution`` is the same as a batch of one, with its ``heatmap``.
    """

    path: Path
    content: records.Record = field(repr=False)
    values: torch.Tensor = field(repr=False)

    @cached_property
    def record(self) -> Mapping[str, Any]:
        """The record, as `Explanation.record` returned it."""
        return self.content.to_dict()

    @property
    def method(self) -> str:
        return self.content.method

    @property
    def label(self) -> str:
        """The label of the target."""
        return self.content.label

    @cached_property
    def attribution(self) -> result.Attribution:
        """The values as an attribution, a batch of one."""
        record = self.content
        options = dict(record.options)
        sets = None
        if record.sets is not None:
            sets = EvidenceSets.stored(
                self.values, options["reasons"], [vars(region_set) for region_set in record.sets]
            )
        for name, value in options.items():
            # an object of the caller's own, or one that is no longer known, stays encoded
            with suppress(RecordError):
                options[name] = decode(value)
        fields = {name: getattr(record, name) for name in records.FIELDS}
        for name in records.NUMBERS:
            number = getattr(record, name)
            fields[name] = None if number is None else torch.tensor([number])
        target = record.target if isinstance(record.target, str) else torch.tensor([record.target])
        return result.Attribution(
            values=self.values[None],
            target=target,
            options=options,
            sets=sets,
            placement=self._placement,
            **fields,
        )

    @property
    def _placement(self) -> Placement | None:
        """Where the record says that the cells look; None where it says nothing."""
        described = self.content.placement
        if described is None:
            return None
        try:
            return Placement.restored(described)
        except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError):
            raise RecordError(
                f"{self._name} must say where cells look, got {shown(described)}; save it again"
            ) from None

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
        interventions: Sequence[Intervention] | None = None,
    ) -> Explanation:
        """Compute what was saved again, from the same photo.

        Args:
            explainer: the one to use; by default, the record's model is loaded by its name.
            image: the photo, where it was not read from a file or the file has moved.
            method: where it was the caller's own.
            target: where it was a function or object of the caller's own.
            interventions: where one of them held a function or module.

        Raises:
            RecordError: something is missing, or is not what it was; the message says all of it.
        """
        record = self.content
        arguments: dict[str, Any] = {
            "explainer": explainer,
            "image": image,
            "method": method,
            "target": target,
            "interventions": interventions,
        }
        # in this order: the photo is read as the explainer reads it
        recorded: dict[str, Callable[[], Any]] = {
            "explainer": self._explainer,
            "image": lambda: self._image(arguments["explainer"]),
            "method": lambda: method_of(record.method, record.options),
            "target": lambda: record.target if record.asked is None else decode(record.asked),
            "interventions": lambda: decode(record.interventions),
        }
        missing = {}
        for name, read in recorded.items():
            if arguments[name] is None:
                try:
                    arguments[name] = read()
                except (RecordError, ImageError) as error:
                    missing[name] = str(error)
        if missing:
            names = ", ".join(f"{name}=..." for name in missing)
            why = "; ".join(missing.values())
            raise RecordError(f"{self._name} cannot be repeated alone: {why}; use repeat({names})")
        photo = arguments["explainer"].read(arguments["image"])
        if records.size_and_digest(photo) != record.image.pixels:
            raise RecordError(
                f"image for {self._name} must have the pixels that were explained; use "
                "repeat(image=...)"
            )
        photo.filename = record.image.path or ""  # as Pillow does for those that it opens
        explainer = arguments["explainer"]
        self._check_same("preprocessing", record.preprocess, name_of_callable(explainer.preprocess))
        self._check_same("weights", record.weights, explainer.weights)
        self._check_same("activation", record.activation, explainer.activation)
        size = explainer._size(explainer.as_input(photo))
        self._check_same("size of inputs", list(record.input_size), list(size))
        explanation: Explanation = explainer(
            photo,
            [arguments["method"]],
            targets=[arguments["target"]],
            layer=record.layer,
            fuse=record.fuse,
            # an older record says nothing of its cells, which were spread evenly
            placement="even" if record.layer and record.placement is None else "cells",
            interventions=arguments["interventions"],
        )
        if method is None:
            self._warn_of_difference(explanation)
        return explanation

    @property
    def _name(self) -> str:
        """The record in messages, by its path."""
        return f"record {str(self.path)!r}"

    def _image(self, explainer: Explainer | None) -> Any:
        """Read the photo again, from the file that it was read from, as ``explainer`` reads it; all
        of its slices or frames where that is not known."""
        path = self.content.image.path
        if path is None:
            raise RecordError("the photo was not read from a file")
        settings = self.content.explainer.arguments
        keys = ("window", "channels", "bands")
        window, channels, bands = (decode(settings.get(key)) for key in keys)
        stack = explainer is None or explainer.sees_volumes
        return load_image(path, as_read(window, channels, bands or ()), stack=stack)

    def _explainer(self) -> Explainer:
        """Load the record's explainer again: its model by name, with the recorded arguments."""
        origin = self.content.explainer
        reasons_against = [
            f"the {part} ({getattr(self.content, part, None)}) was the caller's own"
            for part in origin.from_caller
        ]
        model = str(origin.arguments.get("model", ""))
        if is_file_or_code(model):
            reasons_against.append(
                f"the model ({model}) is a file or code of the caller's own, which no record may "
                "run"
            )
        if reasons_against:
            raise RecordError(" and ".join(reasons_against))
        arguments = {name: decode(value) for name, value in origin.arguments.items()}
        try:
            return Explainer(**arguments)
        except (TypeError, ValueError) as error:
            got = f"they are refused: {error}" if isinstance(error, ExplainError) else raised(error)
            raise RecordError(f"it must hold arguments of an Explainer, but {got}") from None

    def _check_same(self, what: str, recorded: Any, now: Any) -> None:
        """Refuse an explainer that differs from the recorded one in ``what``; None on either side
        is unknown, and passes. Weights are compared by digest: their file may have moved.
        """
        if recorded is None or now is None:
            return
        # what stands behind the mark of a digest, or all of a text without one
        if str(recorded).rpartition(" (sha256 ")[2] != str(now).rpartition(" (sha256 ")[2]:
            raise RecordError(
                f"explainer for {self._name} must have the {what} {recorded}, got {now}; give the "
                "same"
            )

    def _warn_of_difference(self, explanation: Explanation) -> None:
        """Warn if the repeated map differs from the saved one by more than `TOLERANCE`, and name
        what may be the reason: hooks of the caller's own, or the number of samples."""
        values = explanation.values.float().cpu()
        if values.shape != self.values.shape:
            return
        difference = float((values - self.values).abs().max()) / (
            float(self.values.abs().max()) or 1.0
        )
        if difference <= TOLERANCE:
            return
        estimate = self.content.estimate
        samples = explanation.attributions[explanation.methods[0]].samples
        recorded = f"hooks {', '.join(self.content.explainer.hooks) or 'none'}"
        repeated = f"hooks {', '.join(explanation.origin.hooks) or 'none'}"
        if estimate is not None:
            recorded += f" and {estimate.get('samples')} samples"
            repeated += f" and {samples} samples"
        warn(
            f"{self._name} must be repeated as it was made, with {recorded}, got {repeated}, and "
            f"the map differs by {difference:.3g} of its maximum"
        )


@keywords()
def load(file: str | os.PathLike[str]) -> Saved:
    """Read what `Explanation.save` wrote for one method and target, without loading a model.

    Args:
        file: the record (``.json``) or the values (``.npy``, ``.npz``); the other file is beside it
            under the same name. Nothing in them is run.

    Raises:
        RecordError: one of the two files is missing or damaged, they do not belong together, or
            they were written by a later version of this package.

    >>> import explain, tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     explain.explain(Image.new("RGB", (30, 20), "red"), "saliency", target=0).save(
    ...         folder, stem="red"
    ...     )[1].name
    ...     saved = load(f"{folder}/red-saliency.npy")
    'red-saliency.npy'
    >>> saved.method, saved.record["target"], saved.values.ndim
    ('saliency', 0, 3)
    """
    if not isinstance(file, (str, os.PathLike)):
        raise RecordError(
            f"file must be the path of a record (.json) or of its values (.npy), got {shown(file)}"
        )
    path = Path(file)
    must = "file must be a record (.json) or its values (.npy)"
    if path.is_dir():
        names = sorted(record.name for record in path.glob("*.json"))
        remedy = f"load one of {shown(names, 200)}" if names else "it holds no record"
        raise RecordError(f"{must}, got the folder {str(path)!r}; {remedy}")
    if path.suffix not in (".json", ".npy", ".npz"):
        raise RecordError(f"{must}, got {str(path)!r}; name one of them")
    if path.is_file() and not path.with_suffix(".json").exists():
        raise RecordError(
            f"{must}, got {str(path)!r} without a record beside it; read it with numpy.load"
        )
    path = path.with_suffix(".json")
    return _with_values(path, _read_record(path))


def _with_values(path: Path, record: records.Record) -> Saved:
    """Read the values that lie beside a record."""
    values = _read_values(path.with_suffix(f".{record.values.format}"), record.values)
    if not record.values.are(values):
        raise RecordError(
            f"record {str(path)!r} must lie beside its values, but they differ; save both again"
        )
    return Saved(path, record, torch.from_numpy(values))


def _read_record(path: Path) -> records.Record:
    """Read a record from its JSON file."""
    name = f"record {str(path)!r}"
    try:
        with open_for_reading(path) as file:
            content = json.load(file)
    except OSError as error:
        raise RecordError(f"{name} cannot be read: {error.strerror}; check the path") from None
    except (ValueError, RecursionError):
        raise RecordError(
            f"{name} must hold JSON, but does not, or is damaged; give a record that was saved"
        ) from None
    if not isinstance(content, dict) or content.get("format") != records.FORMAT:
        raise RecordError(
            f"{name} must hold a JSON object with format {records.FORMAT}, got "
            f"{shown(content)}; give a record that was saved by this version"
        )
    if "kind" in content:  # which those of attributions do not have
        got = shown(content["kind"])
        raise RecordError(
            f"{name} must be of an attribution, got {got}; read the arrays beside it with "
            "numpy.load"
        )
    try:
        record: records.Record = records.Record.read(content)
    except RecordError as error:
        raise RecordError(f"{name} is damaged: {error}; give a record that was saved") from None
    return record


def _read_values(path: Path, expected: records.RecordedValues) -> np.ndarray[Any, Any]:
    """Read an attribution's values as float32 from ``.npy``, or ``.npz`` (float16 with a scale,
    `halved`). Nothing in the file is run, nor read if its type or shape is another.
    """
    try:
        with open_for_reading(path) as file:  # which refuses pipes and devices
            if path.suffix == ".npy":
                return _array(file, np.float32, expected.shape)
            with zipfile.ZipFile(file) as archive:
                with archive.open("values.npy") as packed:
                    halves = _array(packed, np.float16, expected.shape)
                with archive.open("scale.npy") as packed:
                    scale = _array(packed, np.float32, ())
            return restored(halves, scale)
    except OSError as error:
        raise RecordError(
            f"values {str(path)!r} cannot be read: {error.strerror or error}; put them there"
        ) from None
    except Exception as error:  # the text of a damaged header may break its reader anywhere
        raise RecordError(
            f"values {str(path)!r} must be those of the record ({error!s:.120}); save both again"
        ) from None


MAX_VALUES = 2**28
"""Of a record: a map in three colours has them at 9,000 x 9,000 pixels."""


def _array(file: Any, dtype: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Read an open file of NumPy, whose header must have this type and shape."""
    found_shape, found_dtype = npy_header(file)
    if (found_dtype, found_shape) != (np.dtype(dtype), shape):
        raise ValueError(f"{found_dtype} {found_shape} in place of {np.dtype(dtype)} {shape}")
    if math.prod(shape) > MAX_VALUES:
        raise ValueError(f"at most {MAX_VALUES} values can be read, got shape {shape}")
    file.seek(0)
    array: np.ndarray[Any, Any] = np.lib.format.read_array(file, allow_pickle=False)
    return array


CLOSE = 5e-3
"""By how much the scores of one photo may differ between devices, as a share of the score."""


def stored_records(
    files: Sequence[Path], predicted: Explanation, keys: Mapping[str, str]
) -> list[dict[str, Any]] | None:
    """The records among all ``files`` of a photo, if all are there, and of the same pixels and
    requests, whose ``keys`` are by method, and have the scores that the model still gives: those
    of ``predicted``, whose maps are `Unexplained`. None otherwise."""
    if not all(map(Path.is_file, files)):
        return None
    pixels = records.size_and_digest(predicted.photo)
    record_files = [path for path in files if path.suffix == ".json"]  # by target, then method
    stored = []
    for path, (number, method) in zip(
        record_files, product(range(len(predicted.targets)), keys), strict=True
    ):
        try:
            saved = load(path)
        except RecordError:
            return None
        record = saved.content
        request = record.request if isinstance(record.request, dict) else {}
        recorded = (record.image.pixels, record.label, request.get(method))
        [current] = predicted.results[number].values()  # `Unexplained`, the only method
        # a score that was not finite is None in a record
        is_close = math.isclose(
            record.score or 0, float(current.score[0]), rel_tol=CLOSE, abs_tol=CLOSE / 100
        )
        if recorded != (pixels, predicted.targets[number], keys[method]) or not is_close:
            return None
        stored.append(dict(saved.record))
    return stored


@dataclass(frozen=True)
class Unexplained(Method):
    """The photo as its own map: tells what a model predicts, by a forward pass alone."""

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return evidence.inputs.sum(1)
