"""`Explanation`: what a model sees in one photo, and why; as pictures, files and records."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL
import torch
from PIL import Image

from explain import render
from explain.attribution import Attribution
from explain.errors import MethodError, TargetError, did_you_mean
from explain.images import Box
from explain.models import class_label
from explain.output import Files, distinct, png_bytes, slug
from explain.record import FORMAT, Origin, Question, digest, encode
from explain.targets import find_label
from explain.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN_PREDICTIONS = 5


@dataclass(frozen=True, eq=False)
class Explanation:
    """What a model sees in one photo, and why; in a notebook it shows itself.

    ``results`` has a dictionary of attributions by method for each target. ``box`` is the part of the photo that the
    model saw, and ``probabilities`` ``(K,)`` are those of the classes, where the model gives any. ``explainer`` is what
    made this, for more questions about the same photo. All the rest stands without it: a copy and a pickle hold the
    data, on the CPU, and never the model; there, ``explainer`` is None.
    """

    photo: Image.Image = field(repr=False)
    source: str | None
    origin: Origin
    box: Box
    results: tuple[Mapping[str, Attribution], ...] = field(repr=False)
    input_size: tuple[int, int]
    question: Question = field(repr=False)
    categories: Sequence[str] | None = field(default=None, repr=False)
    probabilities: torch.Tensor | None = field(default=None, repr=False)
    explainer: Any = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        results = tuple({name: _apart(each) for name, each in result.items()} for result in self.results)
        probabilities = None if self.probabilities is None else _alone(self.probabilities)
        return {**vars(self), "results": results, "probabilities": probabilities, "explainer": None}

    @property
    def attributions(self) -> Mapping[str, Attribution]:
        """The attributions for the first target, by method."""
        return self.results[0]

    @property
    def methods(self) -> list[str]:
        return list(self.results[0])

    @property
    def targets(self) -> list[str]:
        """The label of each target that was explained."""
        return [self._label(index) for index in range(len(self.results))]

    @property
    def predictions(self) -> list[tuple[str, float]]:
        """The best labels with their probabilities, best first; empty for a model that gives no class scores."""
        probabilities = self.probabilities
        if probabilities is None:
            return []
        best = probabilities.topk(min(max(SHOWN_PREDICTIONS, len(self.results)), len(probabilities)))
        return [
            (class_label(self.categories, i), p)
            for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]

    def overlay(
        self,
        method: str | None = None,
        target: int | str = 0,
        *,
        caption: bool = False,
        alpha: float = 0.6,
        colormap: str | None = None,
    ) -> Image.Image:
        """Return the photo, at its own resolution, with an attribution drawn on it.

        Args:
            method: which of `methods`; the first by default.
            target: which of `targets`, by position or label.
            caption: put label, probability, method and layer in a strip below.
            alpha: opacity of the heat, 0 to 1.
            colormap: a colour map of matplotlib, instead of the method's own.
        """
        index = self._target(target)
        attribution = self._attribution(method, index)
        render.check(colormap, alpha)
        style = attribution.style
        if style == "color":
            picture = render.color(self.photo, _array(attribution.values[0]), self.box)
        elif style == "signed":
            picture = render.signed(
                self.photo, _array(attribution.signed[0]), self.box, colormap=colormap or render.SIGNED
            )
        elif style == "intensity":
            heatmap = _array(attribution.heatmap[0])
            picture = render.intensity(self.photo, heatmap, self.box, colormap=colormap or render.HEAT)
        else:
            heatmap = _array(attribution.heatmap[0])
            picture = render.heat(self.photo, heatmap, self.box, colormap=colormap or render.HEAT, alpha=alpha)
        if not caption:
            return picture
        bar = {"heat": render.HEAT, "intensity": render.HEAT, "signed": render.SIGNED}.get(style)
        ends = ("against", "for") if style == "signed" else ("0", "max")
        title, detail = self._words(attribution, index)
        return render.caption(picture, title, detail, None if bar is None else colormap or bar, ends)

    def figure(self) -> Figure:
        """Return a matplotlib figure with the photo and all methods side by side, for every target."""
        titles, pictures = ["photo"], [self.photo]
        for index, result in enumerate(self.results):
            for name, attribution in result.items():
                pictures.append(self.overlay(name, index))
                titles.append(self._short(attribution, index))
        return render.figure(pictures, titles, self._heading())

    def sheet(self, tile: int = 300, *, alpha: float = 0.6, colormap: str | None = None) -> Image.Image:
        """Return the photo and all methods side by side, a row for each target, or as many rows as many methods take;
        options as for `overlay`."""
        if len(self.methods) > ABREAST:
            return self._portrait(tile, alpha=alpha, colormap=colormap)
        rows = [
            [self.photo, *(self.overlay(name, i, alpha=alpha, colormap=colormap) for name in result)]
            for i, result in enumerate(self.results)
        ]
        titles = [[self._titled(i), *(_where(a) for a in result.values())] for i, result in enumerate(self.results)]
        return render.sheet(rows, columns=["photo", *self.methods], titles=titles, tile=tile)

    def _portrait(self, tile: int, **options: Any) -> Image.Image:
        pictures, titles = [], []
        for i, result in enumerate(self.results):
            shown = [self.photo, *(self.overlay(name, i, **options) for name in result)]
            named = [self._titled(i), *result]
            for start in range(0, len(shown), ABREAST):
                pictures.append(shown[start : start + ABREAST])
                titles.append(named[start : start + ABREAST])
        return render.sheet(pictures, titles=titles, tile=tile)

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        stem: str | None = None,
        overwrite: bool = False,
        alpha: float = 0.6,
        colormap: str | None = None,
    ) -> list[Path]:
        """Write for each method and target the overlay (PNG), the raw values (``.npy``) and a record (JSON).

        Where there is more than one, a sheet with all of them side by side comes last.

        The folder is made if need be. Each file appears complete or not at all. The names begin with ``stem``, by
        default the photo's own name.

        Returns:
            The paths, in that order.

        Raises:
            OutputError: a file is there already and ``overwrite`` is not set, or the folder cannot be written; then
                nothing has been written.
        """
        files = Files(folder, overwrite=overwrite)
        photo = slug(stem or (Path(self.source).stem if self.source else "image"))
        several = len(self.results) > 1
        stems = distinct(f"{photo}-{slug(label)}" if several else photo for label in self.targets)
        for index, result in enumerate(self.results):
            for name, attribution in result.items():
                named = f"{stems[index]}-{name.replace('(', '-').replace(')', '')}"
                picture = self.overlay(name, index, caption=True, alpha=alpha, colormap=colormap)
                files.add_picture(f"{named}.png", picture)
                files.add_array(f"{named}.npy", _array(attribution.values[0]))
                files.add_json(f"{named}.json", self.record(name, index))
        if several or len(self.methods) > 1:
            files.add_picture(f"{photo}-sheet.png", self.sheet(alpha=alpha, colormap=colormap))
        return files.write()

    def record(self, method: str | None = None, target: int | str = 0) -> dict[str, Any]:
        """Return what was done, in plain values: enough for `explain.load` to have it and to do it again.

        ``format`` is the version of the record; `explain.record` says how options are written.
        """
        index = self._target(target)
        attribution = self._attribution(method, index)
        chosen = attribution.target
        return {
            "format": FORMAT,
            "image": {"path": self.source, "size": list(self.photo.size), "sha256": digest(self.photo.tobytes())},
            "model": self.origin.name,
            "weights": self.origin.weights,
            "preprocess": self.origin.preprocess,
            "explainer": self.origin.to_dict(),
            "input_size": list(self.input_size),
            "seen": asdict(self.box),
            "method": attribution.method,
            "class": self.question.classes.get(attribution.method),
            "options": {name: encode(value) for name, value in attribution.options.items()},
            "fuse": attribution.fuse,
            "precision": self.question.precision,
            "layer": list(attribution.layer) if isinstance(attribution.layer, tuple) else attribution.layer,
            "target": chosen if isinstance(chosen, str) else int(chosen[0]),
            "asked": self.question.target(index),
            "label": self._label(index),
            "score": float(attribution.score[0]),
            "probability": self._probability(index),
            "predictions": [[label, probability] for label, probability in self.predictions],
            "delta": None if attribution.delta is None else float(attribution.delta[0]),
            "values": _summary(attribution),
            "versions": _versions(),
        }

    def _repr_png_(self) -> bytes:
        return png_bytes(self.sheet(tile=260))

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
        name = self.methods[0] if method is None else method.lower()
        if name not in result:
            raise MethodError(f"method {name!r} was not asked for here; {did_you_mean(name, result)}")
        return result[name]

    def _class(self, target: int) -> torch.Tensor | str:
        return next(iter(self.results[target].values())).target

    def _label(self, target: int) -> str:
        chosen = self._class(target)
        return chosen if isinstance(chosen, str) else class_label(self.categories, int(chosen[0]))

    def _probability(self, target: int) -> float | None:
        chosen, probabilities = self._class(target), self.probabilities
        return None if probabilities is None or isinstance(chosen, str) else float(probabilities[int(chosen[0])])

    def _titled(self, target: int) -> str:
        probability = self._probability(target)
        return self._label(target) if probability is None else f"{self._label(target)}, {percent(probability)}"

    def _words(self, attribution: Attribution, target: int) -> tuple[str, str]:
        parts = [attribution.method, _where(attribution), self.origin.name.split(" ")[0]]
        return self._titled(target), " · ".join(part for part in parts if part)

    def _short(self, attribution: Attribution, target: int) -> str:
        where = _where(attribution)
        title = attribution.method + (f" · {where}" if where else "")
        return title if len(self.results) == 1 else f"{self._label(target)}\n{title}"

    def _heading(self) -> str:
        return self._titled(0) if len(self.results) == 1 else ""


ABREAST = 6  # pictures in a row of a sheet


def percent(probability: float) -> str:
    """Return a probability as people read it: whole per cent, with a digit below ten.

    >>> percent(0.873), percent(0.042), percent(0.0001)
    ('87 %', '4.2 %', '<0.1 %')
    """
    share = 100 * probability
    return f"{share:.0f} %" if share >= 10 else f"{share:.1f} %" if share >= 0.1 else "<0.1 %"


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.float().cpu().numpy()


def _where(attribution: Attribution) -> str:
    layer = attribution.layer
    return "" if layer is None else layer if isinstance(layer, str) else " + ".join(layer)


def _summary(attribution: Attribution) -> dict[str, Any]:
    """What tells that an array is the one that goes with a record, and how it is to be read."""
    values = _array(attribution.values[0])
    about = {"size": list(attribution.size), "style": attribution.style, "input": attribution.input}
    return {"shape": list(values.shape), "sha256": digest(values.tobytes()), **about}


def _apart(attribution: Attribution) -> Attribution:
    """The same with tensors on the CPU that share their memory with no others, which a pickle would take along."""
    tensors = {name: value for name, value in vars(attribution).items() if name in _FIELDS}
    apart: dict[str, Any] = {name: _alone(value) for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    return replace(attribution, maps={name: _alone(values) for name, values in attribution.maps.items()}, **apart)


_FIELDS = frozenset(each.name for each in fields(Attribution))


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone()


def _versions() -> dict[str, str]:
    packages = {"numpy": np.__version__, "pillow": PIL.__version__, "torch": str(torch.__version__)}
    torchvision = getattr(sys.modules.get("torchvision"), "__version__", None)  # only where it had a part in this
    if torchvision is not None:
        packages["torchvision"] = str(torchvision)
    return {"explain": __version__, "python": platform.python_version(), **packages}
