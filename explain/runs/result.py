"""`Run`: the file of a run, and all that can be made of it without a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from explain._utils.errors import keywords
from explain.hooks.layer_names import Where
from explain.render.styles import StyleLike
from explain.runs.exporting import export
from explain.runs.parts import file_of
from explain.runs.pictures import to_html, write_pictures
from explain.runs.reading import Stored

if TYPE_CHECKING:
    from explain.explanation.explainer import Explainer
    from explain.insight import Insight


class Run(Stored):
    """A run over many photos, as it is in its file.

    ``len(run)`` is the number of rows: one for each photo, method and target. Nothing is kept in memory.

    Args:
        file: where it is: the file that `explain.run` wrote, or the folder or address that `run_on_ray` wrote. The
            Parquet files of a folder are entered into an SQLite file first, those that are new since the last time;
            a warning says where that is.

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

    def __init__(self, file: str | os.PathLike[str]) -> None:
        super().__init__(file_of(file))

    def export(self, file: str | os.PathLike[str], *, overwrite: bool = False) -> int:
        """Write all rows into one table, and return how many; see `explain.runs.export`."""
        return export(self, file, overwrite=overwrite)

    def write_pictures(
        self,
        which: str,
        folder: str | os.PathLike[str],
        *,
        source: Any = None,
        style: StyleLike | None = None,
        overwrite: bool = False,
    ) -> tuple[list[Path], dict[str, str]]:
        """Write overlays of some photos, such as "worst:50"; see `explain.runs.write_pictures`."""
        return write_pictures(self, which, folder, source=source, style=style, overwrite=overwrite)

    def to_html(
        self,
        path: str | os.PathLike[str],
        which: str = "source:200",
        *,
        source: Any = None,
        title: str | None = None,
        overwrite: bool = False,
    ) -> tuple[Path, dict[str, str]]:
        """Write some photos as one page, to filter, sort and open; see `explain.runs.to_html`."""
        return to_html(self, path, which, source=source, title=title, overwrite=overwrite)

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
        """Say what the maps say together: where classes look, clusters of reasons, mistakes; see `explain.insight`."""
        from explain.insight import insight  # a convenience: that room builds on this one

        return insight(
            self, method, explainer=explainer, source=source, channels=channels, concepts=concepts, examples=examples,
            target=target, layer=layer, seed=seed,
        )  # fmt: skip


@keywords()
def open_run(file: str | os.PathLike[str]) -> Run:
    """Open a run for reading; no model is loaded.

    Args:
        file: what was given to `explain.run` or `run_on_ray` as ``output``; of a folder, the Parquet files that are new
            are entered into an SQLite file first, and a warning says where that is.

    Raises:
        RunError: there is no run, or a later version has written it.

    >>> open_run("none.sqlite")
    Traceback (most recent call last):
    explain.RunError: run 'none.sqlite' must be a file, but there is none; check the path
    """
    return Run(file)
