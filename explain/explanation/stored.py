"""Results of a photo that are in a folder already, and still hold: what `--skip-existing` skips."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from explain.attribution.encoding import decode
from explain.attribution.records import digest
from explain.attribution.selection import requested
from explain.explanation.explainer import Explainer
from explain.hooks import intervene, preserve

CLOSE = 5e-3
"""The difference of two scores, as a share, that devices may make."""


def stored_results(
    folder: str, stem: str, photo: Image.Image, explainer: Explainer, keys: Mapping[str, str], count: int,
    formats: tuple[str, str] = ("png", "npy"),
) -> tuple[list[dict[str, Any]], list[str]] | None:  # fmt: skip
    """Return the records of a photo in a folder and all their files, or None where some are missing or do not hold.

    There must be a record of these very pixels and of the same question, with its values and picture, for each method
    and target; several have a sheet, which is written last. The model must still give the scores of the records, which
    takes a forward pass.

    Args:
        folder: where they would be.
        stem: what their names begin with.
        photo: as `explain.data.images.load_image` reads it.
        explainer: the model.
        keys: for each method what is asked, as the ``request`` of its record has it.
        count: the number of targets.
        formats: of pictures and of values.
    """
    image = {"sha256": digest(photo.tobytes()), "size": list(photo.size)}
    records: dict[Path, dict[str, Any]] = {}
    for path in sorted(Path(folder).glob(f"{escape(stem)}-*.json")):  # those of photos with longer names are among them
        with suppress(OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):  # it is damaged
            record = json.loads(path.read_bytes())
            method = record["method"]
            if record["request"][method] == keys.get(method) and image.items() <= record["image"].items():
                records[path] = record
    if len(records) < count * len(keys):
        return None
    files = [path.with_suffix(f".{suffix}") for path in records for suffix in (*formats, "json")]
    if len(records) > 1:
        first = next(iter(records))
        method = records[first]["method"].replace("(", "-").replace(")", "")
        name = first.stem.removesuffix(f"-{method}") if count == 1 else stem  # with the label, where one was named
        files.append(first.with_name(f"{name}-sheet.{formats[0]}"))
    found = list(records.values())
    if not all(file.is_file() for file in files) or not _still_hold(found, photo, explainer):
        return None
    return found, list(map(str, files))


def _still_hold(records: list[dict[str, Any]], photo: Image.Image, explainer: Explainer) -> bool:
    """Whether the model gives the scores that the records have."""
    targets = [record["target"] if record["asked"] is None else decode(record["asked"]) for record in records]
    x = explainer._inputs(explainer.as_input(photo))
    how: Any = {"categories": explainer.categories, "activation": explainer.activation}
    with intervene(explainer.model, explainer.interventions):
        request = requested(explainer.model, x, "saliency", None, targets, None, **how)
        with request._reading(), preserve.untouched(request.model), torch.no_grad():
            output = request.inputs.call(request.model)
            scores = [float(target.settled(output, 1).pick(output, 1)[0]) for target in request.targets]
    pairs = zip(records, scores, strict=True)
    return all(math.isclose(record["score"], score, rel_tol=CLOSE, abs_tol=CLOSE / 100) for record, score in pairs)
