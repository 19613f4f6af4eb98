"""What was saved, read back without a model: the values and the record; and computed again where nothing is missing."""

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from PIL import Image

from explain._utils.errors import ExplainError, ImageError, RecordError, keywords, raised, shown, warn
from explain.attribution import pictures, records, result
from explain.attribution.records import decode, described, is_number, is_size, method_of, unknown
from explain.data.files import restored
from explain.data.images import ImageLike, load_image
from explain.data.opening import opened
from explain.engine.settings import Precision
from explain.explanation.explainer import Explainer
from explain.explanation.explanation import Explanation
from explain.hooks.interventions import Intervention
from explain.layers.layouts import enlarge
from explain.methods.base import Fusion, MethodLike, Style
from explain.methods.evidence import PROOFS, EvidenceSets
from explain.models.files import is_file_or_code
from explain.targets.outputs import Activation
from explain.targets.resolve import TargetLike

MOST = 50_000_000  # bytes of a record; those that hold a baseline have a few millions


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
        target, layer, delta = record["target"], record["layer"], record.get("delta")
        about, options = record.get("values", {}), dict(record["options"])
        sets = EvidenceSets.stored(self.values, options["reasons"], about["sets"]) if "sets" in about else None
        style: Style = about.get("style") or "heat"
        for name, value in options.items():
            with suppress(RecordError):  # the caller's own, or no longer known: as the record has it
                options[name] = decode(value)
        return result.Attribution(
            method=self.method, values=self.values[None], score=torch.tensor([record["score"]]), style=style,
            target=target if isinstance(target, str) else torch.tensor([target]),
            layer=tuple(layer) if isinstance(layer, list) else layer, options=options, fuse=record.get("fuse"),
            size=tuple(about.get("size", record["input_size"])), input=about.get("input"), sets=sets,
            delta=None if delta is None else torch.tensor([delta]), rounding=record.get("rounding"),
            neutral=torch.tensor([about["neutral"]]) if "neutral" in about else None,
        )  # fmt: skip

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
        functions = "" if target is not None else ", ".join(unknown(record.get("asked")))
        altered = "" if interventions is not None else ", ".join(unknown(record.get("interventions")))
        reasons = {
            "explainer": self._why_no_model() if explainer is None else "",
            "image": "the photo had no file" if image is None and not record["image"].get("path") else "",
            "method": self._why_no_method() if method is None else "",
            "target": f"the target ({functions}) was the caller's own" if functions else "",
            "interventions": f"an intervention ({altered}) was the caller's own" if altered else "",
        }
        missing = {name: reason for name, reason in reasons.items() if reason}
        if missing:
            names = ", ".join(f"{name}=..." for name in missing)
            why = "; ".join(missing.values())
            raise RecordError(f"{self._name} cannot be repeated alone: {why}; use repeat({names})")
        photo = self._photo(image)
        explainer = self._explainer() if explainer is None else explainer
        self._check_explainer(explainer, photo)
        if target is None:
            encoded = record.get("asked")
            target = record["target"] if encoded is None else decode(encoded)
        found = explainer(
            photo, [method_of(record) if method is None else method], targets=[target], layer=record["layer"],
            fuse=record.get("fuse"), precision=record.get("precision", "full"),
            interventions=decode(record.get("interventions", [])) if interventions is None else interventions,
            **self._stop_options(),
        )  # fmt: skip
        samples, estimate = found.attributions[found.methods[0]].samples, record.get("estimate")
        before = samples if method is not None or estimate is None else estimate["samples"]
        if samples not in (None, before):
            warn(f"{self._name} is of {before} samples, but repeating it took {samples}; values may differ")
        self._warn_of_hooks(found)
        return found

    @property
    def _name(self) -> str:
        return f"record {str(self.path)!r}"

    def _why_no_model(self) -> str:
        """Say why the model cannot be loaded by its record; empty where it can."""
        about = self.record["explainer"]
        memory, own = "only in memory", "the caller's own"
        named = ((part, self.record.get(part)) for part in about["own"])
        reasons = [f"the {part} ({name}) was {memory if part == 'model' else own}" for part, name in named]
        arguments = decode(about["arguments"])
        if not isinstance(arguments, dict):
            raise RecordError(f"{self._name} must hold arguments of an Explainer by name; use repeat(explainer=...)")
        model = str(arguments.get("model") or "")
        if is_file_or_code(model):
            reasons.append(f"the model ({model}) is a file or code of the caller's own, which no record may run")
        return " and ".join(reasons)

    def _why_no_method(self) -> str:
        if parts := unknown(self.record["options"]):
            return f"the method ({self.method}) was made with {', '.join(parts)}, which no record holds"
        try:
            method_of(self.record)
        except RecordError as error:
            return f"the method ({self.method}) cannot be made ({error})"
        return ""

    def _photo(self, image: ImageLike | None) -> Image.Image:
        about = self.record["image"]
        try:
            photo = load_image(about["path"] if image is None else image)
        except ImageError as error:
            raise RecordError(f"{self._name} cannot be repeated: {error}; use repeat(image=...)") from None
        if records.digest(photo.tobytes()) != about.get("sha256"):
            raise RecordError(f"image for {self._name} must have the pixels that were explained; use repeat(image=...)")
        photo.filename = about.get("path") or ""  # type: ignore[attr-defined]  # as Pillow does for those that it opens
        return photo

    def _explainer(self) -> Explainer:
        """Load the model by its name, with its weights as they were."""
        arguments = decode(self.record["explainer"]["arguments"])
        try:
            made = Explainer(**arguments)
        except (TypeError, ValueError) as error:
            got = f"they are refused: {error}" if isinstance(error, ExplainError) else raised(error)
            raise RecordError(f"{self._name} must hold arguments of an Explainer, but {got}; give explainer=") from None
        expected = self.record.get("preprocess")
        if described(made.preprocess) != expected:
            got = f"{described(made.preprocess)} of {arguments['model']}"
            raise RecordError(f"{self._name} must have the preprocessing {expected}, got {got}; give an explainer")
        return made

    def _check_explainer(self, explainer: Explainer, photo: Image.Image) -> None:
        """Refuse an explainer with other weights, another activation or another size of input."""
        same = {
            "weights": (self.record.get("weights"), explainer.weights),
            "activation": (self.record.get("activation"), explainer.activation),
            "size of inputs": (list(self.record["input_size"]), list(explainer.as_input(photo).shape[-2:])),
        }
        for what, (before, now) in same.items():
            # a file is identified by its digest, wherever it is
            digests = {str(each).rpartition(" (sha256 ")[2] for each in (before, now)}
            if None not in (before, now) and len(digests) > 1:
                raise RecordError(f"explainer for {self._name} must have the {what} {before}, got {now}; give the same")

    def _stop_options(self) -> dict[str, Any]:
        """How to stop a method where it was stopped, if no option of it does: by an interrupt after so many samples."""
        estimate = self.record.get("estimate")
        if estimate is None or not estimate.get("stopped") or "samples" in self.record["options"]:
            return {}

        def stop(done: int, total: int) -> None:
            if done >= estimate["samples"]:
                raise KeyboardInterrupt

        return {"batch_size": 1, "keep_partial": True, "progress": stop}

    def _warn_of_hooks(self, found: Explanation) -> None:
        """Warn where the map is another one, and the caller's hooks were or are on the model.

        Hooks that only observe look the same as those that alter, so that the values decide.
        """
        before, now = self.record["explainer"].get("hooks", []), list(found.origin.hooks)
        values = found.values.float().cpu()
        if not (before or now) or values.shape != self.values.shape:
            return
        difference = float((values - self.values).abs().max()) / (float(self.values.abs().max()) or 1.0)
        if not difference <= 1e-3:
            then, these = (", ".join(names) or "none" for names in (before, now))
            got = f"got {these}, and the map differs by {difference:.3g} of its maximum; put the same on the model"
            warn(f"{self._name} must be repeated with the hooks that it was made with ({then}), {got}")


@dataclass(frozen=True, eq=False)
class SavedConcepts:
    """Concepts that were saved, read back without a model: ``record``, as `PhotoConcepts.record` gave it, and arrays.

    ``maps`` ``(K, h, w)`` says how strongly each concept is present at each place, 1 at its strongest, and ``vectors``
    ``(K, C)`` is each one's activation of the layer's channels there.
    """

    path: Path
    record: Mapping[str, Any] = field(repr=False)
    maps: torch.Tensor = field(repr=False)
    vectors: torch.Tensor = field(repr=False)

    def __len__(self) -> int:
        return len(self.maps)

    @property
    def layer(self) -> str:
        return str(self.record["layer"])

    @property
    def shares(self) -> list[float]:
        """How much of what the concepts make up is each one's, together 1."""
        return [float(each["share"]) for each in self.record["concepts"]]

    @property
    def labels(self) -> list[str]:
        """The best classes of each concept."""
        return [str(each["label"]) for each in self.record["concepts"]]

    @property
    def heatmaps(self) -> torch.Tensor:
        """``(K, H, W)`` in [0, 1] at the resolution of the model's input."""
        return enlarge(self.maps[None], tuple(self.record["input_size"]))[0].clamp(0, 1)

    @classmethod
    def read(cls, path: Path, record: Mapping[str, Any], maps: torch.Tensor, vectors: torch.Tensor) -> "SavedConcepts":
        """Put a record and its arrays together.

        Raises:
            RecordError: the record lacks something, or they do not belong together.
        """
        name = f"record {str(path)!r}"
        kinds = {"layer": str, "concepts": _are_parts, "input_size": is_size, "error": float, "values": dict}
        records.check_fields(record, {**kinds, "values.sha256": str}, name)
        same = record["values"]["sha256"] == records.identity(pictures.array(maps))["sha256"]
        if maps.ndim != 3 or vectors.ndim != 2 or not same or not len(record["concepts"]) == len(maps) == len(vectors):
            raise RecordError(f"{name} must lie beside its values, but they differ; save both again")
        return cls(path, record, maps, vectors)


@keywords()
def load(file: str | os.PathLike[str]) -> Saved | SavedConcepts:
    """Read what `Explanation.save` wrote for one method and target, or `PhotoConcepts.save`, without loading a model.

    Args:
        file: the record (``.json``) or the values (``.npy``, ``.npz``); the other file is beside it under the same
            name. Nothing in them is run.

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
        raise RecordError(f"file must be the path of a record (.json) or of its values (.npy), got {shown(file)}")
    path = Path(file)
    if path.is_dir() or path.suffix not in (".json", ".npy", ".npz"):
        inside = sorted(path.glob("*.json"))[:1]
        remedy = f"; load one in it, such as {str(inside[0])!r}" if inside else ""
        raise RecordError(f"file must be a record (.json) or its values (.npy), got {str(path)!r}{remedy}")
    stem = path.stem.removesuffix("-vectors") if path.stem.endswith("-concepts-vectors") else path.stem
    path = path.with_name(f"{stem}.json")
    name = f"record {str(path)!r}"
    found = _read_record(path, name)
    if isinstance(found, dict) and found.get("kind") == "concepts":
        arrays = (path.with_suffix(".npy"), path.with_name(f"{path.stem}-vectors.npy"))
        return SavedConcepts.read(path, found, *(torch.from_numpy(_read_values(file)) for file in arrays))
    record = records.checked(found, name)
    records.check_fields(record, _FIELDS, name)
    about = record.get("values")
    values = _read_values(path.with_suffix(f".{(about or {}).get('format') or 'npy'}"))
    if about is not None and not records.identity(values).items() <= about.items():
        raise RecordError(f"{name} must lie beside its values, but they differ; save both again")
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
    """Read an array of float32, or as `halved` has left it in ``.npz``."""
    try:
        with opened(path) as file:  # which refuses pipes and devices
            if path.suffix == ".npz":
                with zipfile.ZipFile(file) as archive:
                    if sum(each.file_size for each in archive.infolist()) > 20 * MOST:
                        raise ValueError("too large")
                file.seek(0)
                found = np.load(file, allow_pickle=False)
                return restored(found["values"], found["scale"])
        mapped = np.lib.format.open_memmap(path, mode="r")  # a damaged header cannot make it take more than the file
        if mapped.dtype != np.float32:
            raise ValueError(f"got {mapped.dtype}")
        values: np.ndarray[Any, Any] = np.array(mapped)
    except OSError as error:
        raise RecordError(f"values {str(path)!r} cannot be read: {error.strerror or error}; put them there") from None
    except Exception as error:  # the text of a damaged header may break its reader anywhere
        raise RecordError(f"values {str(path)!r} must be an array of float32 ({error!s:.80}); save again") from None
    return values


def _are_parts(parts: Any) -> bool:
    """Whether a record has a share and a label for each concept."""
    parts = [part if isinstance(part, dict) else {} for part in parts] if isinstance(parts, list) else [{}]
    return all(is_number(part.get("share")) and isinstance(part.get("label"), str) for part in parts)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_set(proof: Any = None, alone: Any = "", without: Any = "", **more: Any) -> bool:
    return proof in PROOFS and all(isinstance(each, int | float | None) for each in (alone, without)) and not more


_FIELDS: Mapping[str, Any] = {
    "model": str, "method": str, "options": dict, "score": is_number, "input_size": is_size,
    "target": lambda value: isinstance(value, str) or (type(value) is int and is_number(value)),
    "layer": lambda value: value is None or isinstance(value, str) or _are_texts(value),
    "image": dict, "image.path?": str | None,
    "explainer": dict, "explainer.arguments": dict, "explainer.own": _are_texts, "explainer.hooks?": _are_texts,
    "values?": dict, "values.format?": ("npz", None),
    "values.shape": lambda value: isinstance(value, list) and all(type(each) is int and each >= 0 for each in value),
    "values.sha256": str, "values.size?": is_size, "values.neutral?": is_number,
    "values.sets?": lambda value: isinstance(value, list) and all(isinstance(x, dict) and _is_set(**x) for x in value),
    "values.style?": (None, *get_args(Style)), "fuse?": (None, *get_args(Fusion)), "precision?": get_args(Precision),
    "delta?": lambda value: value is None or is_number(value),
    "rounding?": lambda value: value is None or is_number(value),
    "label?": str, "interventions?": list, "activation?": (None, *get_args(Activation)), "verdict?": dict | None,
    "estimate?": lambda value: value is None or (isinstance(value, dict) and type(value.get("samples")) is int),
}  # fmt: skip
