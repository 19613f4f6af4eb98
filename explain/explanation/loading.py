"""What was saved, read back without a model: the values and the record; and computed again where nothing is missing."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Any

import numpy as np
import torch
from PIL import Image

from explain._utils.errors import ExplainError, ImageError, RecordError, keywords, raised, shown, warn
from explain.attribution import records, result
from explain.attribution.encoding import decode, described, method_of, unknown
from explain.data.files import restored
from explain.data.images import MAX_PIXELS, ImageLike, load_image
from explain.data.opening import opened
from explain.explanation.explainer import Explainer
from explain.explanation.explanation import Explanation
from explain.hooks.interventions import Intervention
from explain.methods.base import MethodLike
from explain.methods.evidence import PROOFS, EvidenceSets
from explain.models.files import is_file_or_code
from explain.targets.resolve import TargetLike

MOST = 50_000_000  # bytes of a record; those that hold a baseline have a few millions
TOLERANCE = 1e-3  # of the largest value, from which on a map that is repeated is another one


@dataclass(frozen=True, eq=False)
class Saved:
    """An attribution that was saved: ``record``, as `Explanation.record` returned it, and the values.

    ``values`` is the raw attribution of the one image, float32: ``(h, w)`` at the layer's resolution, or ``(C, H, W)``.
    ``attribution`` is the same as a batch of one, with its ``heatmap``.
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
    def attribution(self) -> result.Attribution:
        """The values as an attribution, a batch of one."""
        record = self.record
        array = record["values"]
        target = record["target"]
        layer = record.get("layer")
        options = dict(record["options"])
        sets = None
        if array.get("sets") is not None:
            sets = EvidenceSets.stored(self.values, options["reasons"], array["sets"])
        for name, value in options.items():
            with suppress(RecordError):  # the caller's own, or no longer known: as the record has it
                options[name] = decode(value)
        return result.Attribution(
            method=self.method,
            values=self.values[None],
            target=target if isinstance(target, str) else torch.tensor([target]),
            score=torch.tensor([record["score"]]),
            layer=tuple(layer) if isinstance(layer, list) else layer,
            size=tuple(array.get("size") or record["input_size"]),
            style=array.get("style") or "heat",
            options=options,
            delta=_one_number(record.get("delta")),
            fuse=record.get("fuse"),
            input=array.get("input"),
            sets=sets,
            rounding=record.get("rounding"),
            neutral=_one_number(array.get("neutral")),
        )

    @property
    def heatmap(self) -> torch.Tensor:
        """``(H, W)`` float32 in [0, 1] at the resolution of the model's input."""
        return self.attribution.heatmap[0]

    @keywords()
    def repeat(
        self, explainer: Explainer | None = None, *, image: ImageLike | None = None, method: MethodLike | None = None,
        target: TargetLike = None, interventions: Sequence[Intervention] | None = None,
    ) -> Explanation:  # fmt: skip
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
        record = self.record
        requested = record.get("asked")
        altered = record.get("interventions", [])
        reasons = {}
        if explainer is None:
            reasons["explainer"] = self._why_no_model()
        if image is None and not record["image"].get("path"):
            reasons["image"] = "the photo had no file"
        if method is None:
            reasons["method"] = self._why_no_method()
        if target is None and unknown(requested):
            reasons["target"] = f"the target ({', '.join(unknown(requested))}) was the caller's own"
        if interventions is None and unknown(altered):
            reasons["interventions"] = f"an intervention ({', '.join(unknown(altered))}) was the caller's own"
        missing = [name for name, reason in reasons.items() if reason]
        if missing:
            arguments = ", ".join(f"{name}=..." for name in missing)
            why = "; ".join(reasons[name] for name in missing)
            raise RecordError(f"{self._name} cannot be repeated alone: {why}; use repeat({arguments})")
        photo = self._photo(image)
        if explainer is None:
            explainer = self._explainer()
        self._check_explainer(explainer, photo)
        if target is None:
            target = record["target"] if requested is None else decode(requested)
        explanation = explainer(
            photo,
            [method_of(record) if method is None else method],
            targets=[target],
            layer=record.get("layer"),
            fuse=record.get("fuse"),
            precision=record.get("precision", "full"),
            interventions=decode(altered) if interventions is None else interventions,
        )
        self._warn_of_differences(explanation, same_method=method is None)
        return explanation

    @property
    def _name(self) -> str:
        return f"record {str(self.path)!r}"

    def _why_no_model(self) -> str:
        """Say why the model cannot be loaded by its record; empty where it can."""
        arguments = decode(self.record["explainer"]["arguments"])
        if not isinstance(arguments, dict):
            raise RecordError(f"{self._name} must hold arguments of an Explainer by name; use repeat(explainer=...)")
        reasons = []
        for part in self.record["explainer"]["own"]:
            place = "only in memory" if part == "model" else "the caller's own"
            reasons.append(f"the {part} ({self.record.get(part)}) was {place}")
        model = str(arguments.get("model") or "")
        if is_file_or_code(model):
            reasons.append(f"the model ({model}) is a file or code of the caller's own, which no record may run")
        return " and ".join(reasons)

    def _why_no_method(self) -> str:
        """Say why the method cannot be made by its record; empty where it can."""
        if parts := unknown(self.record["options"]):
            return f"the method ({self.method}) was made with {', '.join(parts)}, which no record holds"
        try:
            method_of(self.record)
        except RecordError as error:
            return f"the method ({self.method}) cannot be made ({error})"
        return ""

    def _photo(self, image: ImageLike | None) -> Image.Image:
        path = self.record["image"].get("path")
        try:
            photo = load_image(path if image is None else image)
        except ImageError as error:
            raise RecordError(f"{self._name} cannot be repeated: {error}; use repeat(image=...)") from None
        if records.digest(photo.tobytes()) != self.record["image"].get("sha256"):
            raise RecordError(f"image for {self._name} must have the pixels that were explained; use repeat(image=...)")
        photo.filename = path or ""  # type: ignore[attr-defined]  # as Pillow does for those that it opens
        return photo

    def _explainer(self) -> Explainer:
        """Load the model by its name, with its weights as they were."""
        arguments = decode(self.record["explainer"]["arguments"])
        try:
            explainer = Explainer(**arguments)
        except (TypeError, ValueError) as error:
            got = f"they are refused: {error}" if isinstance(error, ExplainError) else raised(error)
            raise RecordError(f"{self._name} must hold arguments of an Explainer, but {got}; give explainer=") from None
        expected = self.record.get("preprocess")
        if described(explainer.preprocess) != expected:
            got = f"{described(explainer.preprocess)} of {arguments['model']}"
            raise RecordError(f"{self._name} must have the preprocessing {expected}, got {got}; give an explainer")
        return explainer

    def _check_explainer(self, explainer: Explainer, photo: Image.Image) -> None:
        """Refuse an explainer with other weights, another activation or another size of input."""
        size = list(explainer.as_input(photo).shape[-2:])
        self._check_same("weights", self.record.get("weights"), explainer.weights)
        self._check_same("activation", self.record.get("activation"), explainer.activation)
        self._check_same("size of inputs", list(self.record["input_size"]), size)

    def _check_same(self, what: str, recorded: Any, now: Any) -> None:
        if recorded is None or now is None:
            return
        if _without_place(recorded) != _without_place(now):
            raise RecordError(f"explainer for {self._name} must have the {what} {recorded}, got {now}; give the same")

    def _warn_of_differences(self, explanation: Explanation, *, same_method: bool) -> None:
        """Warn where the map took another number of samples, or was or is altered by hooks of the caller's.

        Hooks that only observe look the same as those that alter, so that the values decide.
        """
        samples = explanation.attributions[explanation.methods[0]].samples
        estimate = self.record.get("estimate")
        if same_method and samples is not None and estimate is not None and samples != estimate["samples"]:
            recorded = f"is of {estimate['samples']} samples"
            warn(f"{self._name} {recorded}, but repeating it took {samples}; values may differ")
        hooks = self.record["explainer"].get("hooks", [])
        hooks_now = explanation.origin.hooks
        values = explanation.values.float().cpu()
        if not (hooks or hooks_now) or values.shape != self.values.shape:
            return
        difference = float((values - self.values).abs().max()) / (float(self.values.abs().max()) or 1.0)
        if not difference <= TOLERANCE:
            must = f"be repeated with the hooks that it was made with ({', '.join(hooks) or 'none'})"
            got = f"got {', '.join(hooks_now) or 'none'}, and the map differs by {difference:.3g} of its maximum"
            warn(f"{self._name} must {must}, {got}; put the same on the model")


def _one_number(value: float | None) -> torch.Tensor | None:
    return None if value is None else torch.tensor([value])


def _without_place(weights: Any) -> str:
    """What identifies weights: of a file its digest, wherever it is."""
    return str(weights).rpartition(" (sha256 ")[2]


@keywords()
def load(file: str | os.PathLike[str]) -> Saved:
    """Read what `Explanation.save` wrote for one method and target, without loading a model.

    Args:
        file: the record (``.json``) or the values (``.npy``, ``.npz``); the other file is beside it under the same
            name. Nothing in them is run.

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
        raise RecordError(f"file must be the path of a record (.json) or of its values (.npy), got {shown(file)}")
    path = Path(file)
    if path.is_dir() or path.suffix not in (".json", ".npy", ".npz"):
        first = next(iter(sorted(path.glob("*.json"))), None)
        remedy = "" if first is None else f"; load one in it, such as {str(first)!r}"
        raise RecordError(f"file must be a record (.json) or its values (.npy), got {str(path)!r}{remedy}")
    if path.stem.endswith(("-concepts", "-concepts-vectors")):
        raise RecordError(f"file must be of an attribution, got concepts: {str(path)!r}; read arrays with numpy.load")
    path = path.with_suffix(".json")
    record = _read_record(path)
    array = record["values"]
    values = _read_values(path.with_suffix(f".{array.get('format') or 'npy'}"))
    if not records.identity(values).items() <= array.items():
        raise RecordError(f"record {str(path)!r} must lie beside its values, but they differ; save both again")
    return Saved(path, record, torch.from_numpy(values))


def _read_record(path: Path) -> dict[str, Any]:
    """Read a record, and refuse it without a field that is needed, or with a value that none has."""
    name = f"record {str(path)!r}"
    try:
        with opened(path) as file:
            content = file.read(MOST + 1)
    except OSError as error:
        raise RecordError(f"{name} cannot be read: {error.strerror}; check the path") from None
    if len(content) > MOST:
        raise RecordError(f"{name} must have at most {MOST} bytes; give a record that was saved")
    try:
        record = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        raise RecordError(f"{name} must hold JSON, but does not, or is damaged; give a record that was saved") from None
    if not isinstance(record, dict):
        got = type(record).__name__
        raise RecordError(f"{name} must hold a JSON object, got {got}; give a record that was saved")
    if record.get("format") != records.FORMAT or "method" not in record:
        got = shown(record.get("format"))
        raise RecordError(f"{name} must have format {records.FORMAT} and a method, got format {got}; save it again")
    for field_name, rule in _FIELDS.items():
        value: Any = record
        for key in field_name.split("."):
            value = value.get(key)
        fits = isinstance(value, rule) if isinstance(rule, type | UnionType) else rule(value)
        if not fits:
            must = f"have another value for {field_name!r}"
            raise RecordError(f"{name} must {must}, got {shown(value)}; give a record that was saved")
    return record


def _read_values(path: Path) -> np.ndarray[Any, Any]:
    """Read an array of float32, or as `halved` has left it in ``.npz``."""
    try:
        with opened(path) as file:  # which refuses pipes and devices
            if path.suffix == ".npz":
                with np.load(file) as arrays:  # by its name, NumPy would leave a damaged file open
                    return restored(arrays["values"], arrays["scale"])
        content = np.load(path, mmap_mode="r")  # a damaged header cannot make it take more than the file
        if content.dtype != np.float32:
            raise ValueError(f"got {content.dtype}")
        values: np.ndarray[Any, Any] = np.array(content)
    except OSError as error:
        raise RecordError(f"values {str(path)!r} cannot be read: {error.strerror or error}; put them there") from None
    except Exception as error:  # the text of a damaged header may break its reader anywhere
        raise RecordError(f"values {str(path)!r} must be an array of float32 ({error!s:.80}); save again") from None
    return values


def _is_number(value: Any) -> bool:
    """Whether a field holds a number that a tensor can hold."""
    return isinstance(value, float) or (type(value) is int and -(2**63) <= value < 2**63)


def _is_size(value: Any) -> bool:
    """Whether a field holds a height and a width, of a video with the frames before them."""
    if not isinstance(value, list) or len(value) not in (2, 3):
        return False
    return all(type(side) is int and side > 0 for side in value) and math.prod(value) <= MAX_PIXELS


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_set(value: Any) -> bool:
    """Whether a region set has a proof and two scores, as `EvidenceSets.described` writes them."""
    if not isinstance(value, dict) or value.keys() != {"proof", "alone", "without"} or value["proof"] not in PROOFS:
        return False
    return all(isinstance(value[name], int | float | None) for name in ("alone", "without"))


def _or_none(rule: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or rule(value)


_FIELDS: Mapping[str, Any] = {
    "model": str,
    "method": str,
    "options": dict,
    "score": _is_number,
    "target": lambda value: isinstance(value, str) or (type(value) is int and _is_number(value)),
    "layer": lambda value: value is None or isinstance(value, str) or _are_texts(value),
    "input_size": _is_size,
    "delta": _or_none(_is_number),
    "rounding": _or_none(_is_number),
    "interventions": list | None,
    "verdict": dict | None,
    "image": dict,
    "image.path": str | None,
    "explainer": dict,
    "explainer.arguments": dict,
    "explainer.own": _are_texts,
    "explainer.hooks": _are_texts,
    "values": dict,
    "values.shape": list,
    "values.sha256": str,
    "values.format": str | None,
    "values.size": _or_none(_is_size),
    "values.style": str | None,
    "values.neutral": _or_none(_is_number),
    "values.sets": _or_none(lambda value: isinstance(value, list) and all(map(_is_set, value))),
    "estimate": _or_none(lambda value: isinstance(value, dict) and type(value.get("samples")) is int),
}
"""What the fields of a record must be that are read: of a type, or what a test says."""
