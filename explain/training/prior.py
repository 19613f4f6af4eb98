"""`AttributionPrior`: a penalty on explanations, to be added to the loss of a training."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

from explain._utils.errors import MethodError, muted, shown
from explain.attribution.api import attribute
from explain.hooks.layer_names import Where
from explain.methods.base import MethodLike, ratio
from explain.metrics.maps import gini
from explain.targets.resolve import TargetLike

Penalty = Literal["outside", "share", "sparsity", "agreement"]
PENALTIES: tuple[Penalty, ...] = get_args(Penalty)


def mirrored(images: torch.Tensor) -> torch.Tensor:
    """Return photos or maps ``(..., H, W)``, mirrored left to right: the default change for the
    ``agreement`` of a prior."""
    return images.flip(-1)


@dataclass(frozen=True)
class AttributionPrior:
    """A penalty on what a network looks at, for any training loop: ``loss + prior(model, x, target,
    mask)``.

    - ``outside``: the sum of the squared values outside the mask ("right for the right reasons").
    - ``share``: the magnitudes outside the mask as a share of all of them, between 0 and 1,
      whatever the scale of the scores.
    - ``sparsity``: one less the Gini coefficient of the magnitudes: 0 where a single value has all
      of them.
    - ``agreement``: one less the cosine between the map of a changed photo, and the changed map of
      the photo.

    The penalty of each image is averaged over the batch. The model is explained in evaluation mode,
    with the running statistics of its normalisations and without dropout, as it will be used later;
    its modes, gradients and hooks are left as they are. The explanation costs about as much as
    another step of training, or more (see the cost tables).

    Args:
        method: a method that keeps its graph: of gradients, paths, class activation maps or
            relevance, such as ``saliency``, ``integratedgradients(steps=8)``, ``gradcam`` or
            ``lrp``.
        penalty: ``outside``, ``share``, ``sparsity`` or ``agreement``.
        weight: what the penalty is multiplied by.
        layer: for class activation maps, as for `explain.attribute`.
        augment: for ``agreement``, what is done to the photos ``(N, C, H, W)``.
        moves: whether ``augment`` moves what is in the photo, as flips do, and is done to the maps
            as well; False for changes of colour or noise.

    Raises:
        MethodError: the method keeps no graph, a number does not fit, or a mask is missing or has
            another shape.

    Ross, Hughes and Doshi-Velez, "Right for the Right Reasons", IJCAI 2017; Erion et al.,
    "Improving Performance of Deep Learning Models with Axiomatic Attribution Priors and Expected
    Gradients", Nature Machine Intelligence 2021 (the Gini coefficient); Guo et al., "Visual
    Attention Consistency under Image Transforms", CVPR 2019 (agreement). Ross et al. take the
    gradient of the sum of all log-probabilities: ``target=lambda output:
    output.log_softmax(1).sum(1)``.

    >>> model = nn.Sequential(
    ...     nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    ... )
    >>> x, labels, mask = torch.rand(2, 3, 8, 8), torch.tensor([0, 1]), torch.zeros(2, 8, 8)
    >>> mask[:, 2:6, 2:6] = 1  # where evidence may lie
    >>> penalty = AttributionPrior("saliency")(model, x, labels, mask)
    >>> (F.cross_entropy(model(x), labels) + penalty).backward()
    >>> penalty.shape, model[0].weight.grad.shape
    (torch.Size([]), torch.Size([4, 3, 3, 3]))
    """

    method: MethodLike = "saliency"
    penalty: Penalty = "outside"
    weight: float = 1.0
    layer: Where | None = None
    augment: Callable[[torch.Tensor], torch.Tensor] = mirrored
    moves: bool = True

    def __post_init__(self) -> None:
        """Refuse an unknown penalty, and a weight that is no finite number from 0."""
        if self.penalty not in PENALTIES:
            raise MethodError(
                f"penalty of a prior must be one of {', '.join(PENALTIES)}, got "
                f"{shown(self.penalty)}"
            )
        if (
            isinstance(self.weight, bool)
            or not isinstance(self.weight, (int, float))
            or not 0 <= self.weight < 1e300  # NaN and infinity are neither
        ):
            raise MethodError(
                f"weight of a prior must be a number from 0, got {shown(self.weight)}; take 1"
            )

    def __call__(
        self,
        model: nn.Module,
        x: torch.Tensor,
        target: TargetLike = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the penalty of a batch: one number ``()``, times ``weight``, which keeps its graph
        to the weights of the model, and to ``x`` if that requires a gradient.

        Args:
            model: the network that is trained.
            x: the images ``(N, C, H, W)``, as the model takes them.
            target: as for `explain.attribute`: the labels ``(N,)``, for example.
            mask: ``(N, H, W)`` or ``(N, 1, H, W)``: 1 or true where evidence may lie, 0 where it
                may not; for ``outside`` and ``share``.
        """
        values = self._values(model, x, target)
        if self.penalty == "sparsity":
            penalty = 1 - gini(values)
        elif self.penalty == "agreement":
            values_of_changed = self._values(model, self.augment(x), target)
            changed_values = self.augment(values) if self.moves else values
            penalty = 1 - F.cosine_similarity(
                changed_values.flatten(1), values_of_changed.flatten(1)
            )
        else:
            outside = 1 - _at_size(mask, x, values)
            if self.penalty == "outside":
                penalty = (values.square() * outside).flatten(1).sum(1)
            else:
                magnitudes = values.abs()
                penalty = ratio(
                    (magnitudes * outside).flatten(1).sum(1), magnitudes.flatten(1).sum(1)
                )
        return self.weight * penalty.mean()

    def _values(self, model: nn.Module, x: torch.Tensor, target: TargetLike) -> torch.Tensor:
        """The maps of the images by the prior's method, at the resolution of the method, with their
        graph to the weights: the penalty is differentiated through them."""
        with muted():
            return attribute(
                model, x, self.method, target=target, layer=self.layer, create_graph=True
            ).values


def _at_size(mask: torch.Tensor | None, x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The mask of images ``(N, C, H, W)`` averaged over the cells of their maps ``values``, as
    shares from 0 to 1: ``(N, h, w)``, or ``(N, 1, h, w)`` for maps with channels.
    """
    if mask is not None and mask.ndim == x.ndim and mask.shape[1] == 1:
        mask = mask[:, 0]
    size = x.shape[2:]
    if mask is None or mask.shape != (len(x), *size):
        got = "none" if mask is None else tuple(mask.shape)
        raise MethodError(
            f"mask must have the shape {(len(x), *size)}, got {got}; give one, or "
            "penalty='sparsity'"
        )
    map_size = values.shape[2 - x.ndim :]  # without N and, where there are some, channels
    resized = F.interpolate(mask[:, None].to(values), size=map_size, mode="area")
    has_channels = values.ndim == x.ndim
    return resized if has_channels else resized[:, 0]
