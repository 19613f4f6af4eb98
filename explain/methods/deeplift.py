"""DeepLIFT: the difference of the score from that of a baseline, handed back to the input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from explain.engine import Blank, Evidence, Multipliers, Need, Question, Scores
from explain.errors import MethodError
from explain.layers import Grids
from explain.methods import sources
from explain.methods.base import Style
from explain.methods.checks import check_options
from explain.methods.path import PathStart
from explain.methods.sources import Source


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
class DeepLIFT:
    r"""Share the difference of the score from a baseline's out among the differences of the input: the rescale rule.

    :math:`m_j (x_j - b_j)` with multipliers m that are handed back step by step. A function of one number hands on the
    slope between its two points; linear maps their weights; a product the mean of the other factor; a maximum goes to
    the place that made it rise or fall. Softmax, attention and normalisations are followed through these, step by step.
    So the values add up to the difference of the scores (summation to delta), and what operations without a rule miss
    is the attribution's ``delta``. The network is run once more, on the baseline.

    Args:
        baseline: a value for every input, ``mean`` (each image's mean colour), ``blur`` (the image, blurred), or a
            tensor ``(C, H, W)``; 0 is what preprocessing makes of the training data's mean colour.

    Returns:
        ``(N, C, H, W)``, in units of the score; positive speaks for the target, negative against it.

    Shrikumar et al., "Learning Important Features Through Propagating Activation Differences", ICML 2017. Their second
    rule, reveal-cancel, is not offered.

    >>> import explain, torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 2))
    >>> a = explain.attribute(model, torch.rand(2, 3, 4, 4), DeepLIFT(), target=0)
    >>> a.values.shape, bool((a.delta.abs() < 1e-5).all())
    (torch.Size([2, 3, 4, 4]), True)
    """

    baseline: float | str | torch.Tensor = 0.0

    name: ClassVar[str] = "deeplift"
    about: ClassVar[str] = "difference of the score from a baseline's, handed back"
    paper: ClassVar[str] = "Shrikumar et al., ICML 2017"
    source: ClassVar[Source] = sources.DEEPLIFT
    style: ClassVar[Style] = "signed"

    def __post_init__(self) -> None:
        check_options(self)
        if isinstance(self.baseline, str) and self.baseline not in ("mean", "blur"):
            raise MethodError(
                f"baseline of {self.name} must be a number, a tensor (C, H, W), 'mean' or 'blur', got "
                f"{self.baseline!r}; 0 is usual"
            )

    @property
    def _start(self) -> PathStart:
        return PathStart(self.baseline)

    @property
    def _multipliers(self) -> Multipliers:
        return Multipliers(Baseline(self._start))

    @property
    def _below(self) -> Scores:
        """The score of the baseline; a blank photo is one that other methods ask about too."""
        is_blank = isinstance(self.baseline, (int, float)) and self.baseline == 0
        return Scores(Blank() if is_blank else self._start)

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({self._multipliers, self._below})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return evidence[self._multipliers] * (evidence.inputs - self._start.of(evidence))

    def delta(self, evidence: Evidence, values: torch.Tensor) -> torch.Tensor:
        """By how much the values miss the difference of the scores at the photo and at the baseline."""
        return values.flatten(1).sum(1) - self.promised(evidence)

    def promised(self, evidence: Evidence) -> torch.Tensor:
        """The difference of the scores at the photo and at the baseline."""
        return evidence.score - evidence[self._below]
