"""One photo that was explained, as the plain values that a page shows."""

import base64
import io
import math
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageOps

from explain._utils.errors import ExplainError, muted, printable
from explain.attribution.api import plan
from explain.attribution.encoding import decode
from explain.attribution.pictures import array, certainty, layer_of, remark, sentence
from explain.attribution.result import Attribution
from explain.baselines.base import scale_of
from explain.engine.output_kinds import reading
from explain.engine.settings import Progress
from explain.hooks.preserve import untouched
from explain.methods.base import Style, get_method, innermost_method, title_of
from explain.render.styles import edges, has_colors
from explain.report.reproduce import Reproduction, Subject, reproduction
from explain.targets import Segmentation

DIGITS = 5
STEPS = 20
FEWEST_STEPS = 8
FULL_STEPS_MAPS = 8
"""Maps that get curves in `STEPS` steps; where there are more, each gets fewer, so that the total
stays the same."""


def costs(subject: Subject) -> dict[str, float]:
    """By method, how many passes of the model it took for the photo; methods whose cost is not
    known are left out, and without a model all are.
    """
    passes: dict[str, float] = {}
    if subject.explainer is None:
        return passes
    inputs = subject.inputs
    for name, attribution in subject.results[0].items():
        with suppress(ExplainError), muted():  # a method of the caller's own
            # for any target, the cost is the same
            cost = plan(subject.explainer.model, inputs, attribution.applied(), target=0).cost()
            if math.isfinite(cost):
                passes[name] = passes_run(cost, attribution)
    return passes


def passes_run(cost: float, attribution: Attribution | None) -> float:
    """The passes that a method took, of ``cost`` in full: without those that it planned but did not
    run, where it stopped early. The largest numbers of several images count."""
    if (
        attribution is None
        or not attribution.stopped
        or attribution.spent is None
        or attribution.planned is None
    ):
        return cost
    return max(0.0, cost - float(attribution.planned.max() - attribution.spent.max()))


def steps_for(maps: int) -> int:
    """Return the number of steps of the deletion and insertion curves on a page with so many maps:
    `STEPS`, or fewer for more than `FULL_STEPS_MAPS` maps."""
    return max(FEWEST_STEPS, min(STEPS, STEPS * FULL_STEPS_MAPS // max(1, maps)))


def curves(
    subject: Subject,
    index: int,
    maps: Mapping[str, Attribution],
    steps: int,
    progress: Progress | None = None,
) -> dict[str, dict[str, Any]]:
    """By method, deletion and insertion curves of one target's maps, of class probabilities or
    scores. A pass for each step; empty without model or metric. The page's scripts read the keys.
    """
    if not steps or not maps or subject.explainer is None:
        return {}
    from explain.metrics import Deletion, Insertion  # slow to load
    from explain.metrics.photos import table_of

    # a model of one number, and a target that is no class, have a score alone
    is_probability = subject.probabilities is not None and len(subject.probabilities) > 1
    is_probability = is_probability and isinstance(subject.target_at(index), int)
    score: Literal["probability", "logit"] = "probability" if is_probability else "logit"
    metrics = [Deletion(steps=steps, score=score), Insertion(steps=steps, score=score)]
    try:
        on_input = {name: subject.on_input(index)[name] for name in maps}
        table = table_of(subject, index, on_input, metrics, progress=progress)
    except ExplainError:  # a map or target without this metric has no curve
        return {}
    curves_by_method = {}
    for name in maps:
        pixel_shares, deletion = table.curve(name, "deletion")
        _, insertion = table.curve(name, "insertion")
        curves_by_method[name] = {  # [0]: there is one image
            "at": _rounded(pixel_shares),
            "deletion": _rounded(deletion[0]),
            "insertion": _rounded(insertion[0]),
            "areas": {
                kind: round(float(table[name][kind][0]), DIGITS)
                for kind in ("deletion", "insertion")
            },
            "reading": "probability" if is_probability else "score",
        }
    return curves_by_method


def _rounded(values: torch.Tensor) -> list[float]:
    """The numbers ``(n,)`` of a curve as a list for a page's JSON, rounded to `DIGITS` decimal
    places to keep the page small."""
    return [round(value, DIGITS) for value in values.double().tolist()]


Array = np.ndarray[Any, Any]

COARSE = 64 * 64
"""Cells up to which a map gets 16 bits. Larger ones get 8, with finer steps near zero."""


def plane(values: Array, *, signed: bool = False) -> dict[str, Any]:
    """A map ``(h, w)`` as ``planes.js`` reads it, by zlib: little-endian steps of ``scale``, linear
    in 16 bits, or squared in 8 for large maps. NaN and infinity are 0."""
    values = np.nan_to_num(np.asarray(values, np.float64), posinf=0.0, neginf=0.0)
    signed = signed or bool((values < 0).any())
    scale = float(np.abs(values).max(initial=0.0))
    shares = values / scale if scale > 0 else values
    coarse = values.size <= COARSE
    if not coarse:  # the page squares them again: steps are finer near zero
        shares = np.sign(shares) * np.sqrt(np.abs(shares))
    step_dtype = np.dtype(f"<{'i' if signed else 'u'}{2 if coarse else 1}")
    steps = np.rint(shares * np.iinfo(step_dtype).max).astype(step_dtype)
    unsigned = steps.view(f"<u{step_dtype.itemsize}")
    # differences from the left neighbour, and of these from the one above, modulo the type's range
    of_columns = np.diff(unsigned, axis=1, prepend=np.zeros_like(unsigned[:, :1]))
    differences = np.diff(of_columns, axis=0, prepend=np.zeros_like(of_columns[:1]))
    plain_bytes = zlib.compress(steps.tobytes(), 9)
    difference_bytes = zlib.compress(differences.tobytes(), 9)
    return {
        "width": values.shape[1],
        "height": values.shape[0],
        "bits": 8 * step_dtype.itemsize,
        "signed": signed,
        "scale": scale,
        "filter": "differences" if len(difference_bytes) < len(plain_bytes) else "none",
        "data": base64.b64encode(min(plain_bytes, difference_bytes, key=len)).decode("ascii"),
    }


CELLS = 56  # along the longer side of a map whose own cells are not spread evenly


def map_and_kind(attribution: Attribution, longest: int | None = None) -> tuple[Array, str]:
    """A first image's map ``(h, w)`` as the page draws it: "heat" of a layer, "signed"
    contributions (channels summed) or "intensity", averaged to ``longest`` cells a side.
    """
    values, kind = as_drawn(
        attribution.contributions[0].float(),
        attribution.style,
        of_layer=attribution.layer is not None,
    )
    if kind == "heat":
        return _evenly(values, attribution), kind
    return _averaged(array(values), longest), kind


def _evenly(values: torch.Tensor, attribution: Attribution) -> Array:
    """A map ``(h, w)`` of a layer as cells that are spread evenly, as the page draws them: where
    its own cells look elsewhere, so many that it looks like the map."""
    placement = attribution.placement
    if (
        placement is None
        or placement.is_even
        or not placement.fits(values[None, None], attribution.size)
    ):
        return array(values)
    pixels = placement[0].on_photo(values[None, None], smooth=True)[0, 0]
    return _averaged(array(pixels), CELLS)


def as_drawn(
    values: torch.Tensor, style: Style, of_layer: bool = False
) -> tuple[torch.Tensor, str]:
    """One image's values ``(h, w)`` or ``(C, H, W)`` as a map ``(h, w)`` and its kind: channels
    summed in signed maps, else the largest magnitude. Signed maps of a layer are "heat".
    """
    has_channels = values.ndim != 2
    if style == "signed" and (has_channels or not of_layer):
        return values.sum(0) if has_channels else values, "signed"
    if has_channels:
        return values.abs().amax(0), "intensity"
    return values, "heat"


def _averaged(values: Array, longest: int | None) -> Array:
    """A map ``(h, w)``, averaged down to ``longest`` cells along its longer side; as it is where it
    has no more, or ``longest`` is None."""
    if longest is None or max(values.shape) <= longest:
        return values
    import cv2

    share = longest / max(values.shape)
    height, width = (max(1, round(length * share)) for length in values.shape)
    return cv2.resize(values.astype(np.float32), (width, height), interpolation=cv2.INTER_AREA)


def marked_region(subject: Subject, index: int, *, live: bool = False) -> dict[str, Any] | None:
    """What the page outlines of target number ``index``, ``{"box": shares}`` or ``{"mask":
    plane}``; None for a class. With ``live``, the model may run for a region.
    """
    detection = subject.boxes[index] if index < len(subject.boxes) else None
    if detection is not None and detection.box is not None:
        return {"box": subject.box.to_input(detection.box, ONE)}
    # a class has no region; a segmenter's lies on one input, and several crops are several inputs
    if subject.asked[index] is None or subject.crops:
        return None
    with suppress(ExplainError):
        target = decode(subject.asked[index])
        if isinstance(target, Segmentation) and live and subject.explainer is not None:
            model = subject.explainer.model
            inputs = subject.inputs
            with (
                untouched(model),
                torch.no_grad(),
                reading(model, inputs, subject.explainer.activation),
            ):
                target = target.resolved(inputs.call(model), count=1)
        if isinstance(target, Segmentation) and target.mask is not None:
            first_mask = target.mask.reshape(-1, *target.mask.shape[-2:])[0]
            return {"mask": plane(array(first_mask))}
    return None


ONE = (1, 1)
"""The size of what the model saw, in which boxes are shares of it."""
# the mean colour of ImageNet, where the zero of a model's input is not known
GREY = [124, 117, 104]


@dataclass(frozen=True)
class Detail:
    """How much of a photo a page holds."""

    side: int = 1280
    """Pixels of the photo's largest side."""
    quality: int = 86
    """That of the photo's JPEG."""
    cells: int | None = None
    """The largest side of maps of single pixels; None: no limit."""
    steps: int | None = 0
    """Steps of the curves; 0 for no curves, None for `steps_for`."""
    live: bool = True
    """Whether the model may run."""


def item(
    subject: Subject,
    detail: Detail,
    *,
    figures: Sequence[Mapping[str, Any]] = (),
    progress: Progress | None = None,
    repeated_by: Reproduction | None = None,
    address: str | None = None,
) -> dict[str, Any]:
    """A photo and its maps as plain values, by keys that scripts of pages read; lists are by
    target, then method. ``figures`` has ``{method: {metric: value}}`` for each target."""
    live = detail.live and subject.explainer is not None
    targets = range(len(subject.results))
    steps = steps_for(sum(map(len, subject.results))) if detail.steps is None else detail.steps
    passes = costs(subject) if live else {}
    if address is None:
        address = address_of(subject.photo, detail.side, detail.quality)
    records = [[subject.record(name, index) for name in subject.methods] for index in targets]
    maps: list[list[dict[str, Any]]] = [[] for _ in targets]
    for index, result in enumerate(subject.results):
        metric_values = figures[index] if index < len(figures) else {}
        curve_steps = steps if live else 0
        curves_by_method = curves(subject, index, result, curve_steps, progress)
        for record, (name, attribution) in zip(records[index], result.items(), strict=True):
            map_values = {**_map(attribution, detail), **_sets(attribution, subject, index)}
            map_values["curve"] = curves_by_method.get(name)
            map_values["figures"] = dict(metric_values.get(name, {}))
            map_values["check"] = record.get("check")
            maps[index].append(map_values)
    return {
        "name": subject_name(subject),
        "photo": address,
        "size": list(subject.photo.size),
        "model": printable(subject.origin.name),
        "input": list(subject.input_size),
        "box": list(astuple(subject.box)),
        "crops": [list(astuple(crop)) for crop in subject.crops],
        "zero": _zero(subject),
        "grey": _grey(subject),
        "scan": not has_colors(subject.photo),
        "predictions": [
            # without a probability, its amount as text
            [
                printable(prediction.label),
                prediction.probability,
                *([prediction.amount] if prediction.probability is None else []),
            ]
            for prediction in subject.predicted
        ],
        "boxes": [
            subject.box.to_input(detection.box, ONE)
            for detection in subject.detections
            if detection.box is not None
        ],
        "targets": [_target(subject, index, live) for index in targets],
        "methods": [
            method_info(name, layer_of(attribution), passes.get(name))
            for name, attribution in subject.results[0].items()
        ],
        "maps": maps,
        "again": asdict(reproduction(subject) if repeated_by is None else repeated_by),
        "records": records,
    }


def summary(subject: Subject) -> dict[str, Any]:
    """A photo in a sheet's list, by keys that the page's scripts read: its best prediction, and the
    first target, whose map is shown."""
    best = next(iter(subject.predicted), None)
    target = printable(subject.targets[0])
    probability = None if best is None else best.probability
    return {
        "name": subject_name(subject),
        "label": target if best is None else printable(best.label),
        "target": target,
        "of_target": printable(subject.amount(0)),
        "probability": probability,
        "amount": subject.amount(0) if probability is None else "",
        "check": subject.record().get("check"),
    }


def subject_name(subject: Subject) -> str:
    """Return the name of a photo in a page: that of its file, or "photo"."""
    return printable(Path(subject.source).name) if subject.source else "photo"


def method_info(name: str, layer: str = "", passes: float | None = None) -> dict[str, Any]:
    """A method in a page, by keys that its scripts read; ``name`` may be that of a caller's own
    method, which is not registered.
    """
    description = "a method of the caller's own"
    paper = ""
    with suppress(ExplainError):
        description = get_method(name).summary
        paper = get_method(name).paper
    return {
        "name": printable(name),
        "title": printable(title_of(name)),
        "family": innermost_method(name).family,
        "about": description,
        "paper": paper,
        "layer": layer,
        "passes": passes,
        "control": innermost_method(name).control,
    }


def map_info(kind: str, quantised: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """One map in a page, with all keys that its scripts read: ``quantised`` is from `plane`, and
    ``values`` are those that differ from the empty defaults.
    """
    return {
        "kind": kind,
        "plane": quantised,
        "layers": [],
        "remark": "",
        "certainty": 1.0,
        "score": None,
        "delta": None,
        "samples": None,
        "curve": None,
        "figures": {},
        "check": None,
        **values,
    }


def _map(attribution: Attribution, detail: Detail) -> dict[str, Any]:
    """The first image's map in the form of `map_info`, with the maps of the single layers where
    several were fused."""
    values, kind = map_and_kind(attribution, detail.cells)
    layers = [
        {"layer": name, "plane": plane(array(maps[0]))}
        for name, maps in attribution.maps.items()
        if len(attribution.maps) > 1 and maps.ndim == 3
    ]
    return map_info(
        kind,
        plane(values, signed=attribution.style == "signed"),
        layers=layers,
        remark=remark(attribution),
        certainty=certainty(attribution),
        score=float(attribution.score[0]),
        delta=None if attribution.delta is None else float(attribution.delta[0]),
        samples=attribution.samples,
    )


def _sets(attribution: Attribution, subject: Subject, index: int) -> dict[str, Any]:
    """What a page adds to a map of sets of regions (at most ``reasons``): ``sets`` has the share of
    the photo of each, ``words`` a sentence about them. Empty for other maps.
    """
    if attribution.sets is None:
        return {}
    sizes = [{"size": region_set.size} for region_set in attribution.sets[0]]
    class_labels = None if subject.explainer is None else subject.explainer.categories
    sentence_text = printable(sentence(attribution, subject.targets[index], class_labels))
    return {"reasons": attribution.sets.masks.shape[1], "sets": sizes, "words": sentence_text}


def jpeg(photo: Image.Image, side: int, quality: int = 86) -> bytes:
    """Return a photo as a JPEG whose longer side has at most ``side`` pixels."""
    if max(photo.size) > side:
        photo = ImageOps.contain(photo, (side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    photo.save(buffer, "JPEG", quality=quality, optimize=True)
    return buffer.getvalue()


def address_of(photo: Image.Image, side: int, quality: int = 86) -> str:
    """Return an address that holds a photo, as `jpeg` makes it."""
    content = base64.b64encode(jpeg(photo, side, quality)).decode("ascii")
    return f"data:image/jpeg;base64,{content}"


def _grey(subject: Subject) -> int:
    """The mean brightness, from 0 to 255, of the part of the photo that the model saw: the page's
    legends show the colours of maps on this grey."""
    seen = subject.photo.crop(edges(subject.box, subject.photo.size)).convert("L")
    return round(float(np.asarray(seen).mean()))


def _zero(subject: Subject) -> list[int]:
    """The colour, three levels from 0 to 255, of a pixel that is zero after the preprocessing, as
    deleted pixels are shown; ImageNet's mean where it does not tell.
    """
    try:
        # what black becomes, and how far above it white lies
        black, span = scale_of(subject.explainer.preprocess)
    except (AttributeError, ExplainError, RuntimeError, TypeError, ValueError):
        return list(GREY)
    levels = (-black / torch.where(span == 0, 1, span)).clamp(0, 1) * 255
    colors = [round(level) for level in levels.tolist()]
    return colors if len(colors) == 3 else [colors[0]] * 3


def _target(subject: Subject, index: int, live: bool) -> dict[str, Any]:
    """The target with this index in a page: ``amount`` is the score in words without a probability,
    ``place`` from `marked_region`. With ``live``, the model may run.
    """
    attribution = next(iter(subject.results[index].values()))
    category = int(attribution.target[0]) if isinstance(attribution.target, torch.Tensor) else None
    probability = None
    if category is not None and subject.probabilities is not None:
        probability = float(subject.probabilities[category])
    values = {
        "label": printable(subject.targets[index]),
        "class": category,
        "probability": probability,
        "score": float(attribution.score[0]),
        "amount": printable(subject.amount(index)) if probability is None else "",
        "place": marked_region(subject, index, live=live),
    }
    detection = subject.boxes[index] if index < len(subject.boxes) else None
    if detection is not None:
        values |= {"class": detection.label, "probability": detection.probability, "amount": ""}
    return values
