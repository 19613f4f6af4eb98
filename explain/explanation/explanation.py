"""`Explanation`: the attributions of one photo; as pictures, files and records."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, get_args

import torch
from PIL import Image

from explain._utils.errors import (
    ArgumentError,
    ExplainError,
    MethodError,
    OutputError,
    TargetError,
    check_choice,
    check_whole_number,
    did_you_mean,
    keywords,
    printable,
    shown,
)
from explain.attribution import pictures, records
from explain.attribution.pictures import (
    LARGEST_SIDE,
    Look,
    Order,
    Part,
    Scene,
    array,
    layer_caption,
)
from explain.attribution.result import Attribution, alone
from explain.data.files import Files, distinct, halved, restored, slug
from explain.data.scans import stem_of
from explain.engine.settings import Progress
from explain.methods.base import get_method, title_of
from explain.render import captions, figures, sheets
from explain.render.sheets import ABREAST, Group, Layout
from explain.render.styles import StyleLike
from explain.report.pages import Reportable, scene_of, widget
from explain.targets.labels import find_label
from explain.targets.outputs import Outputs, Prediction, label_of_no

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from explain.metrics import Check


SHOWN_PREDICTIONS = 5
CAPTIONED = 8.0  # cm: the width of one map as a figure
PictureFormat = Literal["png", "jpg", "pdf", "svg"]
FIGURE_FORMATS = ("pdf", "svg")


class NotExplainedError(MethodError, KeyError):
    """An explanation has no map of this method."""


class StyleOptions(TypedDict, total=False):
    """How maps are drawn; see `Explanation.overlay`."""

    style: StyleLike | None
    alpha: float | None
    colormap: str | None
    boxes: float | None


@dataclass(frozen=True, eq=False, repr=False)
class Explanation(Reportable):
    """The attributions of one photo, by method and target; a notebook displays it as a page.

    ``explanation["gradcam"]`` is the attribution of a method for the first target, and iterating
    gives the methods' names. ``results`` has a dictionary of attributions by method for each
    target. ``box`` is the part of the photo that the model saw and that the maps cover; if the
    model saw several parts, these are ``crops``, and ``box`` is the whole photo. ``probabilities``
    ``(K,)`` are those of the classes, and ``numbers`` ``(K,)`` the outputs of a model of numbers;
    each is None for other models. ``outputs`` says what the outputs mean. ``style`` replaces each
    method's own style in pictures. ``explainer`` made the explanation, and can explain the photo
    further; ``session`` has its arguments. ``asked`` are the targets that were more than a class,
    as records have them; ``key`` recognises a request later. ``detections`` are what a detector
    finds on the photo, best first, and ``boxes`` those of the targets, in pixels of the photo.
    ``checks`` are the results of `check`, by the index of the target. ``of_input`` are results
    before they were laid on the photo, where there are ``crops``.

    Everything else works without explainer and session: a copy and a pickle hold the data, on the
    CPU, and never the model; in them, both are None.
    """

    style: StyleLike | None = None
    key: Mapping[str, str] | None = None
    outputs: Outputs = field(default_factory=Outputs)
    numbers: torch.Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or pickle of an explanation holds: tensors on the CPU with memory of
        their own, and neither the explainer nor the session, so that no model is stored."""
        results = tuple(
            {name: attribution.converted(alone) for name, attribution in result.items()}
            for result in self.results
        )
        probabilities = None if self.probabilities is None else alone(self.probabilities)
        numbers = None if self.numbers is None else alone(self.numbers)
        held = {
            "results": results,
            "probabilities": probabilities,
            "numbers": numbers,
            "checks": dict(self.checks),
            "of_input": (),
        }
        return {**vars(self), **held, "explainer": None, "session": None}

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
        """Return the number of methods."""
        return len(self.results[0])

    def __contains__(self, method: object) -> bool:
        """Return whether there is a map of the method of this name."""
        return method in self.results[0]

    @property
    def values(self) -> torch.Tensor:
        """The raw values of the first method for the first target: ``(h, w)`` of a layer, ``(H,
        W)`` or ``(C, H, W)``.

        Those of another are ``explanation.results[1]["saliency"].values[0]``.
        """
        return self._attribution(None, 0).values[0]

    @property
    def heatmap(self) -> torch.Tensor:
        """``(H, W)`` from 0 to 1 at the resolution of the model's input, of the first method for
        the first target."""
        return self._attribution(None, 0).heatmap[0]

    @property
    def targets(self) -> list[str]:
        """The label of each target that was explained."""
        return [self.answer(index).label for index in range(len(self.results))]

    def target_at(self, index: int) -> Any:
        """Return the target at a position in `targets`, for another call of the explainer or of
        `attribute`: the index of the class that was explained, or the target as it was asked
        for."""
        classes = next(iter(self.results[index].values())).target
        is_class = self.asked[index] is None and isinstance(classes, torch.Tensor)
        return int(classes[0]) if is_class else self.session.targets[index]

    @property
    def predictions(self) -> list[tuple[str, float]]:
        """The best labels with their probabilities, best first; empty for a model that gives no
        class scores.

        Where several labels may be true of one photo, these are all that are more probable than
        not; for a single probability, yes and no; for a detector, all detections; for a model with
        one number, its name and the number itself.
        """
        return [(prediction.label, prediction.value) for prediction in self.predicted]

    @property
    def predicted(self) -> list[Prediction]:
        """The predictions with their classes and amounts, best first; of a detector, the
        detections. The class is None for the "no" of a model with one output. There are at least as
        many as targets, so that each class of ``top_k`` is among them."""
        if self._scores is None:
            return list(self.detections)
        return self.outputs.predicted(
            self._scores, self.categories, max(SHOWN_PREDICTIONS, len(self.results))
        )

    @keywords(StyleOptions)
    def overlay(
        self,
        method: str | None = None,
        target: int | str = 0,
        *,
        caption: bool = False,
        largest_side: int | None = LARGEST_SIDE,
        **options: Unpack[StyleOptions],
    ) -> Image.Image:
        """Return the photo with an attribution drawn on it.

        It has the photo's own resolution, but at most 2,000 pixels a side unless asked.

        Parts that the model did not see are pale and hatched.

        Args:
            method: which of `methods`; the first by default.
            target: which of `targets`, by position or label.
            style: "heat", "contour", "mask" or "spotlight", or one of `explain.render` with options
                of your own. By default the explanation's, or else the method's own: heat for maps
                of a layer, and for methods that give a value for each pixel what shows them best.
            caption: put label, probability, method and layer in a strip below; a photo of less than
                320 pixels is enlarged for it.
            largest_side: the side in pixels to which a larger photo is reduced; None for none.
            alpha: opacity of the heat, 0 to 1.
            colormap: a colour map of matplotlib instead of the style's own, or "print", whose
                colours are told apart in grey print as well.
            boxes: a share of the map's maximum: the connected parts above it get boxes, as
                `Attribution.boxes` has them.

        Raises:
            ExplainError: the method or target was not explained, or the style is unknown or has no
                such option.
        """
        if not isinstance(caption, bool):
            raise ArgumentError(
                f"caption must be True or False, got {shown(caption)}; True writes label, method "
                "and layer"
            )
        index = self._target(target)
        attribution = self._attribution(method, index)
        look = self._look([attribution], **options)
        return self._drawn(attribution, index, look, largest_side, caption=caption)

    def _drawn(
        self,
        attribution: Attribution,
        index: int,
        look: Look,
        largest_side: int | None,
        *,
        caption: bool,
    ) -> Image.Image:
        """One map drawn on the photo, as ``look`` says; ``index`` is the position of the target.
        With a caption, evidence sets come with the photo without the first set.
        """
        style = look.of(attribution.style)
        check_whole_number("largest_side", largest_side, 1, error=ExplainError)
        scene = self.fitted_scene(largest_side, look)
        if not caption:
            return scene.overlay(attribution, style, index)
        scene = scene.enlarged(captions.enlargement(scene.photo.size))
        picture = scene.overlay(attribution, style, index)
        if without := pictures.without_set(attribution, style):
            beside = scene.overlay(attribution, without, index)
            picture = captions.beside([picture, beside], gap=max(2, picture.width // 50))
        title, amount = self._title(index)
        details = [
            pictures.sentence(attribution, title, self.categories),
            title_of(attribution.method),
            layer_caption(attribution),
            pictures.drawing_caption(attribution, style),
            pictures.remark(attribution),
            self._model,
        ]
        detail = " · ".join(filter(None, details))
        marks = self._marks(attribution.method, index)
        return captions.caption(
            picture,
            title,
            detail,
            pictures.legend_of(scene, attribution, style),
            end=amount,
            marks=marks,
        )

    @cached_property
    def scene(self) -> Scene:
        """What pictures of the maps are drawn on: the photo, the box that maps cover, the parts
        that the model saw, the boxes of the targets, and those of all detections by their
        labels."""
        return scene_of(self)

    def fitted_scene(self, side: int | None, look: Look, crop: Part = "photo") -> Scene:
        """The scene with a photo of at most ``side`` pixels a side, or only what the model saw of
        it, and boxes as ``look`` says."""
        check_choice("crop", crop, get_args(Part))
        scene = self.scene.cropped() if crop == "seen" else self.scene
        scene = scene.fitted(side)
        return scene if look.boxes is None else replace(scene, above=look.boxes)

    @keywords(StyleOptions)
    def layout(
        self,
        *,
        abreast: int = ABREAST,
        order: Order = "family",
        crop: Part = "photo",
        **options: Unpack[StyleOptions],
    ) -> Layout:
        """Return the contents of `sheet` and `figure`: the photo and all maps, with titles and
        legends; ``abreast`` is how many stand side by side at most, and the others are as for
        `figure`."""
        check_choice("order", order, get_args(Order))
        titles = self._titles
        look = self._look(self._all_attributions, **options)
        predictions = ", ".join(
            f"{prediction.label} {prediction.amount}" for prediction in self.predicted
        )
        return Layout(
            title=titles[0] if len(titles) == 1 else " · ".join(self.targets),
            detail=f"{self._model}: {predictions}" if predictions else self._model,
            groups=pictures.groups(
                self.fitted_scene(LARGEST_SIDE, look, crop),
                self.results,
                titles,
                look,
                marks=self._marks,
                abreast=abreast,
                order=order,
            ),
            abreast=abreast,
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
    ) -> "Check":
        """Say whether the maps depend on the model and on the class, whether what they mark
        matters, and whether they are stable.

        It takes at most 240 passes of the model for each map; methods of many passes run with fewer
        samples. The record, captions and sheets contain the results afterwards. What one photo
        cannot tell, `explain.evaluate` with "check" tells of many.

        Args:
            methods: which of `methods`; all of them by default.
            target: which of `targets`, by position or label.
            seed: of random weights, classes, places and noise.
            batch_size, progress: as for `explain.attribute`.

        Returns:
            A `Check`, which prints itself: ``check["gradcam"].model``, ``of_class``, ``covering``
            and ``stability`` each have a ``value``, a ``reference``, a ``mark`` (✓, ? or ✗), and a
            ``text``.

        Raises:
            MetricError: this is a copy without a model.
            ExplainError: the method or target was not explained.
        """
        from explain.metrics.checking import check_explained  # only a check needs the metrics

        index = self._target(target)
        names = self.methods if methods is None else methods
        if isinstance(names, str):
            names = [names]
        names = [self._attribution(name, index).method for name in names]
        return check_explained(
            self, names, index, seed=seed, batch_size=batch_size, progress=progress
        )

    @keywords(StyleOptions)
    def figure(
        self,
        *,
        width_cm: float | None = None,
        letters: bool = False,
        heading: bool = True,
        order: Order = "family",
        crop: Part = "photo",
        **options: Unpack[StyleOptions],
    ) -> "Figure":
        """Return a matplotlib figure with the photo and all methods side by side; `explain.figure`
        makes one of several photos.

        Pictures are images with 300 dots per inch in axes of their own; titles, captions and colour
        bars are texts, in the font and size of ``matplotlib.rcParams``. They stay texts in
        ``savefig("maps.pdf")`` and ``savefig("maps.svg")``.

        Args:
            width_cm: how wide it is: 8 and 17 cm are usual in papers of two columns.
            letters: put (a), (b), … above the pictures.
            heading: whether the targets and predictions stand at the top.
            order: "given" keeps the order of the methods; by default, four or more of them come by
                family.
            crop: "seen" shows only the part of the photo that the model saw.
            style, alpha, colormap: as for `overlay`.

        Raises:
            ExplainError: the width is none from 2 to 100 cm, or the style is unknown.
        """
        has_columns = len(self.results) > 1 and len(self.methods) > 1
        is_table = has_columns or bool(self.scene.slices)
        abreast = figures.abreast(width_cm, is_table)
        layout = self.layout(abreast=abreast, order=order, crop=crop, **options)
        return figures.figure_of(
            layout, self.alternative, width_cm=width_cm, letters=letters, heading=heading
        )

    def _captioned_figure(self, attribution: Attribution, target: int, look: Look) -> "Figure":
        """Return a matplotlib figure of one map with its caption, which `save` writes as PDF or
        SVG. ``target`` is the position of the target."""
        style = look.of(attribution.style)
        title, amount = self._title(target)
        sentence = pictures.sentence(attribution, title, self.categories)
        marks = self._marks(attribution.method, target)
        scene = self.fitted_scene(LARGEST_SIDE, look)
        tiles = tuple(pictures.tiles_of(scene, attribution, style, marks, target))
        layout = Layout(
            f"{title}{amount}",
            " · ".join(filter(None, (sentence, self._model))),
            (Group("", tiles),),
            abreast=len(tiles),
        )
        return figures.figure_of(layout, self.alternative, width_cm=CAPTIONED * len(tiles))

    @keywords(StyleOptions)
    def sheet(self, tile: int = 300, **options: Unpack[StyleOptions]) -> Image.Image:
        """Return the photo and all methods side by side, under a title; ``tile`` is the side of a
        picture in pixels."""
        return sheets.contact_sheet(self.layout(**options), tile)

    @property
    def alternative(self) -> str:
        """The alternative text of the pictures, for those who cannot see them: the photo's file,
        the targets and the methods."""
        source = f"the photo {Path(self.source).name}" if self.source else "a photo"
        return (
            f"{source} with maps of the evidence for {' and '.join(self.targets)}: "
            f"{', '.join(self.methods)}"
        )

    @keywords(StyleOptions)
    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        stem: str | None = None,
        overwrite: bool = False,
        html: str | None = None,
        picture_format: PictureFormat = "png",
        map_format: Literal["npy", "npz"] = "npy",
        largest_side: int | None = LARGEST_SIDE,
        **options: Unpack[StyleOptions],
    ) -> list[Path]:
        """Write for each method and target the overlay (PNG), the raw values (``.npy``) and a
        record (JSON).

        Where there is more than one, a sheet with all of them side by side comes last.

        The folder is made if needed. Each file appears complete or not at all. The names begin with
        ``stem``, by default the photo's own name. ``style``, ``alpha``, ``colormap``, ``boxes`` and
        ``largest_side`` are those of `overlay`. ``html`` is a page of `to_html` to write along.
        Pictures are smaller as "jpg", and figures as in `figure` as "pdf" and "svg". Maps are
        smaller as "npz": compressed, in float16.

        Returns:
            The paths, in that order.

        Raises:
            OutputError: a file exists and ``overwrite`` is not set, or the folder cannot be
                written; then nothing has been written.
        """
        check_choice("picture_format", picture_format, get_args(PictureFormat), error=OutputError)
        check_choice("map_format", map_format, ("npy", "npz"), error=OutputError)
        files = Files(folder, overwrite=overwrite)
        return self._files(
            files, stem, html, picture_format, map_format, largest_side, **options
        ).write()

    @keywords(StyleOptions)
    def save_picture(
        self,
        path: str | os.PathLike[str],
        method: str | None = None,
        target: int | str = 0,
        *,
        overwrite: bool = False,
        largest_side: int | None = LARGEST_SIDE,
        **options: Unpack[StyleOptions],
    ) -> Path:
        """Write one map with its caption to a file, as `save` does: PNG, JPEG, PDF or SVG by its
        ending.

        Raises:
            OutputError: it has another ending, exists and ``overwrite`` is not set, or cannot be
                written.
        """
        place = Path(path)
        ending = place.suffix[1:].lower().replace("jpeg", "jpg")
        check_choice("the ending of path", ending, get_args(PictureFormat), error=OutputError)
        index = self._target(target)
        attribution = self._attribution(method, index)
        look = self._look([attribution], **options)
        files = Files(place.parent, overwrite=overwrite)
        self._add_picture(files, place.name, attribution, index, look, largest_side)
        [written] = files.write()
        return written

    def _add_picture(
        self,
        files: Files,
        name: str,
        attribution: Attribution,
        index: int,
        look: Look,
        largest_side: int | None,
    ) -> None:
        """Add one map with its caption to the files to be written: as a figure of matplotlib where
        ``name`` ends in .pdf or .svg, else as a picture. ``index`` is the target's position."""
        ending = Path(name).suffix[1:].lower()
        if ending not in FIGURE_FORMATS:
            picture = self._drawn(attribution, index, look, largest_side, caption=True)
            files.add_picture(name, picture)
            return
        figure = self._captioned_figure(attribution, index, look)
        files.add_bytes(name, figures.as_file(figure, ending))

    def packed(self, stem: str | None = None) -> bytes:
        """Return the files of `save` as a ZIP archive."""
        return self._files(Files(""), stem, html=None).packed()

    def _files(
        self,
        files: Files,
        stem: str | None,
        html: str | None,
        picture_format: str = "png",
        map_format: str = "npy",
        largest_side: int | None = LARGEST_SIDE,
        **options: Unpack[StyleOptions],
    ) -> Files:
        """Add pictures, values and records, then the sheet, then the page, and return them. A sheet
        means that all maps are complete. "npz" rounds to float16, whose digest the record has.
        """
        source = stem_of(self.source) if self.source else "image"
        formats = (picture_format, map_format)
        beginning = str(stem) if stem else source
        # in the order in which files are added
        names = iter(file_names(beginning, self.targets, self.methods, formats, html is not None))
        look = self._look(self._all_attributions, **options)
        for index, result in enumerate(self.results):
            for name, attribution in result.items():
                values = array(attribution.values[0])
                record = self.record(name, index)
                if map_format == "npz":
                    # the digest is that of what the file gives back
                    halves, scale = halved(values)
                    in_file = records.shape_and_digest(restored(halves, scale))
                    record["values"] |= {**in_file, "format": map_format}
                self._add_picture(files, next(names), attribution, index, look, largest_side)
                files.add_array(next(names), values)
                files.add_json(next(names), record)
        has_sheet = len(self._all_attributions) > 1
        if has_sheet and picture_format in FIGURE_FORMATS:
            files.add_bytes(next(names), figures.as_file(self.figure(**options), picture_format))
        elif has_sheet:
            files.add_picture(next(names), self.sheet(**options))
        if html is not None:
            files.add_text(next(names), html)
        return files

    def record(self, method: str | None = None, target: int | str = 0) -> dict[str, Any]:
        """Return all inputs and results in plain values: enough for `explain.load` to read and
        repeat them.

        ``format`` is the version of the record; `explain.attribution.encoding` says how options are
        written.
        """
        index = self._target(target)
        attribution = self._attribution(method, index)
        checks = None
        if index in self.checks:
            checks = self.checks[index].get(attribution.method)
        answer = self.answer(index)
        return records.Record(
            **records.origin_of(self.photo, self.source, self.origin, self.box, self.input_size),
            **records.results_of(attribution),
            crops=[vars(crop) for crop in self.crops],
            asked=self.asked[index],
            label=answer.label,
            probability=answer.probability,
            number=answer.number,
            unit=None if answer.number is None else answer.unit,
            activation=None if self._scores is None else self.outputs.activation,
            predictions=self.predictions,
            check=None if checks is None else checks.to_dict(),
            request=self.key,
        ).to_dict()

    def __repr__(self) -> str:
        """Return the explanation in one short line: source, methods, targets and model."""
        source = f"{self.source!r}, " if self.source else ""
        targets = ", ".join(self._titles)
        text = f"Explanation({source}{', '.join(self.methods)}; {targets}; {self.origin.name})"
        return printable(text if len(text) <= 200 else f"{text[:198]}…)")

    def _repr_html_(self) -> str:
        """Return what a notebook displays: the page of the explanation, with the sheet as a picture
        where pages cannot be shown."""
        return widget(self, self.sheet(tile=260), self.alternative)

    def _target(self, target: int | str) -> int:
        """Return the position in ``results`` of a target that was explained, given by its position
        or label.
        """
        if isinstance(target, str):
            try:
                return find_label(target, self.targets)
            except TargetError:
                suggestion = did_you_mean(target, self.targets)
                raise TargetError(
                    f"target {target!r} was not explained here; {suggestion}"
                ) from None
        if not 0 <= target < len(self.results):
            last = len(self.results) - 1
            raise TargetError(
                f"target must be one of explanation.targets or a position from 0 to {last}, got "
                f"{target}"
            )
        return target

    def _attribution(self, method: str | None, target: int) -> Attribution:
        """Return the attribution of a method, for the target at position ``target``.
        ``method`` is a name, with or without options, or a method; None is the first one.
        """
        result = self.results[target]
        name = ""  # of a method object, until it is asked
        if method is None:
            name = self.methods[0]
        elif isinstance(method, str):
            name = method if method in result else method.lower()
        # a method object, or a name with options: its maps may have the name without them
        if name not in result and (not name or "(" in name):
            name = get_method(method or name).name
        if name not in result:
            raise NotExplainedError(
                f"method {name!r} was not explained here; {did_you_mean(name, result)}"
            )
        return result[name]

    def _marks(self, method: str, index: int) -> tuple[captions.Mark, ...]:
        """Return the results of a map's check as marks to be drawn under its picture; none
        before `check` was called for the target at position ``index``."""
        if index not in self.checks:
            return ()
        return tuple(
            captions.Mark(result.name, result.passed)
            for result in self.checks[index].get(method, ())
        )

    def answer(self, target: int) -> Prediction:
        """Return what the model says about the target at a position: its label with the
        probability, the number or the detected box, as far as it has one."""
        box = self.boxes[target] if target < len(self.boxes) else None
        if box is not None:
            return box
        chosen = next(iter(self.results[target].values())).target
        if isinstance(chosen, str):
            # of a model with one output, "no" is said with the label
            is_no = chosen == "no" and self._scores is not None and len(self._scores) == 1
            return Prediction(label_of_no(self.categories) if is_no else chosen, None, None)
        index = int(chosen[0])
        if self.numbers is not None:
            return self.outputs.number(self.numbers, self.categories, index)
        classes = None if self.probabilities is None else len(self.probabilities)
        probability = None if self.probabilities is None else float(self.probabilities[index])
        return Prediction(self.outputs.label(self.categories, index, classes), probability, index)

    @property
    def _scores(self) -> torch.Tensor | None:
        """The outputs ``(K,)`` that predictions are made of: probabilities, or the numbers of a
        model of numbers; None where the model gives neither, as a detector."""
        return self.probabilities if self.numbers is None else self.numbers

    def amount(self, target: int) -> str:
        """Return the probability of the target at a position as text ("87 %"), or its number with
        the unit; empty where it has neither."""
        return self.answer(target).amount

    def _title(self, target: int) -> tuple[str, str]:
        """Return the two parts of a target's title in captions: its label, and ", 87 %" with its
        probability or number (or an empty text), which is never cut where the label is."""
        answer = self.answer(target)
        return answer.label, f", {answer.amount}" if answer.amount else ""

    @property
    def _titles(self) -> list[str]:
        """The titles of all targets: each label with its probability or number."""
        return ["".join(self._title(index)) for index in range(len(self.results))]

    @property
    def _all_attributions(self) -> list[Attribution]:
        """The attributions of all targets and methods in one list, target by target."""
        return [attribution for result in self.results for attribution in result.values()]

    def _look(
        self,
        attributions: Sequence[Attribution],
        *,
        style: StyleLike | None = None,
        alpha: float | None = None,
        colormap: str | None = None,
        boxes: float | None = None,
    ) -> Look:
        """Return how these attributions are drawn: in the given style, the explanation's, or each
        method's own, with the colour map and the opacity ``alpha``.
        """
        chosen_style = self.style if style is None else style
        look = Look(chosen_style, colormap=colormap, alpha=alpha, boxes=boxes)
        look.refuse_unused([attribution.style for attribution in attributions])
        return look

    @property
    def _model(self) -> str:
        """The model's name in captions, with the names of the caller's hooks that were on it, since
        these may change the maps."""
        hooks = f" with hooks ({', '.join(self.origin.hooks)})" if self.origin.hooks else ""
        return self.origin.name.split(" ")[0] + hooks


def file_names(
    photo: str, labels: Sequence[str], methods: Sequence[str], formats: tuple[str, str], html: bool
) -> list[str]:
    """Return the names of all files of an explanation, which begin with that of the ``photo``, in
    their order: picture, values (in their ``formats``) and record of each map, sheet and page."""
    photo = slug(photo)
    stems = distinct(f"{photo}-{slug(label)}" if len(labels) > 1 else photo for label in labels)
    # options are among the names of methods, where several have one name
    maps = [f"{stem}-{method_slug(method)}" for stem in stems for method in methods]
    names = [f"{name}.{ending}" for name in maps for ending in (*formats, "json")]
    if len(maps) > 1:
        names.append(f"{photo}-sheet.{formats[0]}")
    if html:
        names.append(f"{photo}.html")
    return names


def method_slug(name: str) -> str:
    """Return the end of the names of a method's files: "smooth-gradcam" for "smooth(gradcam)"."""
    return re.sub(r"[^a-z0-9_.+=-]+", "-", name.lower()).strip("-")
