"""One photo that was explained, as the plain values that a page shows."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from explain._utils.errors import ExplainError, printable
from explain.attribution.pictures import layer_of, remark
from explain.attribution.result import Attribution
from explain.baselines.base import scale_of
from explain.engine.settings import Progress
from explain.methods.registry import control, family, get_method
from explain.report.curves import costs, curves
from explain.report.maps import map_of, place, plane
from explain.report.reproduce import Reproduction, again
from explain.report.subject import Subject

GREY = (124, 117, 104)  # the mean colour of ImageNet, where a model's own zero is not known


@dataclass(frozen=True)
class Detail:
    """How much of a photo a page holds.

    ``side`` is the photo's longer side in pixels at most, ``quality`` that of its JPEG, ``cells`` the longer side of
    maps of single pixels (None: all that they have). ``steps`` are those of the curves, 0 for none, and None for
    as many as `explain.report.curves.steps_for` says. Without ``live`` the model is not run at all.
    """

    side: int = 1280
    quality: int = 86
    cells: int | None = None
    steps: int | None = 0
    live: bool = True


def item(
    subject: Subject,
    detail: Detail,
    *,
    figures: Sequence[Mapping[str, Any]] = (),
    progress: Progress | None = None,
    made: Reproduction | None = None,
    address: str | None = None,
) -> dict[str, Any]:
    """Return a photo, its maps, and all that is said of them.

    Args:
        figures: for each target, by method, what metrics say: ``{method: {metric: value}}``.
        progress: called with the runs done and their total, for the curves.
        made: how to make it again, where the subject itself does not say it.
        address: where the photo is, if it does not travel along.
    """
    run = detail.live and subject.explainer is not None
    found = curves(subject, detail.steps, progress) if run else [{} for _ in subject.results]
    passes = costs(subject) if run else {}
    made = again(subject) if made is None else made
    records = [{name: subject.record(name, index) for name in result} for index, result in enumerate(subject.results)]
    return {
        "name": name_of(subject),
        "photo": _photo(subject.photo, detail) if address is None else address,
        "size": list(subject.photo.size),
        "model": printable(subject.origin.name),
        "input": list(subject.input_size),
        "box": list(asdict(subject.box).values()),
        "crops": [list(asdict(crop).values()) for crop in subject.crops],
        "zero": _zero(subject),
        "predictions": [[printable(label), probability] for label, probability in subject.predictions],
        "targets": [_target(subject, index, run) for index in range(len(subject.results))],
        "methods": [_method(attribution, passes) for attribution in subject.results[0].values()],
        "maps": [
            [
                {
                    **_map(attribution, detail),
                    "curve": found[index].get(name),
                    "figures": _of(figures, index, name),
                    "verdict": records[index][name].get("verdict"),
                }
                for name, attribution in result.items()
            ]
            for index, result in enumerate(subject.results)
        ],
        "again": asdict(made),
        "records": [[subject.record(name, index) for name in subject.methods] for index in range(len(subject.results))],
    }


def summary(subject: Subject) -> dict[str, Any]:
    """What a contact sheet says of a photo before it is opened."""
    best, verdict = subject.predictions[:1], subject.record().get("verdict")
    return {
        "name": name_of(subject),
        "label": printable(best[0][0]) if best else printable(subject.targets[0]),
        "probability": best[0][1] if best else None,
        "target": printable(subject.targets[0]),
        "passed": None if verdict is None else verdict["passed"],
    }


def name_of(subject: Subject) -> str:
    """What a photo is called in a page."""
    return printable(Path(subject.source).name) if subject.source else "photo"


def _of(figures: Sequence[Mapping[str, Any]], index: int, method: str) -> dict[str, Any]:
    return dict(figures[index].get(method, {})) if index < len(figures) else {}


def _photo(photo: Image.Image, detail: Detail) -> str:
    """The photo as the address of a JPEG."""
    share = min(1.0, detail.side / max(photo.size))
    if share < 1:
        size = max(1, round(photo.width * share)), max(1, round(photo.height * share))
        photo = photo.resize(size, Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    photo.save(buffer, "JPEG", quality=detail.quality, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _zero(subject: Subject) -> list[int]:
    """The colour that zero is behind the preprocessing: what deletion covers with."""
    preprocess = getattr(subject.explainer, "preprocess", None)
    if preprocess is None:
        return list(GREY)
    try:
        black, span = scale_of(preprocess)
    except (ExplainError, RuntimeError, TypeError, ValueError):
        return list(GREY)
    levels = (-black / torch.where(span == 0, 1, span)).clamp(0, 1) * 255
    colors = [round(level) for level in levels.tolist()]
    return colors if len(colors) == 3 else [colors[0]] * 3


def _target(subject: Subject, index: int, live: bool) -> dict[str, Any]:
    attribution = next(iter(subject.results[index].values()))
    chosen, probabilities = attribution.target, subject.probabilities
    known = probabilities is not None and isinstance(chosen, torch.Tensor)
    return {
        "label": printable(subject.targets[index]),
        "class": int(chosen[0]) if isinstance(chosen, torch.Tensor) else None,
        "probability": float(probabilities[int(chosen[0])]) if known else None,  # type: ignore[index]
        "score": float(attribution.score[0]),
        "place": place(subject, index, live=live),
    }


def _method(attribution: Attribution, passes: Mapping[str, float]) -> dict[str, Any]:
    about = paper = ""
    try:
        known = get_method(attribution.method)
        about, paper = known.about, known.paper
    except ExplainError:  # the caller's own
        about = "a method of the caller's own"
    name = attribution.method
    return {
        "name": printable(name),
        "family": family(name),
        "about": about,
        "paper": paper,
        "layer": layer_of(attribution),
        "passes": passes.get(name),
        "control": control(name),
    }


def _map(attribution: Attribution, detail: Detail) -> dict[str, Any]:
    values, kind = map_of(attribution, detail.cells)
    layers = [
        {"layer": name, "plane": plane(each[0].float().cpu().numpy())}
        for name, each in attribution.maps.items()
        if len(attribution.maps) > 1 and each.ndim == 3
    ]
    return {
        "kind": kind,
        "plane": plane(values, signed=attribution.style == "signed"),
        "layers": layers,
        "remark": remark(attribution),
        "score": float(attribution.score[0]),
        "delta": None if attribution.delta is None else float(attribution.delta[0]),
        "runs": attribution.samples,
    }
