"""`intervene`: interventions on units of layers, and on where these look in the image."""

from contextlib import AbstractContextManager

from torch import nn

from explain.hooks.intervening import Interventions, with_interventions
from explain.hooks.interventions import Intervention
from explain.layers.grids import PhotoGrids


def intervene(
    model: nn.Module, interventions: Interventions
) -> AbstractContextManager[tuple[Intervention, ...]]:
    """Apply interventions to a model for as long as the block lasts, for calls of this thread.

    Those on the same layer act in their order, each on the output of the one before; one that is
    active already is not applied twice. Everything that is computed inside the block sees them:
    predictions, gradients and explanations. The values that they take from inputs are computed
    first.

    Raises:
        HookError: something does not fit the layer. LayerError: a layer is not in the model.

    >>> import torch
    >>> from explain.hooks import Ablate, Steer
    >>> model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU())
    >>> x = torch.rand(1, 1, 4, 4)
    >>> with intervene(model, [Ablate("0", channels=[1]), Steer("1", torch.ones(2))]):
    ...     y = model(x)
    >>> torch.equal(y[:, 1], torch.ones(1, 4, 4)), torch.equal(y[:, 0], model(x)[:, 0] + 1)
    (True, True)
    """
    return with_interventions(model, interventions, PhotoGrids)
