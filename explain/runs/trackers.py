"""Maps in the tools that teams look at photos with: FiftyOne and Weights & Biases."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from explain._utils.errors import RunError, optional, shown
from explain.attribution.result import Attribution
from explain.data.boxes import Box
from explain.explanation.explanation import Explanation
from explain.render.styles import get_style, resampled_on_photo
from explain.store.reading import PhotoReader, Row, StoredRun

LONGEST = 640  # pixels along the longer side of a map in FiftyOne


class ShownMap(NamedTuple):
    """A map with what it is of, and with what is known of the photo: its file, its size (width,
    height), the part that maps cover, its label, and the prediction with its probability. What is
    not known is None. ``draw`` returns the photo with the map on it."""

    path: str | None
    size: tuple[int, int]
    box: Box
    label: str | None
    prediction: str | None
    prediction_probability: float | None
    method: str
    target: str
    probability: float | None
    attribution: Attribution
    draw: Callable[[], Image.Image]


def shown_photos(
    maps: StoredRun | Explanation | Iterable[Explanation], source: Any = None
) -> Iterator[list[ShownMap]]:
    """The maps of each photo of a run, of one explanation or of several. ``source`` is where the
    photos of a run are, if they have moved."""
    if isinstance(maps, StoredRun):
        reader = PhotoReader(maps, source)
        # (*rows,) makes a list of the rows of each photo
        for _, (*rows,) in groupby(maps.rows(), key=lambda row: row.name):
            photo = cache(partial(reader.picture, rows[0]))  # read once, where it is needed
            yield [_of_row(row, photo) for row in rows]
        return
    for one in [maps] if isinstance(maps, Explanation) else maps:
        if not isinstance(one, Explanation):
            raise RunError(
                f"maps must be a run, an explanation or a list of these, got {shown(one)}; open a "
                "file with explain.open_run"
            )
        best = next(iter(one.predicted), None)
        of_photo: dict[str, Any] = {
            "path": one.source,
            "size": one.photo.size,
            "box": one.box,
            "label": None,
            "prediction": None if best is None else best.label,
            "prediction_probability": None if best is None else best.probability,
        }
        shown_maps = []
        for number, (target, by_method) in enumerate(zip(one.targets, one.results, strict=True)):
            probability = one.answer(number).probability
            for method, attribution in by_method.items():
                shown_maps.append(
                    ShownMap(
                        **of_photo,
                        method=method,
                        target=target,
                        probability=probability,
                        attribution=attribution,
                        draw=partial(one.overlay, method, number),
                    )
                )
        yield shown_maps


def _of_row(row: Row, photo: Callable[[], Image.Image]) -> ShownMap:
    """A map of a run."""
    columns = {name: getattr(row, name) for name in ShownMap._fields if name != "draw"}
    return ShownMap(**columns, draw=lambda: row.overlay(get_style(row.style), photo()))


def to_fiftyone(
    maps: StoredRun | Explanation | Iterable[Explanation],
    dataset: Any = None,
    *,
    boxes: float | None = None,
) -> Any:
    """Add a sample for each photo to a data set of FiftyOne: labels as "ground_truth" and
    "prediction", and each method's maps as heatmaps (of a second target as "gradcam_2").

    Args:
        maps: a run, an explanation, or a list of these; the photos are files.
        dataset: a ``fiftyone.Dataset``; a new one by default.
        boxes: a share of each map's maximum, whose connected parts become detections.

    Returns:
        The data set.

    Raises:
        RunError: FiftyOne is not installed, or a photo has no file.
    """
    fo = optional("fiftyone", "for its data sets", "fiftyone", RunError)
    samples = []
    for shown_maps in shown_photos(maps):
        first = shown_maps[0]  # what is known of the photo is the same for all of its maps
        if first.path is None:
            raise RunError("photos must be files for FiftyOne, got one without; save it first")
        sample = fo.Sample(filepath=os.path.abspath(first.path))
        if first.label is not None:
            sample["ground_truth"] = fo.Classification(label=first.label)
        if first.prediction is not None:
            sample["prediction"] = fo.Classification(
                label=first.prediction, confidence=first.prediction_probability
            )
        width, height = first.size
        scale = min(1.0, LONGEST / max(width, height))
        map_size = (max(1, round(width * scale)), max(1, round(height * scale)))
        # the part that maps cover, in a map of that size
        region = Box(*(edge * scale for edge in vars(first.box).values()))
        counts: dict[str, int] = {}
        for one in shown_maps:
            # names of fields are identifiers, in which "gradcam++" must differ from "gradcam"
            name = re.sub(r"\W+", "_", one.method.replace("+", "p")).strip("_")
            counts[name] = counts.get(name, 0) + 1
            name += f"_{counts[name]}" if counts[name] > 1 else ""
            heatmap = resampled_on_photo(one.attribution.heatmap[0].cpu().numpy(), map_size, region)
            sample[name] = fo.Heatmap(map=heatmap, target=one.target, probability=one.probability)
            if boxes is not None:
                detections = [
                    fo.Detection(label=one.target, bounding_box=part)
                    for part in _parts_of(one, boxes)
                ]
                sample[f"{name}_parts"] = fo.Detections(detections=detections)
        samples.append(sample)
    dataset = fo.Dataset() if dataset is None else dataset
    dataset.add_samples(samples)
    return dataset


def _parts_of(shown_map: ShownMap, share: float) -> Iterator[list[float]]:
    """The boxes of a map's parts above a ``share`` of its maximum, clipped to the photo: left, top,
    width and height, each as a share of the photo's side."""
    width, height = shown_map.size
    attribution = shown_map.attribution
    for box in attribution.boxes(share)[0]:
        left, top, right, bottom = shown_map.box.to_photo(box, attribution.size)
        x0, x1 = np.clip((left / width, right / width), 0.0, 1.0).tolist()
        y0, y1 = np.clip((top / height, bottom / height), 0.0, 1.0).tolist()
        if x0 < x1 and y0 < y1:  # else it lies in the padding
            yield [x0, y0, x1 - x0, y1 - y0]


COLUMNS = ("photo", "map", "method", "target", "probability", "label", "prediction", "score")
"""The columns of the table in Weights & Biases."""


def to_wandb(
    maps: StoredRun | Explanation | Iterable[Explanation],
    run: Any = None,
    *,
    key: str = "explain",
    source: Any = None,
) -> Any:
    """Log a table to a run of Weights & Biases, with a line for each map: the photo with the map on
    it, method, target, label and prediction.

    Args:
        maps: a run, an explanation, or a list of these.
        run: what ``wandb.init`` returned; the current one by default.
        key: the name that the table is logged under.
        source: where the photos of a run are, if they had no file or it has moved.

    Returns:
        The ``wandb.Table``.

    Raises:
        RunError: Weights & Biases is not installed, or has no run; a photo cannot be read.
    """
    wandb = optional("wandb", "for its tables", "wandb", RunError)
    current = wandb.run if run is None else run
    if current is None:
        raise RunError("run must be one of Weights & Biases, got none; call wandb.init() first")
    table = wandb.Table(columns=list(COLUMNS))
    for shown_maps in shown_photos(maps, source):
        for one in shown_maps:
            name = os.path.basename(one.path or "") or "photo"
            picture = wandb.Image(one.draw(), caption=f"{one.target}, {one.method}")
            score = float(one.attribution.score[0])
            table.add_data(  # in the order of `COLUMNS`
                name,
                picture,
                one.method,
                one.target,
                one.probability,
                one.label,
                one.prediction,
                score,
            )
    current.log({key: table})
    return table
