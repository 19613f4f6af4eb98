"""`Explainer`: a photo and a model in, an `Explanation` out."""

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias, Unpack, overload

import torch
from PIL import Image
from torch import nn

from explain._utils.default_device import cpu_by_default
from explain._utils.errors import (
    ArgumentError,
    ImageError,
    PhotoError,
    TargetError,
    keywords,
    muted,
    naming,
    shown,
)
from explain._utils.modules import floating_parameter
from explain.attribution import encoding, records
from explain.attribution.api import attribute
from explain.attribution.concepts import find_concepts
from explain.attribution.options import PhotoOptions
from explain.attribution.result import Attribution
from explain.attribution.selection import GROUPS, requested, select
from explain.baselines.base import range_of
from explain.baselines.replacements import Black, get_baseline
from explain.data.bands import Bands, as_read
from explain.data.boxes import (
    Box,
    Preprocess,
    as_input,
    boxes_of_slices,
    input_of_slices,
    locate,
    locate_tiles,
)
from explain.data.greys import Window, check_window
from explain.data.images import ImageLike, image_path, load_image
from explain.data.inputs import (
    InputLayout,
    Inputs,
    InputsLike,
    as_inputs,
    check_layout,
    first_convolution,
)
from explain.engine.validation import check_inputs
from explain.explanation.detected import Located, located
from explain.explanation.explanation import Explanation
from explain.explanation.photo_concepts import PhotoConcepts
from explain.explanation.photos import (
    AREA,
    AT_ONCE,
    PASSES,
    BatchAnswers,
    Photo,
    collected,
    converted,
    each_tried,
    explained,
    photos_for_targets,
    reported,
    samples_are_apart,
)
from explain.explanation.tiles import tiles_on_photo
from explain.hooks import Intervention, inspect, inspection, layer_names, unwrap
from explain.hooks.preserve import untouched
from explain.layers.intervening import intervene
from explain.methods.base import Method, MethodLike, get_method, list_methods, options
from explain.models import (
    Classifier,
    attached,
    classifier,
    classifier_of,
    huggingface,
    preprocessing,
)
from explain.render.styles import StyleLike, get_style
from explain.targets import ClassTarget, Predicted, Target, TopClass, as_target, text
from explain.targets.base import find_logits
from explain.targets.detections import InPhoto, Place, showing
from explain.targets.outputs import Activation, Outputs, Prediction, check_activation
from explain.targets.resolve import TargetLike, as_targets, check_categories, one_per_image

Methods: TypeAlias = MethodLike | Iterable[MethodLike]


_ARGUMENTS = """
    model categories preprocess weights size crop channels mean std interpolation device activation
    unit layout window bands
"""
_OF_EXPLAINER = {
    name: f"explain.Explainer({name}=...) takes it, and then the photo"
    for name in _ARGUMENTS.split()
}
"""For arguments that belong to an `Explainer`, and not to a call of it: what takes them."""
_OF_EXPLAINER["style"] = (
    "explain.Explainer(style=...), overlay(style=...) and save(style=...) take it"
)


class Explainer:
    """Explains photos with one model.

    Args:
        model: any ``nn.Module`` that classifies images, a name ("resnet50",
            "package.module:factory"), or None for the default model. A module is put on ``device``
            if one is given, and otherwise left alone.
        categories: the labels of the classes, in order, or a text file with one a line; those that
            come with the model by default. Of an image-text model (CLIP, SigLIP and their
            relatives) they are texts, and its classes: zero-shot classification.
        preprocess: ``PIL.Image -> (C, H, W)`` float tensor, or an image processor of transformers.
            By default what comes with the model (as an attribute, in timm's or Hugging Face's
            configuration, or with its name); where nothing is known, a centre crop and ImageNet's
            values, with a warning.
        weights: a file with a state dict, for a model given by name.
        size: the side of the model's input in pixels, instead of its own, or its height and width,
            such as ``(256, 128)``.
        crop: the part of a photo that the model sees: "center", or the "whole" photo (as long as it
            is where the network takes any size, else padded to a square). A number is the share of
            the photo's shorter side that the central square takes.
        channels: 1 for a model of photos in grey, 3 for one of colours, or the number of bands of
            images such as those of satellites, which are TIFF files, files of NumPy or arrays;
            found from its first convolution where nothing else says how it sees photos.
        bands: of such images, which band is red, green and blue in pictures, counted from 1, or
            which one is grey; by default the first three.
        mean, std, interpolation: other values than those of the preprocessing, unless that is a
            function: the mean and standard deviation of each channel for pixels from 0 to 1, and
            "bilinear" or "bicubic".
        window: the level and the width of the values that are shown from black to white, for scans
            such as ``(40, 400)`` in Hounsfield units; see `explain.data.images.load_image`.
        device: where to run, as for ``torch.device``.
        activation: what makes probabilities of the model's outputs: "softmax" where one class is
            true of a photo, "sigmoid" where several labels may be true or one output means yes or
            no, "none" where the outputs are probabilities already, or numbers. A softmax or sigmoid
            at the end of the network is recognised with a warning, and is not applied again. By
            default, other outputs get a softmax, and a single output is a number.
        unit: the unit of the numbers that a model of numbers gives, such as "years";
            ``categories`` are the names of these numbers.
        style: the style of pictures, such as "contour"; see `Explanation.overlay`.
        interventions: changes to the outputs of layers, in everything that is explained; see
            `explain.hooks.intervene`.
        layout: of a model that takes its channels last, as those of Keras do, "NHWC";
            ``preprocess`` returns ``(C, H, W)`` all the same. Of videos, tiles or bags of patches:
            "NTCHW" where these come before the channels, "NCTHW", or "NTHWC". ``preprocess`` may
            return ``(T, C, H, W)``, tiles of a photo, whose maps are laid where the tiles lie. A
            photo ``(C, H, W)`` is one frame, or as many as a configuration of Hugging Face says.

    Raises:
        ExplainError: the model, its weights or the device cannot be used, or there is no such
            style.

    >>> from PIL import Image
    >>> explainer = Explainer()
    >>> explainer.categories[281], explainer.preprocess(Image.new("RGB", (30, 20))).ndim
    ('tabby cat', 3)
    """

    @keywords(elsewhere={"labels": "categories=... takes them"})
    def __init__(
        self,
        model: nn.Module | Classifier | str | None = None,
        categories: Sequence[str] | str | os.PathLike[str] | None = None,
        preprocess: Preprocess | None = None,
        *,
        weights: str | Path | None = None,
        size: preprocessing.Side | None = None,
        crop: preprocessing.CropLike = "center",
        channels: int | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        interpolation: preprocessing.Interpolation | None = None,
        window: Window | None = None,
        bands: int | Sequence[int] = (),
        device: str | torch.device | None = None,
        activation: Activation | None = None,
        unit: str | None = None,
        style: StyleLike | None = None,
        interventions: Sequence[Intervention] = (),
        layout: InputLayout | None = None,
    ) -> None:
        check_activation(activation)
        if not isinstance(unit, str | None):
            raise ArgumentError(
                f"unit must be a text such as 'years', got {shown(unit)}; leave it out"
            )
        self.style = None if style is None else get_style(style)
        self.interventions = tuple(interventions)
        self.layout = check_layout(layout)
        size = None if size is None else preprocessing.checked_side(size)
        loaded = classifier_of(model, weights, size)
        self.name = loaded.name
        self.weights = loaded.weights
        self.model = loaded.model if device is None else classifier.on_device(loaded.model, device)
        options_of_preprocessing: dict[str, Any] = {
            "size": size,
            "crop": crop,
            "channels": channels,
            "mean": mean,
            "std": std,
            "interpolation": interpolation,
        }
        _, convolution = first_convolution(self.model)
        # the command line reads volumes by it: as one photo, or else each slice as a photo; models
        # of videos, which have such convolutions too, are told by a layout or a configuration
        self.sees_volumes = (
            layout is None
            and huggingface.config_of(self.model) is None
            and isinstance(convolution, nn.Conv3d)
        )
        callers_preprocess = None if preprocess is None else attached.as_preprocess(preprocess)
        self.preprocess = attached.resolve_preprocessing(
            loaded, callers_preprocess, **options_of_preprocessing
        )
        channel_count = len(getattr(self.preprocess, "mean", ()))  # 0: not known of a function
        bands = (bands,) if isinstance(bands, int) else tuple(bands)
        self.window = as_read(check_window(window), channel_count, bands)
        # the command line and runs take each file for one photo, whatever slices are in it
        self.sees_bands = isinstance(self.window, Bands)
        labels = check_categories(categories)
        self.categories = loaded.categories if labels is None else labels
        if text.is_image_text(self.model):
            self.model = text.image_scorer(self.model, labels=self.categories)
        self.classifier = replace(
            loaded,
            model=self.model,
            preprocess=self.preprocess,
            categories=self.categories,
            activation=None,  # that of the explainer counts, which a target may change
        )
        self._activation_of_caller = activation or loaded.activation
        self.activation = self._activation_of_caller
        self.unit = unit or ""
        self._outputs: Outputs | None = None  # known from the first outputs on
        # from here on: what records keep, so that they can load the explainer again
        arguments: dict[str, Any] = {
            "activation": activation,
            "unit": unit or None,
            "layout": layout,
            "window": check_window(window),
            "bands": bands or None,
            "channels": channel_count if self.sees_bands else channels,
        }
        arguments = {name: value for name, value in arguments.items() if value is not None}
        from_caller = [] if preprocess is None else ["preprocess"]
        if not isinstance(model, str | None):
            from_caller.insert(0, "model")
        else:
            arguments = {
                "model": model or loaded.name,
                "weights": None if weights is None else str(weights),
                **options_of_preprocessing,
                **arguments,
            }
            if isinstance(categories, str | os.PathLike):
                arguments["categories"] = os.fspath(categories)
            elif labels is not None:
                arguments["categories"] = list(labels)
        self.origin = records.ModelOrigin(
            loaded.name,
            loaded.weights,
            preprocess=encoding.name_of_callable(self.preprocess),
            arguments=arguments,
            from_caller=tuple(from_caller),
        )

    def with_crop(self, crop: preprocessing.CropLike) -> "Explainer":
        """Return an explainer that shows the same model another part of a photo; this explainer
        stays as it is.

        ``crop`` is "whole" or a share, as for an `Explainer`; "center" leaves the part as it is.
        The new crop is part of what records keep.

        Raises:
            ModelError: there is no such crop, or the preprocessing cannot be changed.

        >>> Explainer("tiny").with_crop("whole").preprocess.box((40, 30))
        Box(left=0.0, top=0.0, right=40.0, bottom=30.0)
        """
        other = copy(self)
        other.preprocess = preprocessing.cropped(self.preprocess, crop, self.model)
        other.classifier = replace(self.classifier, preprocess=other.preprocess)
        arguments = dict(self.origin.arguments)
        # it is there only where the model has a name, by which records load it again
        if "crop" in arguments and crop != "center":
            arguments["crop"] = crop
        name = encoding.name_of_callable(other.preprocess)
        other.origin = replace(self.origin, arguments=arguments, preprocess=name)
        return other

    def __repr__(self) -> str:
        """Return the model's name and class in one line."""
        return f"Explainer({self.name!r}, {type(self.model).__name__})"

    @overload
    def __call__(  # type: ignore[overload-overlap]  # an open file is an iterator of lines, too
        self,
        image: ImageLike,
        methods: Methods = "gradcam",
        target: TargetLike = None,
        **options: Unpack[PhotoOptions],
    ) -> Explanation: ...

    @overload
    def __call__(
        self,
        image: list[ImageLike] | tuple[ImageLike, ...] | Iterator[ImageLike],
        methods: Methods = "gradcam",
        target: TargetLike = None,
        **options: Unpack[PhotoOptions],
    ) -> list[Explanation]: ...

    @keywords(PhotoOptions, elsewhere=_OF_EXPLAINER)
    def __call__(
        self,
        image: Any,
        methods: Methods = "gradcam",
        target: TargetLike = None,
        **options: Unpack[PhotoOptions],
    ) -> Explanation | list[Explanation]:
        """Explain one photo, or several.

        Args:
            image: a path, the bytes of a file, a PIL image or an array; see
                `explain.data.images.load_image`. A list, tuple or iterator of these gives a list,
                in their order; see `each` for more than fit into memory.
            methods: a name or method object, several, "all" (of fewer than 200 passes) or
                "everything".
            target: a class index, label or callable, or None for the top prediction; "predicted"
                or "all" for each label or detection of the photo (see `explain.targets.Predicted`);
                for several photos also a list with one for each photo.
            targets: a list of several targets for every photo, instead of ``target``.
            top_k: explain the k best classes, instead of ``target``.
            layer, fuse, placement, batch_size, progress, samples, tolerance,
                max_seconds, keep_partial, interventions: see `explain.attribute`;
                interventions take the place of the explainer's own.

        Raises:
            PhotosError: some of several photos could not be explained; it holds the explanations of
                all others.
            ExplainError: an argument does not fit the model or the photo.
        """
        session = self.session(methods, target, **options)
        # an open file is one photo, although it is an iterator of lines
        if isinstance(image, list | tuple | Iterator) and not isinstance(image, io.IOBase):
            return collected(self._in_batches(image, session))
        (one,) = photos_for_targets([image], session.of_each)
        return self._explained_together([self._photo(one)], session)[0]

    @keywords(PhotoOptions, elsewhere=_OF_EXPLAINER)
    def each(
        self,
        images: Iterable[ImageLike],
        methods: Methods = "gradcam",
        target: TargetLike = None,
        **options: Unpack[PhotoOptions],
    ) -> Iterator[Explanation | PhotoError]:
        """Explain any number of photos, in batches, as an iterator.

        Yields an `Explanation` for each photo, or a `PhotoError` that names it and says why it
        could not be explained; the others continue. An error that all of the first few photos have,
        such as an unknown layer, is raised at once. Arguments as for calling an `Explainer`.

        >>> from PIL import Image
        >>> photos = [Image.new("RGB", (30, 20), "red"), b"no photo"]
        >>> [
        ...     str(outcome)[:41]
        ...     for outcome in Explainer().each(photos, "saliency", 0)
        ...     if isinstance(outcome, Exception)
        ... ]
        ['photo 1: image of 8 bytes is not an image']
        """
        return self._in_batches(images, self.session(methods, target, **options))

    @keywords(PhotoOptions, elsewhere=_OF_EXPLAINER)
    def session(
        self,
        methods: Methods = "gradcam",
        target: TargetLike = None,
        **options: Unpack[PhotoOptions],
    ) -> "Session":
        """Check what is asked once, to ask it of many batches of inputs: what an app or a run of
        one's own is built on. Arguments as for calling an `Explainer`.

        A target that asks for an activation decides how a model of numbers is read from now on,
        unless the caller named an activation.

        Raises:
            ExplainError: a method or target is not known, or does not go together.

        >>> explainer = Explainer("tiny")
        >>> session = explainer.session(["gradcam", "saliency"], top_k=2)
        >>> [method.name for method in session.methods], len(session.targets)
        (['gradcam', 'saliency'], 2)
        """
        settings: dict[str, Any] = {"interventions": self.interventions, **options}
        several = settings.pop("targets", None)
        top_k = settings.pop("top_k", None)
        wanted = as_targets(target, several, top_k, self.categories)
        listed = one_per_image(target)
        of_each = None if listed is None else as_targets(targets=listed, categories=self.categories)
        # an activation that a target asks for makes probabilities of what would be numbers
        if self._outputs is None or self._outputs.kind == "numbers":
            activations = {
                asked_target.activation for asked_target in (*wanted, *(of_each or ()))
            } - {None}
            activation = self._activation_of_caller or next(iter(activations), None)
            if activation != self._activation_of_caller:
                self.activation = activation
                self._outputs = None  # to be found out again
        is_group = isinstance(methods, str) and methods in GROUPS
        chosen: Any = methods if is_group else self._methods(methods)
        return Session(self, chosen, wanted, settings, of_each)

    def _methods(self, methods: Methods) -> list[Method]:
        """The methods fitted to the preprocessing: black baselines become the input values of
        black, and methods that use the range of inputs get the values of black and white.
        """
        listed = (
            [methods]
            if isinstance(methods, str) or not isinstance(methods, Iterable)
            else list(methods)
        )
        chosen = []
        for method in map(get_method, listed):
            if options(method).get("baseline") == Black():
                method = replace(method, baseline=get_baseline(Black(), self.preprocess))  # type: ignore[call-arg]
            elif method.lacks_range:
                low, high = range_of(self.preprocess) or (None, None)
                method = replace(method, low=low, high=high)  # type: ignore[call-arg]
            chosen.append(method)
        return chosen

    def _in_batches(
        self, images: Iterable[ImageLike], session: "Session"
    ) -> Iterator[Explanation | PhotoError]:
        """Yield the explanation, or the error, of each photo in order, read as needed. Inputs of
        one shape are explained together if that gives the same maps as each alone.
        """
        limit = session.options.get("batch_size")
        largest_batch = min(AT_ONCE, limit) if isinstance(limit, int) and limit > 0 else AT_ONCE

        def read(image: ImageLike, place: int) -> Any:
            """Return the photo with its input, or a pair of its place and the error if it cannot be
            read."""
            try:
                return self._photo(image, place)
            except Exception as error:
                return place, error

        def at_once(photo: Any) -> int:
            """Return how many photos of this size make a batch: as many as fit into `AREA` pixels,
            and as the session allows."""
            area: int = photo.image.width * photo.image.height
            return session.at_once(photo.x, min(largest_batch, max(1, AREA // area)))

        every_image = enumerate(photos_for_targets(images, session.of_each))
        batches = explained(
            (read(image, place) for place, image in every_image),
            lambda photos: self._explained_together(photos, session),
            alike=lambda photo: (
                (photo.x.shape, photo.x.dtype) if isinstance(photo, Photo) else None
            ),
            at_once=at_once,
            apart=lambda photo: samples_are_apart(self.model, photo.x),
        )
        # what could not be read is a pair of its place and the error already
        by_place = (
            [
                (photo.place, result) if isinstance(photo, Photo) else photo
                for photo, result in batch
            ]
            for batch in batches
        )
        return reported(by_place)

    def _photo(self, image: ImageLike, place: int = 0) -> Photo:
        """Return a photo with the model's input made of it, and its source; ``place`` is its number
        among several, from 0, by which results are put in order."""
        photo = self.read(image)
        source = image_path(image)
        return Photo(photo, source, self._input_of(photo), source or f"photo {place}", place)

    def _explained_together(self, photos: list[Photo], session: "Session") -> list[Explanation]:
        """Return the explanations of photos whose inputs have one shape, made in one batch; tensors
        made within are on the CPU, whatever the caller's default device."""
        # no decorator: it would add a stack frame, by which warnings find the caller's line
        with cpu_by_default():
            return self._explanations_of(photos, session)

    def _explanations_of(self, photos: list[Photo], session: "Session") -> list[Explanation]:
        """Explain a batch once, with the interventions, and split the results by photo. Targets of
        each photo become one target for the batch; maps of tiles are laid on their photo.
        """
        targets = [self._targets_on(photo, session) for photo in photos]
        batch_targets = targets[0]
        names = [photos[0].source]  # in messages; without a file, one photo needs no name
        if len(photos) > 1:
            names = [photo.name for photo in photos]
            if session.of_each is not None:
                batch_targets = [as_target([of_photo[0] for of_photo in targets])]
        x = torch.cat([photo.x for photo in photos])
        with intervene(self.model, session.options["interventions"]):
            # photos of tiles or frames, which have five dimensions, come one at a time
            tiles = self._tiles(photos[0]) if x.ndim == 5 else ()
            # of tiles, each has its own box, and ``seen`` stays empty
            seen = [locate(self.preprocess, photo.image.size) for photo in photos if not tiles]
            with naming(names), showing(self._in_photo(photos, x)):
                answers = replace(session, targets=batch_targets)(x, seen)
            hooks = tuple(unwrap.callers_hooks(self.model))
        outputs = self.outputs
        probabilities = answers.probabilities
        numbers = answers.logits if outputs.kind == "numbers" else None
        shared: Any = {
            "crops": tiles,
            "origin": replace(self.origin, hooks=hooks),
            "input_size": self._size(x),
            "categories": self.categories,
            "style": self.style,
            "explainer": self,
            "outputs": outputs,
        }
        explanations = []
        for index, photo in enumerate(photos):
            size = photo.image.size
            results = of_input = answers.results_of(index)
            if tiles:
                results = converted(results, partial(tiles_on_photo, boxes=tiles, size=size))
            in_photo = answers.located[index]
            if in_photo is not None:  # with these, another call explains the same boxes
                targets[index] = list(in_photo.targets)
            explanation = Explanation(
                photo=photo.image,
                source=photo.source,
                box=seen[index] if seen else Box.whole(size),
                results=tuple(results),
                of_input=tuple(of_input) if tiles else (),
                asked=tuple(map(encoding.encode_target, targets[index])),
                session=replace(session, targets=targets[index], of_each=None),
                probabilities=None if probabilities is None else probabilities[index].clone(),
                numbers=None if numbers is None else numbers[index].clone(),
                detections=() if in_photo is None else in_photo.detections,
                boxes=() if in_photo is None else in_photo.boxes,
                **shared,
            )
            explanations.append(explanation)
        return explanations

    def _in_photo(self, photos: Sequence[Photo], x: torch.Tensor) -> InPhoto:
        """Return the function by which messages about detections give boxes in pixels of the photo
        instead of pixels of the input ``x``."""

        def in_photo(image: int, corners: Sequence[float]) -> Sequence[float]:
            """Return a box (left, top, right, bottom) on the input of photo number ``image`` in
            pixels of that photo."""
            seen = locate(self.preprocess, photos[image].image.size)
            return seen.to_photo(corners, self._size(x))

        return in_photo

    def _targets_on(self, photo: Photo, session: "Session") -> list[Target]:
        """Return the targets of one photo, its own where each photo has one. Places such as
        "person@320,200" are given in pixels of the photo, and are returned in pixels of its input.
        """
        targets = list(session.targets)
        if session.of_each is not None:
            targets = [session.of_each[photo.place]]
        if any(isinstance(target, Place) for target in targets):
            seen = locate(self.preprocess, photo.image.size)
            size = self._size(photo.x)
            for number, target in enumerate(targets):
                if isinstance(target, Place):
                    targets[number] = target.on_photo(seen, size)
        with naming([photo.source]), intervene(self.model, session.options["interventions"]):
            return replace(session, targets=targets).of_photo(photo.x).targets

    @keywords()
    def concepts(
        self, image: ImageLike, count: int = 4, *, layer: layer_names.Where | None = None
    ) -> PhotoConcepts:
        """Find the concepts that a layer sees in one photo; see `explain.find_concepts`.

        Returns:
            A `PhotoConcepts`, which is displayed in a notebook and can be saved. It unpacks into a
            picture of where the concepts are, with the classes that each contributes to below, and
            the `Concepts`.

        >>> from PIL import Image
        >>> picture, concepts = Explainer().concepts(Image.new("RGB", (60, 40), "orange"), 2)
        >>> len(concepts), picture.width
        (2, 360)
        """
        photo = self._photo(image)
        if photo.x.ndim == 5:
            raise ImageError(
                "preprocess must return one image (C, H, W) for concepts, got frames or tiles "
                f"{tuple(photo.x.shape)}; give them to explain.find_concepts"
            )
        concepts = find_concepts(self.model, photo.x, count, layer=layer)
        box = locate(self.preprocess, photo.image.size)
        return PhotoConcepts(concepts, photo.image, photo.source, self.origin, box, self.categories)

    def inspect(self, image: ImageLike) -> inspection.Inspection:
        """Run the model on one photo and list the output of every layer; see
        `explain.hooks.inspect`."""
        x = self.as_input(image)
        check_inputs(self.model, self._inputs(x))
        return inspect(unwrap.unwrapped(self.model), x)

    @property
    def outputs(self) -> Outputs:
        """What the model's outputs are: scores of classes or labels, or numbers. Known from the
        first inputs on, and until then classes without an activation.

        >>> explainer = Explainer("tiny")
        >>> explainer.probabilities(torch.zeros(1, 3, 80, 80)).shape, explainer.outputs.kind
        (torch.Size([1, 200]), 'classes')
        """
        return self._outputs or Outputs()

    def probabilities(self, x: torch.Tensor) -> torch.Tensor | None:
        """Run the model on inputs ``(N, C, H, W)`` without gradients, and return the probabilities
        ``(N, K)`` of its classes; None for a model of numbers.

        Raises:
            ExplainError: it gives no class scores, or the labels are not as many.

        >>> explainer = Explainer("tiny")
        >>> x = explainer.batch([torch.rand(3, 80, 80), torch.rand(3, 80, 80)])
        >>> explainer.probabilities(x).shape
        torch.Size([2, 200])
        """
        return self._probabilities(x, find_logits(self._output(x), len(x)))

    def _output(self, x: torch.Tensor) -> Any:
        """What the model returns for inputs ``(N, C, H, W)``, without gradients."""
        model = self.model
        with untouched(model), torch.no_grad(), intervene(model, self.interventions):
            return as_inputs(self._inputs(x)).call(model)

    def _predicted(self, target: Predicted, x: torch.Tensor, logits: torch.Tensor) -> list[Target]:
        """The classes that are predicted of one photo, from its class scores ``(1, K)``."""
        probabilities = self._probabilities(x, logits)
        if probabilities is None:
            raise TargetError(
                "target 'predicted' must have a model with probabilities of classes, got one of "
                "numbers; name a target"
            )
        return [*target.classes_in(probabilities[0], self.outputs.kind)]

    def _probabilities(self, x: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor | None:
        """The probabilities ``(N, K)`` of ``logits``, or None where outputs are numbers or not for
        classes. What the outputs are is found out by the first call, and kept.
        """
        if logits is None:
            return None
        classifier.check_labels(self.categories, logits.shape[1])
        if self._outputs is None:
            outputs = classifier.outputs_for(
                self.classifier, self._inputs(x), logits, self.activation
            )
            self._outputs = replace(outputs, unit=self.unit)
            self.activation = self._outputs.activation
        return self._outputs.probabilities(logits)

    def _inputs(self, x: torch.Tensor) -> InputsLike:
        """Return inputs as `attribute` takes them, with the caller's layout of frames and channels
        if there is one."""
        return x if self.layout is None else Inputs((x,), layout=self.layout)

    def _tiles(self, photo: Photo) -> tuple[Box, ...]:
        """The box of each tile or frame in the photo, in its pixels: slices of a volume lie side by
        side (``cells``), tiles come from the preprocessing, repeated frames share one box.
        """
        if hasattr(photo.image, "cells"):
            return boxes_of_slices(self.preprocess, photo.image)
        tiles = self.preprocess(photo.image)
        frames = photo.x.shape[2 if self.layout == "NCTHW" else 1]
        if tiles.ndim == 4 and len(tiles) > 1:
            return tuple(locate_tiles(self.preprocess, photo.image.size, frames))
        # where a box is looked for, the preprocessing must give one image
        first = self.preprocess if tiles.ndim == 3 else lambda image: self.preprocess(image)[0]
        return (locate(first, photo.image.size),) * frames

    @keywords()
    def as_input(self, image: ImageLike) -> torch.Tensor:
        """Turn a photo into an input of the model: ``(1, C, H, W)``, on its device and in its
        precision.

        `explain.data.images.load_image` reads it as RGB. ``preprocess`` crops, scales and
        normalises it; where neither the caller nor the model brings one, that is
        `explain.models.preprocessing.CenterCrop`.

        >>> from PIL import Image
        >>> Explainer().as_input(Image.new("RGB", (30, 20))).shape
        torch.Size([1, 3, 224, 224])
        """
        return self._input_of(self.read(image))

    def _input_of(self, photo: Image.Image) -> torch.Tensor:
        """Return the input that is made of a photo that has been read, ``(1, C, H, W)``."""
        if hasattr(photo, "cells"):  # of a volume, whose channels come before its slices
            return self.batch(input_of_slices(self.preprocess, photo)[None])
        preprocessed = as_input(self.preprocess(photo))
        config = huggingface.config_of(self.model)
        # without a layout or configuration, a single tile is a batch of one by mistake
        if (
            preprocessed.ndim == 4
            and len(preprocessed) == 1
            and self.layout is None
            and config is None
        ):
            raise ImageError(
                f"preprocess must return a tensor (C, H, W), got {shown(preprocessed)}; leave "
                "out the batch dimension, or give layout='NTCHW' for a single tile"
            )
        x = self.batch(preprocessed[None])
        if x.ndim == 4:
            if self.layout in (None, "NCHW"):
                return x
            if self.layout == "NHWC":
                return x.movedim(1, -1)
            x = x[:, None]  # one frame or tile
        if x.shape[1] == 1:  # one photo for a model of videos: all frames are the same
            frames = getattr(config, "num_frames", getattr(config, "frames_per_clip", 1))
            x = x.repeat_interleave(frames, 1)
        channel_dim = (self.layout or "NTCHW").index("C")
        return x if channel_dim == 2 else x.movedim(2, channel_dim)

    def _size(self, x: torch.Tensor) -> tuple[int, int]:
        """The height and width of inputs, which lie as the model takes them."""
        height = x.ndim - 2 if self.layout is None else self.layout.index("H")
        return int(x.shape[height]), int(x.shape[height + 1])

    def read(self, image: ImageLike) -> Image.Image:
        """Return a photo as RGB, a scan within the window of grey values; for a model of volumes, a
        volume as a picture of all its slices. The photo can be explained in place of its file.

        >>> Explainer("tiny").read("assets/chelsea.png").mode
        'RGB'
        """
        return load_image(image, self.window, stack=self.sees_volumes)

    def batch(self, inputs: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        """Return inputs of one shape ``(C, H, W)``, or a batch ``(N, C, H, W)``, as a batch on the
        model's device and in its precision.

        >>> explainer = Explainer("tiny")
        >>> explainer.batch([torch.rand(3, 32, 32).double(), torch.rand(3, 32, 32)]).dtype
        torch.float32
        """
        x = inputs if isinstance(inputs, torch.Tensor) else torch.stack(list(inputs))
        parameter = floating_parameter(self.model)
        return x if parameter is None else x.to(parameter.device, parameter.dtype)


@dataclass(frozen=True, eq=False)
class Session:
    """A question with its explainer, checked, which is asked of any number of batches; made by
    `Explainer.session`.

    ``methods`` is a list, or the name of a group ("all"), whose methods the inputs decide.
    ``targets`` are those for every image; ``of_each`` has one target for each photo, where
    ``target`` was a list, and is None otherwise. ``options`` are further arguments of `attribute`.
    A part of the question is replaced by ``dataclasses.replace``.

    >>> explainer = Explainer("tiny")
    >>> session = explainer.session(["gradcam", "saliency"])
    >>> answers = session(explainer.batch([explainer.as_input("assets/chelsea.png")[0]]))
    >>> answers.results[0]["gradcam"].heatmap.shape, answers.predictions[0].label
    (torch.Size([1, 80, 80]), 'Egyptian cat')
    """

    explainer: Explainer
    methods: list[Method] | str
    targets: list[Target]
    options: Mapping[str, Any]
    of_each: list[Target] | None = None
    # about how many passes a photo takes, by the shape of its input
    _costs: dict[torch.Size, float] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, x: torch.Tensor, seen: Sequence[Box] = ()) -> BatchAnswers:
        """Return the attributions, class scores and probabilities of inputs ``x`` ``(N, C, H, W)``,
        or of frames and tiles, as `Explainer.batch` and `Explainer.as_input` make them.

        ``seen`` is the part of each photo that its input shows. Where the model gives no class
        scores, as a detector, the targets are located in these parts; without them, nothing is.

        Raises:
            ExplainError: an argument does not fit the model or its inputs.
        """
        explainer = self.explainer
        inputs = explainer._inputs(x)
        methods: Any = self.methods
        results: list[dict[str, Attribution]] = attribute(
            explainer.model,
            inputs,
            methods,
            targets=self.targets,
            categories=explainer.categories,
            activation=explainer.activation,
            **self.options,
        )
        logits = next(iter(results[0].values())).logits
        in_photos: Sequence[Located | None] = [None] * len(x)
        if logits is None and seen:
            in_photos = located(
                explainer.model,
                inputs,
                self.targets[: len(results)],  # of detections, there may be fewer
                seen,
                explainer.categories,
                explainer.activation,
            )
        probabilities = explainer._probabilities(x, logits)
        outputs = explainer.outputs
        values = logits if outputs.kind == "numbers" else probabilities
        best: list[Prediction | None] = [None] * len(x)
        if values is not None:
            best = [outputs.answer(row, explainer.categories) for row in values]
        return BatchAnswers(results, logits, probabilities, predictions=best, located=in_photos)

    def of_photo(self, x: torch.Tensor) -> "Session":
        """Return the session for one photo, by its input ``x`` ``(1, C, H, W)``: with a target for
        each class that is predicted of it, or each detection, in place of a target `Predicted`, for
        which the model runs once more.

        >>> explainer = Explainer("tiny", activation="sigmoid")
        >>> session = explainer.session(target=Predicted(0.9))
        >>> len(session.of_photo(torch.zeros(1, 3, 80, 80)).targets) > 1
        True
        """
        if not any(isinstance(target, Predicted) for target in self.targets):
            return self
        explainer = self.explainer
        output = explainer._output(x)
        targets: list[Target] = []
        for target in self.targets:
            if isinstance(target, Predicted):
                predicted = target.detections_in(output, explainer._size(x), explainer.categories)
                if predicted is None:
                    predicted = explainer._predicted(target, x, find_logits(output, len(x)))
                # each once, whatever else was asked for
                targets += [one for one in predicted if one not in [*targets, *self.targets]]
            else:
                targets.append(target)
        return replace(self, targets=targets)

    def methods_for(self, x: torch.Tensor) -> list[Method]:
        """Return the methods that answer; those of a group are chosen for the layer and the class
        of the inputs ``x``.

        >>> explainer = Explainer("tiny")
        >>> methods = explainer.session("all").methods_for(torch.rand(1, 3, 80, 80))
        >>> "gradcam" in {method.name for method in methods}
        True
        """
        if not isinstance(self.methods, str):
            return self.methods
        selection = select(
            self.explainer.model,
            self.explainer._inputs(x),
            self.methods,
            layer=self.options.get("layer"),
            target=self.targets[0],
            categories=self.explainer.categories,
        )
        return self.explainer._methods(selection.methods)

    def at_once(self, x: torch.Tensor, most: int) -> int:
        """Return how many photos with inputs like ``x`` ``(1, C, H, W)`` make a batch: at most
        ``most``, as many as take about `PASSES` passes, and one where a batch could change maps.

        >>> explainer = Explainer("tiny")
        >>> x = torch.rand(1, 3, 80, 80)
        >>> [explainer.session(method).at_once(x, 8) for method in ("gradcam", "rise")]
        [8, 1]
        """
        if most == 1 or self.alone or x.ndim != 4:
            return 1
        if x.shape not in self._costs:
            # where it fails, so does the photo, which says why
            (cost,) = each_tried([x], lambda inputs: map(self._cost, inputs))
            self._costs[x.shape] = 0.0 if isinstance(cost, Exception) else cost
        return max(1, min(most, int(PASSES // max(1.0, self._costs[x.shape]))))

    def _cost(self, x: torch.Tensor) -> float:
        """About how many passes an input ``x`` ``(1, C, H, W)`` takes, by the plan; infinite for
        searches."""
        explainer = self.explainer
        x = explainer.batch(x)
        methods = self.methods_for(x)
        targets = self.targets if self.of_each is None else self.of_each[:1]
        settings: dict[str, Any] = {**self.options, "categories": explainer.categories}
        with muted(), intervene(explainer.model, self.options["interventions"]):
            request = requested(
                explainer.model,
                explainer._inputs(x),
                methods,
                target=None,
                targets=targets,
                top_k=None,
                **settings,
            )
            return request.cost(request.plan())

    @cached_property
    def alone(self) -> bool:
        """Whether each photo must be explained on its own: in a batch, maps could change where a
        target is no plain class, or where an option of a method holds a tensor, which may be meant
        for one image."""
        if any(not isinstance(target, ClassTarget | TopClass) for target in self.targets):
            return True
        methods = self.methods
        if isinstance(methods, str):
            methods = list(map(get_method, list_methods()))
        return any(encoding.has_tensor(encoding.encode_fields(method)) for method in methods)


@keywords(PhotoOptions, elsewhere=_OF_EXPLAINER)
def explain(
    image: ImageLike,
    methods: Methods = "gradcam",
    target: TargetLike = None,
    **options: Unpack[PhotoOptions],
) -> Explanation:
    """Explain a photo with the default model, which is loaded once; options as for calling an
    `Explainer`.

    >>> from PIL import Image
    >>> explanation = explain(Image.new("RGB", (32, 24), "orange"))
    >>> explanation.overlay("gradcam").size
    (32, 24)
    """
    return _default_explainer()(image, methods, target, **options)


@cache
def _default_explainer() -> Explainer:
    """Return the explainer of the default model, which is loaded at the first call of `explain` and
    then kept."""
    return Explainer()
