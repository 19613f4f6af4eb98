"""Results of a photo that are in a folder already, and still hold: what `--skip-existing` skips."""

import math
from collections.abc import Mapping
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from explain._utils.errors import RecordError
from explain.attribution.encoding import decode
from explain.attribution.records import digest
from explain.attribution.selection import requested
from explain.explanation.explainer import Explainer
from explain.explanation.loading import Saved, load
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
    pixels = digest(photo.tobytes())
    results: list[Saved] = []
    for path in sorted(Path(folder).glob(f"{escape(stem)}-*.json")):  # those of photos with longer names are among them
        with suppress(RecordError):
            saved = load(path)
            key = (saved.content.request or {}).get(saved.method)
            has_picture = path.with_suffix(f".{formats[0]}").is_file()
            is_same = saved.content.image.sha256 == pixels and saved.content.values.format == formats[1]
            if is_same and has_picture and key is not None and key == keys.get(saved.method):
                results.append(saved)
    if len(results) < count * len(keys) or not _still_hold(results, photo, explainer):
        return None
    files = [saved.path.with_suffix(f".{suffix}") for saved in results for suffix in (*formats, "json")]
    if len(results) > 1:
        sheets = sorted(Path(folder).glob(f"{escape(stem)}*-sheet.{formats[0]}"))[:1]
        if not sheets:
            return None
        files += sheets
    return [dict(saved.record) for saved in results], list(map(str, files))


def _still_hold(results: list[Saved], photo: Image.Image, explainer: Explainer) -> bool:
    """Whether the model gives the scores that the records have."""
    records = [saved.content for saved in results]
    targets = [record.target if record.asked is None else decode(record.asked) for record in records]
    x = explainer._inputs(explainer.as_input(photo))
    how: Any = {"categories": explainer.categories, "activation": explainer.activation}
    with intervene(explainer.model, explainer.interventions):
        request = requested(explainer.model, x, "saliency", None, targets, None, **how)
        with request._reading(), preserve.untouched(request.model), torch.no_grad():
            output = request.inputs.call(request.model)
            scores = [float(target.settled(output, 1).pick(output, 1)[0]) for target in request.targets]
    pairs = zip(records, scores, strict=True)
    return all(math.isclose(record.score or 0, score, rel_tol=CLOSE, abs_tol=CLOSE / 100) for record, score in pairs)
