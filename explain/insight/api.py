"""`insight`: what the maps of a run say together."""

from __future__ import annotations

import os
from typing import Any

from explain._utils.errors import keywords
from explain.explanation.explainer import Explainer
from explain.hooks.layer_names import Where
from explain.insight.class_statistics import looks
from explain.insight.clusters import reasons
from explain.insight.confusions import pairs, with_reasons
from explain.insight.maps import read_maps
from explain.insight.model_insight import insight_of_model
from explain.insight.reattribution import RunPhotos, method_in
from explain.insight.result import Insight
from explain.runs.result import Run, open_run


@keywords()
def insight(
    run: Run | str | os.PathLike[str],
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
    """Say what the maps of a run say together: where classes look, clusters of reasons, mistakes.

    Args:
        run: a run, or its file or folder.
        method: whose maps; by default the first of the run.
        explainer: what the run was made with; with it, mistakes are explained. What follows needs it.
        source: where photos come from that had no file.
        channels: of how many channels of a layer it says what they see; those that do most for ``target``.
        concepts: how many concepts are looked for that all photos share.
        examples: a source of photos, such as a folder, that have a concept: is ``target`` read from it?
        target: a class, by number or label; for channels, None is the best class of each photo.
        layer: where channels and concepts are looked for; None finds the last feature map.
        seed: of what is drawn by chance.

    Raises:
        RunError: there is no such run or method, the explainer is not that of the run, or it is needed.
        TargetError, LayerError: there is no such class, or layer.

    >>> insight("none.sqlite")
    Traceback (most recent call last):
    explain.RunError: run 'none.sqlite' must be a file, but there is none; check the path
    """
    stored = run if isinstance(run, Run) else open_run(run)
    maps = read_maps(stored, method)
    photos = None if explainer is None else RunPhotos(stored, explainer, source)
    further = insight_of_model(
        photos, channels=channels, concepts=concepts, examples=examples, target=target, layer=layer
    )
    found = pairs(stored)
    if photos is not None:
        found = with_reasons(found, photos, method_in(stored, maps.method))
    return Insight(stored, maps.method, maps, looks(maps), reasons(maps, seed=seed), found, further)
