"""Functions of the output as targets; other numbers to differentiate than a target's score."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from explain._utils.errors import TargetError
from explain._utils.nested import first_tensor
from explain.targets.base import Picked, Target, images_of_samples, summary_of_output


@dataclass(frozen=True)
class ScoreTarget(Target):
    """Any function of the model's output that gives one score per sample.

    Methods that alter images call it on pieces of the perturbed inputs. A function that wants
    something for each image takes a second argument, ``images`` ``(P,)``: for each sample, which of
    the original images it belongs to, counted from 0. A second argument is one without a default,
    or one called ``images``.

    Args:
        function: ``output -> (P,)``, or ``output, images -> (P,)``.
        images: the image of each sample of the output; None is a sample for each image in turn.

    Raises:
        TargetError: a function that takes neither one argument nor two.

    >>> labels = torch.tensor([2, 0])
    >>> target = ScoreTarget(
    ...     lambda output, images: output[torch.arange(len(images)), labels[images]]
    ... )
    >>> output = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    >>> target.pick(output, 2)[0], target.rows(torch.tensor([1, 1])).pick(output, 2)[0]
    (tensor([3., 4.]), tensor([1., 4.]))
    """

    function: Callable[..., torch.Tensor]
    images: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check that the caller's function, which is the target, takes one argument or two."""
        self._images_argument()

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    @property
    def takes_images(self) -> bool:
        """Whether the caller's function wants to know which image each sample belongs to."""
        return self._images_argument() is not None

    def pick(self, output: Any, count: int) -> Picked:
        """The scores ``(count,)`` that the caller's function gives for the output.

        Raises:
            TargetError: it returns something else than one score for each sample.
        """
        keyword = self._images_argument()
        if keyword is None:
            score = self.function(output)
        else:
            tensor = first_tensor(output)
            numbers = range(count) if self.images is None else self.images
            images = torch.tensor(numbers, device=None if tensor is None else tensor.device)
            # without a keyword (""), they are the second argument
            score = (
                self.function(output, images=images) if keyword else self.function(output, images)
            )
        # a function may sum over the images where there is one
        if isinstance(score, torch.Tensor) and score.ndim == 0 and count == 1:
            score = score[None]
        if not isinstance(score, torch.Tensor) or tuple(score.shape) != (count,):
            raise TargetError(
                f"target {self.name} must return one score per image, a tensor ({count},), got "
                f"{summary_of_output(score)}; pick a class as in output[:, 0], and sum over no "
                "images"
            )
        return score, None

    def rows(self, images: torch.Tensor) -> "ScoreTarget":
        return replace(self, images=images_of_samples(self.images, images))

    def _images_argument(self) -> str | None:
        """How the caller's function takes the images of its samples: by the keyword "images", as
        its second argument (""), or not at all (None).
        """
        function = self.function
        try:
            signature = inspect.signature(
                function.forward if isinstance(function, nn.Module) else function
            )
        except (TypeError, ValueError):  # a function written in C may have no signature
            return None
        images = signature.parameters.get("images")
        if images and images.kind in (images.POSITIONAL_OR_KEYWORD, images.KEYWORD_ONLY):
            return "images"
        with suppress(TypeError):  # can it be called with the output alone?
            signature.bind("output")
            return None
        with suppress(TypeError):  # or with two arguments?
            signature.bind("output", "images")
            return ""
        raise TargetError(
            f"target {self.name} must be a function of the output, or of it and its samples' "
            f"images, got {signature}; bind other arguments with functools.partial"
        )


Objective: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Another number to differentiate than the score: from scores ``(N, K)`` and the target's classes
``(N,)`` to ``(N,)``.

It is frozen and compares by its values, as all that a need holds.
"""


@dataclass(frozen=True)
class ResidualSoftmax:
    """The logit and its log-probability together: ``y_c + log softmax(y)_c`` (Cai, 2025,
    "ReST")."""

    def __str__(self) -> str:
        return "the score and its log-probability"

    def __call__(self, logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """The objective ``(N,)`` to differentiate: the logit plus its log-probability, from logits
        ``(N, K)`` and classes ``(N,)``."""
        return (logits + logits.log_softmax(1)).gather(1, classes[:, None])[:, 0]


@dataclass(frozen=True)
class Contrast:
    """The target's logit against those of similar classes d (Zhang et al., CVPR 2025). "mean" is
    ``y_c - alpha mean_d y_d``; "weighted" is the mean of ``y_c - alpha y_d`` by probability."""

    kind: Literal["mean", "weighted"] = "mean"
    alpha: float = 0.6
    references: int = 3

    def __str__(self) -> str:
        return f"the score against the {self.references} classes that score most like it"

    def __call__(self, logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """The target's logit against those of the most similar classes ``(N,)``, from ``logits``
        ``(N, K)`` and ``classes`` ``(N,)``; gradients flow through all of these logits.
        """
        target_logits = logits.gather(1, classes[:, None])
        distances = (logits - target_logits).detach().abs()
        distances = distances.scatter(1, classes[:, None], float("inf"))  # not itself
        count = min(self.references, logits.shape[1] - 1)
        if count < 1:
            raise TargetError(
                "target must have another class to compare with, but the model has one; use gradcam"
            )
        similar = distances.topk(count, dim=1, largest=False).indices
        reference_logits = logits.gather(1, similar)
        gaps = target_logits - self.alpha * reference_logits
        if self.kind == "mean":
            return gaps.mean(1)
        # Softmax over these classes alone: among all classes, each probability may round to 0.
        return (reference_logits.softmax(1) * gaps).sum(1)
