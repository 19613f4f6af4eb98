"""`Evidence`: the target, its score, and what the needs of a method were answered with. A method sees nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from explain.engine.needs import Activations, LayerGradients, Need
from explain.layers.feature_maps import Grids
from explain.targets.outputs import Outputs

T = TypeVar("T")


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Evidence in at least single precision: sums and quotients in half precision are too inexact."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


@dataclass(frozen=True)
class RowOrigin:
    """Where perturbed rows come from: ``count`` images of the caller, whose tensors ``carry`` brings to the rows."""

    count: int
    carry: Callable[[torch.Tensor], torch.Tensor]
    outputs: Callable[[], Outputs] = Outputs


@dataclass(frozen=True)
class Evidence:
    """The target and its score, and for one layer or none, the answers to the needs of a method in ``found``.

    Tensors are detached, and every one has a row for each image. ``inputs`` ``(N, C, H, W)`` is what is explained (of
    a video ``(N, C, T, H, W)``), ``score`` ``(N,)`` what the target picked, ``classes`` ``(N,)`` the class that it
    belongs to or None, ``target`` its name, ``logits`` ``(N, K)`` the class scores where the output has them, and
    ``grids`` how the tensors of the network are laid out.

    >>> from explain.layers.feature_maps import Grids
    >>> x, found = torch.zeros(1, 3, 4, 4), {Activations(): torch.ones(1, 2, 4, 4)}
    >>> Evidence(x, torch.ones(1), None, "a score", Grids((4, 4)), layer="conv", found=found).activations.shape
    torch.Size([1, 2, 4, 4])
    """

    inputs: torch.Tensor
    score: torch.Tensor
    classes: torch.Tensor | None
    target: str
    grids: Grids
    logits: torch.Tensor | None = None
    layer: str | None = None
    found: Mapping[Need[Any], Any] = field(default_factory=dict)
    origin: RowOrigin | None = field(default=None, repr=False)
    """For perturbed rows, the images that they were made of."""
    find_outputs: Callable[[], Outputs] = field(default=Outputs, repr=False)
    """Finds out how the class scores become probabilities."""

    def __getitem__(self, need: Need[T]) -> T:
        found: T = self.found[need]
        return found

    @property
    def outputs(self) -> Outputs:
        """How the class scores become probabilities; of perturbed rows as of their images."""
        return self.find_outputs()

    @property
    def size(self) -> tuple[int, ...]:
        """Height and width of the input; of a video, frames before them."""
        return tuple(self.inputs.shape[2:])

    @property
    def activations(self) -> torch.Tensor:
        return self[Activations()]

    @property
    def gradients(self) -> torch.Tensor:
        return self[LayerGradients()]

    @property
    def images(self) -> int:
        """The number of the caller's images, of which perturbed rows are made."""
        return len(self.inputs) if self.origin is None else self.origin.count

    def of_images(self, tensor: torch.Tensor) -> torch.Tensor:
        """Bring a tensor with a row for each of the caller's images, or one for all, to the rows of this evidence.

        Perturbed rows get the row of the image that they were made of, moved as the photo was moved.
        """
        of_all = tensor.expand(self.images, *tensor.shape[1:])
        return of_all if self.origin is None else self.origin.carry(of_all)
