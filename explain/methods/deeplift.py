"""DeepLIFT: the difference of the score from that of a baseline, handed back to the input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from explain.engine import Evidence, Multipliers, Need, Question, Revealed, Scores
from explain.layers import Grids
from explain.methods import sources
from explain.methods.base import Style
from explain.methods.checks import check_options
from explain.methods.expected import mean_score, scores_of, several
from explain.methods.path import PathStart, check_baseline, score_of
from explain.methods.sources import Source
from explain.methods.sources_of_masks import KERNELSHAP


@dataclass(frozen=True)
class Baseline:
    """What the photo is compared with, as the engine takes it."""

    start: PathStart

    def __str__(self) -> str:
        return str(self.start)

    def of(self, inputs: torch.Tensor) -> torch.Tensor:
        """The baseline of each input."""
        question = Question(inputs, inputs.new_zeros(len(inputs)), None, "", Grids(tuple(inputs.shape[2:])))
        return self.start.of(Evidence(question, None, {}))


@dataclass(frozen=True)
class OneOf:
    """One of several baselines, for all photos."""

    baselines: torch.Tensor
    index: int

    def __str__(self) -> str:
        return f"baseline {self.index + 1} of {len(self.baselines)}"

    def of(self, inputs: torch.Tensor) -> torch.Tensor:
        """The baseline, for each input."""
        known = several(self.baselines, inputs[0], "deepliftshap")
        return known[self.index].expand_as(inputs)


@dataclass(frozen=True)
class DeepLIFT:
    r"""Share the difference of the score from a baseline's out among the differences of the input.

    :math:`m_j (x_j - b_j)` with multipliers m that are handed back step by step. A function of one number hands on the
    slope between its two points; linear maps their weights; a product the mean of the other factor; a maximum goes to
    the place that made it rise or fall. Attention and normalisations are followed through these, step by step, and a
    softmax as the exponential of x - log(sum(exp(x))): its logarithm is shared out in proportion to its slopes.
    So the values add up to the difference of the scores (summation to delta), and what operations without a rule miss
    is the attribution's ``delta``. The network is run once more, on the baseline.

    By the second rule, reveal-cancel, what is added to each value and what is taken away are followed apart, and each
    part's effect on a function of one number is the mean of what it does alone and beside the other: so two inputs of
    which either would do share what they bring. It applies to networks of linear maps, functions of one number, sums
    and averages, and is refused elsewhere. The network is run on three rows for each image.

    Args:
        baseline: a value for every input, ``mean`` (each image's mean colour), ``blur`` (the image, blurred), or a
            tensor ``(C, H, W)``; 0 is what preprocessing makes of the training data's mean colour.
        rule: ``rescale``, or ``revealcancel`` where it applies.

    Returns:
        ``(N, C, H, W)``, in units of the score; positive speaks for the target, negative against it.

    Shrikumar et al., "Learning Important Features Through Propagating Activation Differences", ICML 2017.

    >>> import explain, torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 2))
    >>> a = explain.attribute(model, torch.rand(2, 3, 4, 4), DeepLIFT(), target=0)
    >>> a.values.shape, bool((a.delta.abs() < 1e-5).all())
    (torch.Size([2, 3, 4, 4]), True)
    """

    baseline: float | str | torch.Tensor = 0.0
    rule: Literal["rescale", "revealcancel"] = "rescale"

    name: ClassVar[str] = "deeplift"
    about: ClassVar[str] = "difference of the score from a baseline's, handed back"
    paper: ClassVar[str] = "Shrikumar et al., ICML 2017"
    source: ClassVar[Source] = sources.DEEPLIFT
    style: ClassVar[Style] = "signed"

    def __post_init__(self) -> None:
        check_options(self)
        check_baseline(self.name, self.baseline)

    @property
    def _start(self) -> PathStart:
        return PathStart(self.baseline, self.name)

    @property
    def _multipliers(self) -> Multipliers:
        return Multipliers(Baseline(self._start))

    @property
    def _revealed(self) -> Revealed:
        return Revealed(Baseline(self._start))

    @property
    def _below(self) -> Scores:
        return score_of(self.baseline, self.name)

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({self._revealed if self.rule == "revealcancel" else self._multipliers, self._below})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        if self.rule == "revealcancel":
            return evidence[self._revealed]
        return evidence[self._multipliers] * (evidence.inputs - self._start.of(evidence))

    def delta(self, evidence: Evidence, values: torch.Tensor) -> torch.Tensor:
        """By how much the values miss the difference of the scores at the photo and at the baseline."""
        return values.flatten(1).sum(1) - self.promised(evidence)

    def promised(self, evidence: Evidence) -> torch.Tensor:
        """The difference of the scores at the photo and at the baseline."""
        return evidence.score - evidence[self._below]


@dataclass(frozen=True)
class DeepLIFTSHAP:
    r"""Share the difference of the score from the mean of several baselines' out, as DeepLIFT does against each.

    The mean of `DeepLIFT` over the baselines, all of which are taken: nothing is drawn at random. The values add up to
    the score minus the mean score of the baselines. The network is run once more for each of them, forward and back.

    Args:
        baselines: a tensor ``(B, C, H, W)``, such as some photos of the training data; or a value for every input,
            which makes it `DeepLIFT`.

    Returns:
        ``(N, C, H, W)``, in units of the score; positive speaks for the target, negative against it.

    Lundberg and Lee, "A Unified Approach to Interpreting Model Predictions", NeurIPS 2017 (Deep SHAP).

    >>> import explain, torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 2))
    >>> photos = torch.rand(5, 3, 4, 4)
    >>> a = explain.attribute(model, photos[:2], DeepLIFTSHAP(photos[2:]), target=0)
    >>> a.values.shape, bool((a.delta.abs() < 1e-5).all())
    (torch.Size([2, 3, 4, 4]), True)
    """

    baselines: float | torch.Tensor = 0.0

    name: ClassVar[str] = "deepliftshap"
    about: ClassVar[str] = "difference of the score from several baselines', handed back"
    paper: ClassVar[str] = "Lundberg and Lee, NeurIPS 2017"
    source: ClassVar[Source] = KERNELSHAP
    style: ClassVar[Style] = "signed"

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def _references(self) -> list[OneOf | Baseline]:
        if not isinstance(self.baselines, torch.Tensor):
            return [Baseline(PathStart(self.baselines, self.name))]
        return [OneOf(self.baselines, index) for index in range(len(self.baselines))]

    @property
    def _below(self) -> Scores:
        return scores_of(self.baselines, self.name)

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({self._below, *map(Multipliers, self._references)})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        x, references = evidence.inputs, self._references
        return sum((evidence[Multipliers(r)] * (x - r.of(x)) for r in references), torch.zeros_like(x)) / len(
            references
        )

    def delta(self, evidence: Evidence, values: torch.Tensor) -> torch.Tensor:
        """By how much the values miss the score minus the mean score of the baselines."""
        return values.flatten(1).sum(1) - self.promised(evidence)

    def promised(self, evidence: Evidence) -> torch.Tensor:
        """The score minus the mean score of the baselines."""
        return evidence.score - mean_score(evidence[self._below], evidence)
