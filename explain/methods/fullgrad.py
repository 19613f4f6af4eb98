"""Relevance handed to every part of a network: what inputs and biases add to the score."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from explain.engine import Evidence, InputGradients
from explain.engine.needs import BiasTerms
from explain.layers.feature_maps import enlarge
from explain.methods.base import RELEVANCE, Method, over_all
from explain.methods.bibliography import cited
from explain.methods.cam import ratio
from explain.methods.registry import register


@register
@dataclass(frozen=True)
class FullGrad(Method):
    r"""Divide the score among the input and every bias of the network, and add up where these parts lie.

    :math:`y = \nabla_x y \cdot x + \sum_l \nabla_{b_l} y \cdot b_l` holds exactly in a network of ReLUs, where b counts
    the shift of batch normalisation too; elsewhere, the attribution's ``delta`` is by how much it is missed. Of each
    term, the map takes the magnitude, brought to [0, 1] for each layer as published, enlarged, and summed over
    channels. Biases that lie nowhere on the photo (those of the head) count for ``delta`` alone.

    Biases are counted wherever they are added: by modules, functions, or sums with parameters, buffers and what is made
    of them. Numbers count for ``delta`` alone. Those inside ``MultiheadAttention`` and recurrent layers are not seen.

    Args:
        rescale: bring each layer to [0, 1]; False leaves all in units of the score.

    Returns:
        ``(N, H, W)`` at the input's resolution.

    Srinivas and Fleuret, "Full-Gradient Representation for Neural Network Visualization", NeurIPS 2019.

    >>> import explain, torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    >>> a = explain.attribute(model, torch.rand(1, 3, 4, 4), FullGrad(), target=0)
    >>> a.values.shape, bool(a.delta.abs() < 1e-5)
    (torch.Size([1, 4, 4]), True)
    """

    rescale: bool = True

    name = "fullgrad"
    about = "contributions of the input and of every bias to the score"
    source = cited("srinivas2019fullgrad")
    family = RELEVANCE
    needs = frozenset({InputGradients(), BiasTerms()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        if not evidence.size:  # an input beside the photo that is no picture
            return (evidence.inputs * evidence[InputGradients()]).abs()
        total = self._map(evidence.inputs * evidence[InputGradients()], evidence.size)
        for term in evidence[BiasTerms()]:
            if term.ndim > 2:
                total = total + self._map(term, evidence.size)
        return total

    def delta(self, evidence: Evidence, values: torch.Tensor) -> torch.Tensor:
        """By how much the contributions miss the score."""
        return (evidence.inputs * evidence[InputGradients()]).flatten(1).sum(1) - self.expected_sum(evidence)

    def expected_sum(self, evidence: Evidence) -> torch.Tensor:
        """The score without what the biases add to it."""
        found = evidence.score
        for term in evidence[BiasTerms()]:
            found = found - term.flatten(1).sum(1)
        return found

    def _map(self, contributions: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
        found = contributions.abs()
        if self.rescale:
            least, most = (over_all(end, found) for end in found.flatten(1).aminmax(dim=1))
            found = ratio(found - least, (most - least).expand_as(found))
        return enlarge(found.sum(1, keepdim=True), size)[:, 0]
