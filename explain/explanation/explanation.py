"""`Explanation`: the attributions of one photo; as pictures, files and records."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch
from PIL import Image

from explain._utils.errors import MethodError, TargetError, keywords, printable
from explain._utils.html import png
from explain._utils.spelling import did_you_mean
from explain.attribution import pictures
from explain.attribution.pictures import Look, Scene, array, layer_of, percent
from explain.attribution.records import (
    FORMAT,
    ModelOrigin,
    RecordedRequest,
    digest,
    estimate_of,
    options_run,
    values_of,
    versions,
)
from explain.attribution.result import Attribution, alone, apart
from explain.data.files import Files, distinct, slug
from explain.data.images import Box
from explain.engine.settings import Progress
from explain.methods.registry import get_method
from explain.render import captions, figure, sheets
from explain.render.captions import Mark
from explain.render.sheets import Layout
from explain.render.styles import StyleLike
from explain.report.reported import Reportable, widget
from explain.targets import find_label
from explain.targets.outputs import Outputs, Prediction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from explain.checks import Verdict

SHOWN_PREDICTIONS = 5


class NotExplainedError(MethodError, KeyError):
    """An explanation has no map of this method."""


class StyleOptions(TypedDict, total=False):
    """How maps are drawn; see `Explanation.overlay`."""

    style: StyleLike | None
    alpha: float | None
    colormap: str | None


@dataclass(frozen=True, eq=False, repr=False)
class Explanation(Reportable):
    """The attributions of one photo, by method and target; a notebook displays it as a page.

    ``explanation["gradcam"]`` is the attribution of a method for the first target, and iterating gives the methods'
    names. ``results`` has a dictionary of attributions by method for each target. ``box`` is the part of the photo that
    the model saw and that the maps cover; where it saw several, ``crops`` are these, and ``box`` is the whole photo.
    ``probabilities`` ``(K,)`` are those of the classes, where the model has any, and ``outputs`` says how they were
    computed. ``style`` replaces each method's own style in pictures. ``explainer`` made this, and can explain the photo
    further; ``request`` are its arguments. Everything else works without them: a copy and a pickle hold the data, on
    the CPU, and never the model; there, both are None. ``verdicts`` are those of `check`, by the index of the target.
    """

    photo: Image.Image = field(repr=False)
    source: str | None
    origin: ModelOrigin
    box: Box
    results: tuple[Mapping[str, Attribution], ...] = field(repr=False)
    input_size: tuple[int, int]
    question: RecordedRequest = field(repr=False)
    categories: Sequence[str] | None = field(default=None, repr=False)
    probabilities: torch.Tensor | None = field(default=None, repr=False)
    crops: tuple[Box, ...] = ()
    style: StyleLike | None = None
    explainer: Any = field(default=None, repr=False)
    request: Any = field(default=None, repr=False)
    verdicts: dict[int, Verdict] = field(default_factory=dict, repr=False)
    outputs: Outputs = field(default_factory=Outputs, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        results = tuple({name: apart(each) for name, each in result.items()} for result in self.results)
        probabilities = None if self.probabilities is None else alone(self.probabilities)
        held = {"results": results, "probabilities": probabilities, "verdicts": dict(self.verdicts)}
        return {**vars(self), **held, "explainer": None, "request": None}

    @property
    def attributions(self) -> Mapping[str, Attribution]:
        """The attributions for the first target, by method."""
        return self.results[0]

    def __getitem__(self, method: str) -> Attribution:
        """Return the attribution of one method, for the first target."""
        return self._attribution(method, 0)

    def __iter__(self) -> Iterator[str]:
        """Go through the names of the methods, as through those of a dictionary."""
        return iter(self.results[0])

    def __len__(self) -> int:
        return len(self.results[0])

    def __contains__(self, method: object) -> bool:
        return method in self.results[0]

    @property
    def values(self) -> torch.Tensor:
        """The raw values of the first method for the first target: ``(h, w)`` of a layer, ``(H, W)`` or ``(C, H, W)``.

        Those of another are ``explanation.results[1]["saliency"].values[0]``.
        """
        return self._attribution(None, 0).values[0]

    @property
    def heatmap(self) -> torch.Tensor:
        """``(H, W)`` from 0 to 1 at the resolution of the model's input, of the first method for the first target."""
        return self._attribution(None, 0).heatmap[0]

    @property
    def methods(self) -> list[str]:
        return list(self.results[0])

    @property
    def targets(self) -> list[str]:
        """The label of each target that was explained."""
        return [self._label(index) for index in range(len(self.results))]

    @property
    def predictions(self) -> list[tuple[str, float]]:
        """The best labels with their probabilities, best first; empty for a model that gives no class scores.

        Where several may be true of one photo, all that are more probable than not; of one output alone, yes and no.
        """
        return [(each.label, each.probability) for each in self.predicted]

    @property
    def predicted(self) -> list[Prediction]:
        """The same with the class of each; None for the "no" of a model with one output."""
        if self.probabilities is None:
            return []
        return self.outputs.predicted(self.probabilities, self.categories, max(SHOWN_PREDICTIONS, len(self.results)))

    @keywords(StyleOptions)
    def overlay(
        self,
        method: str | None = None,
        target: int | str = 0,
        *,
        caption: bool = False,
        **options: Unpack[StyleOptions],
    ) -> Image.Image:
        """Return the photo, at its own resolution, with an attribution drawn on it.

        Parts that the model did not see are pale and hatched.

        Args:
            method: which of `methods`; the first by default.
            target: which of `targets`, by position or label.
            style: "heat", "contour", "mask" or "spotlight", or one of `explain.render` with options of your own. By
                default the explanation's, or else the method's own: heat for maps of a layer, and for methods that
                give a value for each pixel what shows them best.
            caption: put label, probability, method and layer in a strip below; a photo of less than 320 pixels is
                enlarged for it.
            alpha: opacity of the heat, 0 to 1.
            colormap: a colour map of matplotlib, instead of the style's own.

        Raises:
            ExplainError: the method or target was not explained, or the style is unknown or has no such option.
        """
        index = self._target(target)
        attribution = self._attribution(method, index)
        chosen = self._look(**options).of(attribution.style)
        if not caption:
            return self.scene.overlay(attribution, chosen)
        scene = self.scene.enlarged(captions.enlargement(self.photo.size))
        probability = self._probability(index)
        details = [attribution.method, pictures.remark(attribution), layer_of(attribution), self._model]
        return captions.caption(
            scene.overlay(attribution, chosen),
            self._label(index),
            " · ".join(part for part in details if part),
            scene.legend(chosen),
            end="" if probability is None else f", {percent(probability)}",
            marks=self._marks(attribution.method, index),
        )

    @property
    def scene(self) -> Scene:
        """The photo, where maps lie on it, and which parts of it the model saw."""
        return Scene(self.photo, self.box, self.crops or (self.box,))

    @keywords(StyleOptions)
    def layout(self, **options: Unpack[StyleOptions]) -> Layout:
        """Return the contents of `sheet` and `figure`: the photo and all maps, with titles and legends."""
        look = self._look(**options)
        titles = [self._titled(index) for index in range(len(self.results))]
        predictions = ", ".join(f"{label} {percent(probability)}" for label, probability in self.predictions)
        return Layout(
            title=titles[0] if len(titles) == 1 else " · ".join(self.targets),
            detail=f"{self._model}: {predictions}" if predictions else self._model,
            groups=tuple(pictures.groups(self.scene, self.results, titles, look, self._marks)),
            legends=pictures.legends(self.scene, self.results, look),
        )

    @keywords()
    def check(
        self,
        methods: str | Sequence[str] | None = None,
        target: int | str = 0,
        *,
        seed: int = 0,
        batch_size: int | None = None,
        progress: Progress | None = None,
    ) -> Verdict:
        """Run sanity checks: do the maps depend on the model and the class, are they faithful and stable?

        From then on, the record, captions and sheets contain the results. At most 250 covered photos are run for each
        map, besides the method's own runs in other settings. See `explain.checks`.

        Args:
            methods: which of `methods`; all of them by default.
            target: which of `targets`, by position or label.
            seed: of random weights, copies and noise.
            batch_size, progress: as for `explain.attribute`.

        Returns:
            A `Verdict`, which prints as a table: ``verdict.passed`` has the result of each method, and
            ``verdict["gradcam"].faithful`` has ``passed``, ``figure`` and ``reason``.

        Raises:
            MetricError: this is a copy without a model; or the maps are of several crops.
            ExplainError: the method or target was not explained.
        """
        from explain.checks.verdict import check_explained

        index = self._target(target)
        names = self.methods if methods is None else [methods] if isinstance(methods, str) else methods
        found = [self._attribution(name, index) for name in names]
        return check_explained(self, found, index, seed=seed, batch_size=batch_size, progress=progress)

    @keywords(StyleOptions)
    def figure(self, **options: Unpack[StyleOptions]) -> Figure:
        """Return a matplotlib figure with the photo and all methods side by side; options as for `overlay`."""
        return figure.figure(self.layout(**options), self.alternative)

    @keywords(StyleOptions)
    def sheet(self, tile: int = 300, **options: Unpack[StyleOptions]) -> Image.Image:
        """Return the photo and all methods side by side, under a title; ``tile`` is the side of a picture in pixels."""
        return sheets.sheet(self.layout(**options), tile)

    @property
    def alternative(self) -> str:
        """The alternative text of the pictures."""
        source = f"the photo {Path(self.source).name}" if self.source else "a photo"
        return f"{source} with maps of the evidence for {' and '.join(self.targets)}: {', '.join(self.methods)}"

    @keywords(StyleOptions)
    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        stem: str | None = None,
        overwrite: bool = False,
        html: str | None = None,
        **options: Unpack[StyleOptions],
    ) -> list[Path]:
        """Write for each method and target the overlay (PNG), the raw values (``.npy``) and a record (JSON).

        Where there is more than one, a sheet with all of them side by side comes last.

        The folder is made if needed. Each file appears complete or not at all. The names begin with ``stem``, by
        default the photo's own name. ``style``, ``alpha`` and ``colormap`` are those of `overlay`. ``html`` is a page
        of `to_html` to write along.

        Returns:
            The paths, in that order.

        Raises:
            OutputError: a file exists and ``overwrite`` is not set, or the folder cannot be written; then nothing has
                been written.
        """
        return self._files(Files(folder, overwrite=overwrite), stem, html, **options).write()

    def packed(self) -> bytes:
        """Return the files of `save` as a ZIP archive."""
        return self._files(Files(""), None, None).packed()

    def _files(self, files: Files, stem: str | None, html: str | None, **options: Unpack[StyleOptions]) -> Files:
        photo = slug(str(stem) if stem else (Path(self.source).stem if self.source else "image"))
        several = len(self.results) > 1
        stems = distinct(f"{photo}-{slug(label)}" if several else photo for label in self.targets)
        for index, result in enumerate(self.results):
            for name, attribution in result.items():
                named = f"{stems[index]}-{name.replace('(', '-').replace(')', '')}"
                picture = self.overlay(name, index, caption=True, **options)
                files.add_picture(f"{named}.png", picture)
                files.add_array(f"{named}.npy", array(attribution.values[0]))
                files.add_json(f"{named}.json", self.record(name, index))
        if several or len(self.methods) > 1:
            files.add_picture(f"{photo}-sheet.png", self.sheet(**options))
        if html is not None:
            files.add_text(f"{photo}.html", html)
        return files

    def record(self, method: str | None = None, target: int | str = 0) -> dict[str, Any]:
        """Return all inputs and results in plain values: enough for `explain.load` to read and repeat them.

        ``format`` is the version of the record; `explain.attribution.records` says how options are written.
        """
        index = self._target(target)
        attribution = self._attribution(method, index)
        chosen, verdict = attribution.target, self.verdicts.get(index)
        checks = None if verdict is None else verdict.get(attribution.method)
        return {
            "format": FORMAT,
            "image": {"path": self.source, "size": list(self.photo.size), "sha256": digest(self.photo.tobytes())},
            "model": self.origin.name,
            "weights": self.origin.weights,
            "preprocess": self.origin.preprocess,
            "explainer": self.origin.to_dict(),
            "input_size": list(self.input_size),
            "seen": asdict(self.box),
            "crops": [asdict(crop) for crop in self.crops],
            "method": attribution.method,
            "class": self.question.classes.get(attribution.method),
            "options": options_run(attribution, len(self.crops) or 1),
            "fuse": attribution.fuse,
            "precision": self.question.precision,
            "layer": list(attribution.layer) if isinstance(attribution.layer, tuple) else attribution.layer,
            "target": chosen if isinstance(chosen, str) else int(chosen[0]),
            "asked": self.question.target(index),
            "label": self._label(index),
            "score": float(attribution.score[0]),
            "probability": self._probability(index),
            "activation": None if self.probabilities is None else self.outputs.activation,
            "predictions": [[label, probability] for label, probability in self.predictions],
            "delta": None if attribution.delta is None else float(attribution.delta[0]),
            "estimate": estimate_of(attribution),
            "values": values_of(attribution),
            "verdict": None if checks is None else checks.to_dict(),
            "versions": versions(),
            **({} if self.question.request is None else {"request": dict(self.question.request)}),
        }

    def __repr__(self) -> str:
        source = f"{self.source!r}, " if self.source else ""
        targets = ", ".join(self._titled(index) for index in range(len(self.results)))
        text = f"Explanation({source}{', '.join(self.methods)}; {targets}; {self.origin.name})"
        return printable(text if len(text) <= 200 else f"{text[:198]}…)")

    def _repr_png_(self) -> bytes:
        return png(self.sheet(tile=260))

    def _repr_html_(self) -> str:
        return widget(self, self._repr_png_(), self.alternative)

    def _target(self, target: int | str) -> int:
        if isinstance(target, str):
            try:
                return find_label(target, self.targets)
            except TargetError:
                suggestion = did_you_mean(target, self.targets)
                raise TargetError(f"target {target!r} was not explained here; {suggestion}") from None
        if not 0 <= target < len(self.results):
            raise TargetError(
                f"target must be a label or a position from 0 to {len(self.results) - 1} here, got {target}; "
                "explanation.targets lists them"
            )
        return target

    def _attribution(self, method: str | None, target: int) -> Attribution:
        result = self.results[target]
        name = self.methods[0] if method is None else method.lower() if isinstance(method, str) else ""
        if name not in result and (not name or "(" in name):
            name = get_method(method or name).name  # without options
        if name not in result:
            raise NotExplainedError(f"method {name!r} was not explained here; {did_you_mean(name, result)}")
        return result[name]

    def _marks(self, method: str, index: int) -> tuple[Mark, ...]:
        """The results of the checks of a map as marks under its picture; none before it was checked."""
        verdict = self.verdicts.get(index)
        checks = () if verdict is None else verdict.get(method, ())
        return tuple(Mark(each.word, each.passed) for each in checks)

    def _label(self, target: int) -> str:
        chosen = next(iter(self.results[target].values())).target
        classes = None if self.probabilities is None else len(self.probabilities)
        return chosen if isinstance(chosen, str) else self.outputs.label(self.categories, int(chosen[0]), classes)

    def _probability(self, target: int) -> float | None:
        chosen = next(iter(self.results[target].values())).target
        if self.probabilities is None or isinstance(chosen, str):
            return None
        return float(self.probabilities[int(chosen[0])])

    def _titled(self, target: int) -> str:
        probability = self._probability(target)
        return self._label(target) if probability is None else f"{self._label(target)}, {percent(probability)}"

    def _look(self, *, style: StyleLike | None = None, alpha: float | None = None, colormap: str | None = None) -> Look:
        return Look(self.style if style is None else style, colormap, alpha)

    @property
    def _model(self) -> str:
        return self.origin.name.split(" ")[0]
