"""Perturbations and reducers: which perturbed samples are run, what is computed for each, and how
the results are added up.

Methods, metrics and checks give the engine these values. Equal ones are run once for all methods
and targets of a call.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from explain.engine.needs import Activations, Evidence, Need

Build = Callable[[Tensor, Tensor], Tensor]
"""From the images ``(b,)`` of samples, and their numbers ``(b,)`` among those of their image, to a
tensor ``(b, ...)``."""


@dataclass(frozen=True)
class PerturbedRows:
    """Perturbed samples, which are made when they are needed.

    ``owners`` ``(P,)`` is the image of each sample, and ``numbers`` ``(P,)`` its number among those
    of its image. ``build`` makes perturbed inputs or feature maps: new tensors, which the network
    may overwrite. ``masks`` makes what stays of each, if samples are masked.
    ``carry(tensor, numbers)`` does to a tensor ``(b, ...)`` of samples what was done to the image's
    geometry; None where nothing was moved.
    """

    owners: Tensor
    numbers: Tensor
    build: Build
    masks: Build | None = None
    carry: Build | None = None

    def make(self, samples: Tensor) -> Tensor:
        """Make the perturbed samples at these places ``(b,)`` of all samples: inputs or feature
        maps ``(b, ...)``.

        The engine calls it for each batch, and again for samples that are repeated, so it must give
        the same samples.
        """
        return self.build(self.owners[samples], self.numbers[samples])

    def some(self, samples: Tensor) -> "PerturbedRows":
        """The perturbed samples at some places, without masks or ``carry``: a few, run to see how
        exact scores are."""
        return PerturbedRows(self.owners[samples], self.numbers[samples], self.build)


def samples_of(counts: Sequence[int], device: torch.device, build: Build) -> PerturbedRows:
    """Perturbed samples of which image i has ``counts[i]``: the first of all images, then the
    second, and so on, for a rough result early. ``build`` makes the samples of a batch."""
    if len(set(counts)) == 1:  # computed without waiting for the device
        images = torch.arange(len(counts), device=device).repeat(counts[0])
        numbers = torch.arange(counts[0], device=device).repeat_interleave(len(counts))
        return PerturbedRows(images, numbers, build)
    exists = torch.arange(max(counts, default=0), device=device)[:, None] < torch.tensor(
        counts, device=device
    )
    numbers, images = exists.nonzero(as_tuple=True)
    return PerturbedRows(images, numbers, build)


def one_sample_each(samples: Tensor) -> PerturbedRows:
    """Perturbed samples with one for each image, made already: ``(N, ...)``."""
    return samples_of([1] * len(samples), samples.device, lambda images, numbers: samples[images])


def one_by_one(make: Callable[[int, int], Tensor]) -> Build:
    """Turn ``make(image, number)``, which makes a single perturbed sample, into a `Build` for whole
    batches."""

    def build(images: Tensor, numbers: Tensor) -> Tensor:
        samples = zip(images.tolist(), numbers.tolist(), strict=True)
        return torch.stack([make(image, number) for image, number in samples])

    return build


class Perturbation(ABC):
    """A way to perturb images or feature maps. Subclasses are frozen dataclasses: equal ones are
    run once for all methods of a call.

    It may look at the evidence that it ``needs``, and at nothing that depends on the target.
    """

    of_tokens: ClassVar[bool] = False
    """Whether it leaves tokens out before the first block of a transformer: its samples are truth
    values ``(b, h, w)``, true for the tokens that stay, as many in each sample. It alters no layer
    then."""
    is_reference: ClassVar[bool] = False
    """Whether the scores of other samples are compared with those of its samples; it is run first
    then."""

    draws_anew: ClassVar[bool] = False
    """Whether a network that draws random numbers draws others for each of its samples, since the
    results are averaged; else all samples get those of the first pass."""
    is_by_hooks: ClassVar[bool] = False
    """Whether hooks alter the samples, so that no unperturbed image can be run after them."""
    words: str = ""
    """What the samples are, as a plan says it."""

    def __str__(self) -> str:
        """The samples in a plan's words, such as "noisy copies of the photo"."""
        return self.words or repr(self)

    @property
    def of_layer(self) -> bool:
        """Whether the perturbation alters feature maps ``(b, C, h, w)`` of a layer, and not inputs
        ``(b, C, H, W)``."""
        return False

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset()

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        """The largest number of perturbed samples of one image, for a layer with ``channels`` and
        an image of ``size``.

        For plans, which estimate costs before anything runs. ``channels`` is 0 and ``size`` empty
        where they are not known; the count is 0 where it depends on them. By default it is the
        option ``samples``, if there is one.
        """
        return getattr(self, "samples", 0)

    @abstractmethod
    def rows(self, evidence: Evidence) -> PerturbedRows:
        """Return the perturbed samples of all images, to be made batch by batch."""

    def matching_rows(self, evidence: Evidence, first: PerturbedRows) -> PerturbedRows:
        """The perturbed samples of a further explained input, run together with those of the
        ``first`` one, sample by sample.

        They must have the same owners as ``first``.
        """
        return self.rows(evidence)


class Accumulator(ABC):
    """Adds up the results of perturbed samples as they come."""

    @abstractmethod
    def add(self, images: Tensor, numbers: Tensor, values: Tensor) -> None:
        """Take the values ``(b, ...)`` of a batch of perturbed samples, with their images ``(b,)``
        and numbers within these.

        Called once for each batch; every sample comes once, and images may come in any order.
        """

    @abstractmethod
    def result(self) -> Any: ...

    def enough(self) -> bool:
        """Whether no more samples are needed, for any image; asked before each batch."""
        return False

    def has_result(self) -> bool:
        """Whether there is a result already, so that it may end early when its time is over."""
        return True

    def done(self) -> Tensor | None:
        """Which images ``(N,)`` need no more samples, as truth values; None where all images need
        the same samples.

        The engine leaves out the samples of such images.
        """
        return None

    def so_far(self) -> Tensor | None:
        """The map so far, for a progress callback, with zeros for images without one; None if there
        is none until the end."""
        return None

    def partial(self) -> Any:
        """The result so far, marked as unfinished, after an interrupt; None if there is none until
        the end."""
        return None


class Reducer(Protocol):
    """A way to add up results of perturbed samples: a frozen value, as perturbations are.

    One with ``max_seconds`` gets no more samples after so many seconds, once there is a result.
    """

    def begin(self, evidence: Evidence) -> Accumulator: ...


@dataclass(frozen=True)
class KeepAll(Reducer):
    """Keeps the result of each sample: those of the first image by their numbers, then those of the
    second, and so on; with ``by_image``, a list with a tensor for each image."""

    by_image: bool = False

    def begin(self, evidence: Evidence) -> Accumulator:
        return _InOrder(evidence.score, self.by_image)


class _InOrder(Accumulator):
    """Keeps the value of each perturbed sample; the result has them by image, then by number."""

    def __init__(self, score: Tensor, by_image: bool) -> None:
        """Begin with empty tensors, so that there is a result also without samples; ``score``
        ``(N,)`` gives their type and device."""
        no_indices = torch.zeros(0, dtype=torch.long, device=score.device)
        self._count = len(score)
        self._by_image = by_image
        self._images = [no_indices]
        self._numbers = [no_indices]
        self._values = [score.new_zeros(0)]

    def add(self, images: Tensor, numbers: Tensor, values: Tensor) -> None:
        """Keep the values of a batch of perturbed samples, with their images and numbers."""
        self._images.append(images)
        self._numbers.append(numbers)
        self._values.append(values)

    def result(self) -> Any:
        """The values ``(P, ...)`` of all samples, sorted by image, then by number within the image;
        the numbers of an image must be distinct."""
        images = torch.cat(self._images)
        numbers = torch.cat(self._numbers)
        # one key sorts by image, then by number
        sort_keys = images * (len(numbers) + 1) + numbers
        values = torch.cat(self._values)[sort_keys.argsort()]
        if not self._by_image:
            return values
        return list(torch.split(values, images.bincount(minlength=self._count).tolist()))


class SumOfSamples(Accumulator):
    """The sum ``(count, ...)`` over the perturbed samples of each image of ``weigh(images, numbers,
    values)``, which gives ``(b, ...)`` for a batch; None without samples."""

    def __init__(self, count: int, weigh: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        """Begin a sum over perturbed samples; its shape is known from the first batch."""
        self._count = count
        self._weigh = weigh
        self._total: Tensor | None = None
        """The sums ``(count, ...)``; None before the first batch."""

    def add(self, images: Tensor, numbers: Tensor, values: Tensor) -> None:
        """Add the weighed values of a batch of perturbed samples, each to the sum of its image.
        Samples may come in any order and number."""
        weighted = self._weigh(images, numbers, values)
        if self._total is None:
            self._total = weighted.new_zeros((self._count, *weighted.shape[1:]))
        self._total.index_add_(0, images, weighted)

    def result(self) -> Tensor | None:
        return self._total


class Attributor(Protocol):
    """A method, as far as the engine uses it."""

    @property
    def needs(self) -> frozenset[Need[Any]]: ...

    def __call__(self, evidence: Evidence) -> Tensor: ...


@dataclass(frozen=True)
class AnswerTo:
    """The answer to one need for each sample."""

    need: Need[Tensor]

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({self.need})

    def __call__(self, evidence: Evidence) -> Tensor:
        return evidence[self.need]


ScoreKind = Literal["logit", "probability", "margin", "all"]
"""What of a score counts: the score as the target picks it, the probability of its class, the
margin of its class's logit over the best other one, or the logits of all classes."""


@dataclass(frozen=True)
class ScoreOf:
    """The score of each perturbed sample, ``(b,)``: as the target picks it, or of another kind;
    "all" gives the logits ``(b, K)``."""

    kind: ScoreKind = "logit"
    """Without effect for targets that are no class, such as a detected box; but sums of classes,
    and a target of 'no', have a probability."""
    category: int | None = None
    """Stands in place of the target's class, if it is given."""

    needs: ClassVar[frozenset[Need[Any]]] = frozenset()

    def __call__(self, evidence: Evidence) -> Tensor:
        """The score of each perturbed sample in ``evidence``, ``(b,)``, or all logits ``(b, K)``,
        by the kind."""
        classes = evidence.classes
        logits = evidence.logits
        if self.kind == "all" and logits is not None:
            return logits
        if logits is None or self.kind == "logit":
            return evidence.score
        if classes is None:
            probability = evidence.probability if self.kind == "probability" else None
            return evidence.score if probability is None else probability
        if self.category is not None:
            classes = torch.full_like(classes, self.category)
        if self.kind == "probability":
            return evidence.outputs.of_classes(logits, classes)
        other_logits = logits.scatter(1, classes[:, None], -torch.inf)
        return logits.gather(1, classes[:, None])[:, 0] - other_logits.amax(1)


class Attributions(Need[Any]):
    """The results of a method for all perturbed samples, added up by a reducer."""

    perturbation: Perturbation
    method: Attributor
    reducer: Reducer

    @cached_property
    def of_layer(self) -> bool:  # type: ignore[override]
        return self.perturbation.of_layer or any(
            need.of_layer for need in (*self.method.needs, *self.perturbation.needs)
        )

    @property
    def of_input(self) -> bool:  # type: ignore[override]
        return any(need.of_input for need in self.method.needs)

    @property
    def also(self) -> frozenset[Need[Any]]:  # type: ignore[override]
        return self.perturbation.needs

    @property
    def reads_weights(self) -> bool:
        return any(need.reads_weights for need in self.method.needs)


class Scores(Attributions):
    """The score ``(P,)`` of each perturbed sample, in their order."""

    method: Attributor = ScoreOf()
    reducer: Reducer = KeepAll()

    detached = True


def keep_graph(needs: Collection[Need[Any]]) -> bool:
    """Whether answers to these needs can keep their autograd graph (``create_graph``). Attention,
    and what is computed from scores of perturbed images, cannot."""
    methods = [need.method for need in needs if isinstance(need, Attributions)]
    methods_keep_graph = all(
        getattr(method, "differentiable", keep_graph(method.needs)) for method in methods
    )
    return methods_keep_graph and not any(need.detached for need in needs)


class OneForEach(Perturbation):
    """A perturbation with one sample for each image."""

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return 1

    @abstractmethod
    def perturbed(self, evidence: Evidence) -> Tensor:
        """Return the perturbed sample of each image: ``(N, ...)``."""

    def rows(self, evidence: Evidence) -> PerturbedRows:
        return one_sample_each(self.perturbed(evidence))


@dataclass(frozen=True)
class Unperturbed(OneForEach):
    """The image, or a layer's feature maps, as they are: a reference for the scores of other
    samples."""

    of_layer: bool = False

    is_reference = True

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({Activations()}) if self.of_layer else frozenset()

    def __str__(self) -> str:
        return "the layer's own maps" if self.of_layer else "the photo itself"

    def perturbed(self, evidence: Evidence) -> Tensor:
        """The explained inputs or the layer's feature maps as they are, one sample for each
        image."""
        return evidence.activations if self.of_layer else evidence.inputs


@dataclass(frozen=True, eq=False)
class GivenSamples(Perturbation):
    """Samples that are there already, made of ``inputs`` or, where these are None, of a layer's
    maps. No two are equal. Explained inputs beside ``inputs`` stay as they are."""

    perturbed_samples: PerturbedRows
    words: str
    inputs: Tensor | None = None

    @property
    def of_layer(self) -> bool:
        return self.inputs is None

    @property
    def needs(self) -> frozenset[Need[Any]]:
        """Samples of a layer are made of its feature maps, which must be recorded; samples of
        inputs need nothing."""
        return frozenset({Activations()}) if self.of_layer else frozenset()

    def rows(self, evidence: Evidence) -> PerturbedRows:
        """The samples that were given; of another explained input than ``inputs``, copies of it as
        it is."""
        x = evidence.inputs
        if self.inputs is None or (x.shape == self.inputs.shape and torch.equal(x, self.inputs)):
            return self.perturbed_samples
        return replace(self.perturbed_samples, build=lambda images, numbers: x[images])


def given_sample(sample: Tensor, image: int, words: str, inputs: Tensor) -> GivenSamples:
    """A perturbation with a single ``sample``, made already, of one image of ``inputs``. ``words``
    describes it in a plan."""
    owner = torch.tensor([image], device=sample.device)
    samples = PerturbedRows(
        owner, torch.zeros_like(owner), lambda images, numbers: sample[None].clone()
    )
    return GivenSamples(samples, words, inputs)


Steps = Generator[Scores, Any, None]
"""Asks for the values of perturbed samples, and is sent them, in the order of the samples."""


class OutOfTimeError(Exception):
    """Raised in a search that asks for samples when its time is over; it may ask for a few more to
    finish."""


class Search(ABC):
    """A search by perturbed samples that depend on the values of earlier ones: `steps` asks for
    samples, and the engine runs them."""

    samples = 0
    """How many samples were run by now."""
    finished = False
    """False before its end, and after an interrupt."""
    finishing = False
    """Whether what it asks for is run however late it is."""
    images = 1
    """How many images it is about."""

    @property
    @abstractmethod
    def planned(self) -> int:
        """How many perturbed samples the search would run without an early end; for progress."""

    @property
    def has_result(self) -> bool:
        """Whether the search has a map to show after an interrupt."""
        return self.samples > 0

    @abstractmethod
    def steps(self) -> Steps: ...

    @abstractmethod
    def map(self) -> Tensor:
        """The map of each image ``(N, h, w)``, as far as the search has come."""


class Searcher(Protocol):
    """A method that searches, as far as the engine uses it; the searches share its ``max_seconds``,
    if it has any."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> frozenset[Need[Any]]: ...

    def searches(self, evidence: Evidence) -> Sequence[Search]:
        """New searches, one after the other in the order of the images."""


class Searches(Need[Sequence[Search]]):
    """The searches of a method, over; after an interrupt, some have found nothing. Of each sample
    that they ask for, they want ``of_samples``."""

    method: Searcher
    of_samples: Attributor = ScoreOf()

    detached = True

    @property
    def of_layer(self) -> bool:  # type: ignore[override]
        """Whether the search is about a layer: whether another need of its method is."""
        return any(need.of_layer for need in self.method.needs if not isinstance(need, Searches))
