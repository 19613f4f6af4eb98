"""`Run`: the file of a run, and all that can be made of it without a model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from explain._utils.errors import keywords
from explain.hooks.layer_names import Where
from explain.runs.exporting import export
from explain.runs.parts import index_of
from explain.runs.pictures import to_html, write_pictures
from explain.runs.reading import StoredRun

if TYPE_CHECKING:
    from explain.explanation.explainer import Explainer
    from explain.insight import Insight


class Run(StoredRun):
    """A run over many photos, and all that can be made of it without a model.

    ``len(run)`` is the number of rows: one for each photo, method and target. Nothing is held in memory.

    Args:
        file: the file that `explain.run` wrote, or the folder or address that `run_on_ray` wrote. The Parquet files of
            a folder are entered into an SQLite file first, those that are new since the last time; a warning names it.

    Raises:
        RunError: there is no run, it cannot be read, or a later version has written it.

    >>> import explain, tempfile
    >>> from PIL import Image
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    >>> explainer = explain.Explainer(model, preprocess=explain.models.CenterCrop(8))
    >>> photos = [Image.new("RGB", (9, 8), color) for color in ("red", "blue")]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = explain.run(photos, explainer, ["gradcam", "saliency"], output=f"{folder}/run.sqlite", workers=0)
    ...     run = Run(f"{folder}/run.sqlite")
    ...     len(run), run.methods, [row.name for row in run.rows(method="gradcam")]
    (4, ['gradcam', 'saliency'], ['photo 0', 'photo 1'])
    """

    export = export
    write_pictures = write_pictures
    to_html = to_html

    def __init__(self, file: str | os.PathLike[str]) -> None:
        in_folder = "://" in os.fspath(file) or os.path.isdir(file)
        super().__init__(index_of(file) if in_folder else file)

    def insight(
        self,
        method: str | None = None,
        *,
        explainer: Explainer | None = None,
        source: Any = None,
        channels: int = 0,
        concepts: int = 0,
        examples: Any = None,
        target: int | str | None = None,
        layer: Where | None = None,
        seed: int = 0,
    ) -> Insight:
        """Summarise the maps: where classes lie, clusters of reasons, mistakes; see `explain.insight`."""
        from explain.insight import insight  # a convenience: that room builds on this one

        return insight(
            self, method, explainer=explainer, source=source, channels=channels, concepts=concepts, examples=examples,
            target=target, layer=layer, seed=seed,
        )  # fmt: skip


@keywords()
def open_run(file: str | os.PathLike[str]) -> Run:
    """Open a run for reading; no model is loaded.

    Args:
        file: the ``output`` of `explain.run` or `run_on_ray`; the new Parquet files of a folder are entered into an
            SQLite file first, and a warning names it.

    Raises:
        RunError: there is no run, or a later version has written it.

    >>> open_run("none.sqlite")
    Traceback (most recent call last):
    explain.RunError: run 'none.sqlite' must be a file, but there is none; check the path
    """
    return Run(file)
