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
from explain.report.reproduce import Reproduction, reproduction
from explain.report.subject import Subject

GREY = [124, 117, 104]  # the mean colour of ImageNet, where the zero of a model's input is not known


@dataclass(frozen=True)
class Detail:
    """How much of a photo a page holds.

    ``side`` is the largest side of the photo in pixels, ``quality`` that of its JPEG, ``cells`` the largest side of
    maps of single pixels (None: no limit). ``steps`` are those of the curves, 0 for none, and None for the default of
    `explain.report.curves.steps_for`. Without ``live`` the model does not run at all.
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
    """Return a photo, its maps, and all that is known of them.

    Args:
        figures: the values of metrics, for each target by method: ``{method: {metric: value}}``.
        progress: called with the passes done and their total, for the curves.
        made: how to repeat the explanation, where the subject itself does not say it.
        address: where the photo is, if it is not part of the page.
    """
    live = detail.live and subject.explainer is not None
    found = curves(subject, detail.steps, progress) if live else [{} for _ in subject.results]
    passes = costs(subject) if live else {}
    records = [[subject.record(name, index) for name in subject.methods] for index in range(len(subject.results))]
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
        "targets": [_target(subject, index, live) for index in range(len(subject.results))],
        "methods": [
            method_info(name, layer_of(attribution), passes.get(name))
            for name, attribution in subject.results[0].items()
        ],
        "maps": [
            [
                {
                    **_map(result[name], detail),
                    "curve": found[index].get(name),
                    "figures": dict(figures[index].get(name, {})) if index < len(figures) else {},
                    "verdict": record.get("verdict"),
                }
                for name, record in zip(subject.methods, records[index], strict=True)
            ]
            for index, result in enumerate(subject.results)
        ],
        "again": asdict(reproduction(subject) if made is None else made),
        "records": records,
    }


def summary(subject: Subject) -> dict[str, Any]:
    """Return the line of a contact sheet about a photo."""
    best, verdict = subject.predictions[:1], subject.record().get("verdict")
    return {
        "name": name_of(subject),
        "label": printable(best[0][0]) if best else printable(subject.targets[0]),
        "probability": best[0][1] if best else None,
        "target": printable(subject.targets[0]),
        "passed": None if verdict is None else verdict["passed"],
    }


def name_of(subject: Subject) -> str:
    """Return the name of a photo in a page."""
    return printable(Path(subject.source).name) if subject.source else "photo"


def method_info(name: str, layer: str = "", passes: float | None = None) -> dict[str, Any]:
    """Return a method as a page has it: its name, family, description and cost."""
    about, paper = "a method of the caller's own", ""
    try:
        known = get_method(name)
        about, paper = known.about, known.paper
    except ExplainError:
        pass
    return {
        "name": printable(name),
        "family": family(name),
        "about": about,
        "paper": paper,
        "layer": layer,
        "passes": passes,
        "control": control(name),
    }


def map_info(kind: str, drawn: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """Return a map as a page has it; ``drawn`` is what `plane` returns."""
    empty: dict[str, Any] = {"layers": [], "remark": "", "score": None, "delta": None, "samples": None}
    return {"kind": kind, "plane": drawn, **empty, "curve": None, "figures": {}, "verdict": None, **values}


def _map(attribution: Attribution, detail: Detail) -> dict[str, Any]:
    values, kind = map_of(attribution, detail.cells)
    layers = [
        {"layer": name, "plane": plane(each[0].float().cpu().numpy())}
        for name, each in attribution.maps.items()
        if len(attribution.maps) > 1 and each.ndim == 3
    ]
    return map_info(
        kind,
        plane(values, signed=attribution.style == "signed"),
        layers=layers,
        remark=remark(attribution),
        score=float(attribution.score[0]),
        delta=None if attribution.delta is None else float(attribution.delta[0]),
        samples=attribution.samples,
    )


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
    """The colour of a pixel that is zero after the preprocessing: deletion covers with it."""
    try:
        black, span = scale_of(subject.explainer.preprocess)
    except (AttributeError, ExplainError, RuntimeError, TypeError, ValueError):
        return list(GREY)
    levels = (-black / torch.where(span == 0, 1, span)).clamp(0, 1) * 255
    colors = [round(level) for level in levels.tolist()]
    return colors if len(colors) == 3 else [colors[0]] * 3


def _target(subject: Subject, index: int, live: bool) -> dict[str, Any]:
    attribution = next(iter(subject.results[index].values()))
    category = int(attribution.target[0]) if isinstance(attribution.target, torch.Tensor) else None
    known = category is not None and subject.probabilities is not None
    return {
        "label": printable(subject.targets[index]),
        "class": category,
        "probability": float(subject.probabilities[category]) if known else None,  # type: ignore[index]
        "score": float(attribution.score[0]),
        "place": place(subject, index, live=live),
    }
