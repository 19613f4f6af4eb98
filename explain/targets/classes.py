"""One score for a whole image: a class, a yes or no, a likeness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from explain._utils.errors import TargetError, in_short
from explain.targets.base import Picked, Target, check_class, described, find_logits, find_tensor

EMBEDDINGS = ("embedding", "embeddings", "image_embeds", "pooler_output", "features", "out", "logits")


class Category(int):
    """A class index that remembers its label, and is shown by it.

    >>> tabby = Category(66, "tabby cat")
    >>> tabby == 66, f"{tabby}"
    (True, 'tabby cat')
    """

    label: str

    def __new__(cls, index: int, label: str) -> Category:
        made = super().__new__(cls, index)
        made.label = label
        return made

    def __getnewargs__(self) -> tuple[int, str]:  # type: ignore[override]  # for copies and pickles
        return int(self), self.label

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True)
class ClassTarget(Target):
    """The logit of a class: one index for every image, or one index for each."""

    index: int | tuple[int, ...]

    @property
    def name(self) -> str:
        return str(self.index)

    def pick(self, output: Any, count: int) -> Picked:
        scores = find_logits(output, count)
        if isinstance(self.index, tuple) and len(self.index) != count:
            raise TargetError(
                f"target must hold one class for each of the {count} images, got {len(self.index)}; "
                "targets= takes several classes for every image"
            )
        indices = [self.index] * count if isinstance(self.index, int) else list(self.index)
        for index in indices:
            check_class(index, scores.shape[1])
        chosen = torch.tensor(indices, device=scores.device)
        return scores.gather(1, chosen[:, None])[:, 0], chosen

    def rows(self, images: torch.Tensor) -> ClassTarget:
        index = self.index
        return self if isinstance(index, int) else ClassTarget(tuple(index[image] for image in images.tolist()))


@dataclass(frozen=True)
class TopClass(Target):
    """Each image's own best class, or with ``rank`` its second best (1), third best (2) and so on."""

    rank: int = 0

    @property
    def name(self) -> str:
        return f"top-{self.rank + 1}"

    def pick(self, output: Any, count: int) -> Picked:
        return self.settled(output, count).pick(output, count)

    def settled(self, output: Any, count: int) -> ClassTarget:
        scores = find_logits(output, count).detach()
        if not 0 <= self.rank < scores.shape[1]:
            raise TargetError(
                f"target must be among the {scores.shape[1]} best classes, since the model has no more, got number "
                f"{self.rank + 1}; ask for at most {scores.shape[1]}"
            )
        return ClassTarget(tuple(scores.topk(self.rank + 1, dim=1).indices[:, self.rank].tolist()))


@dataclass(frozen=True)
class BinaryLogit(Target):
    """The answer of a model with one logit for each image, ``(N,)`` or ``(N, 1)``: yes, or with ``positive=False`` no.

    A plain class index 0, or no target at all, also stands for yes.

    >>> BinaryLogit(positive=False).pick(torch.tensor([3.0, -1.0]), 2)[0]
    tensor([-3.,  1.])
    """

    positive: bool = True

    @property
    def name(self) -> str:
        return "positive" if self.positive else "negative"

    def pick(self, output: Any, count: int) -> Picked:
        logits = find_logits(output, count)
        if logits.shape[1] != 1:
            raise TargetError(
                f"target {self.name} must be asked of a model with one logit per image, got {logits.shape[1]}; give "
                "the class index"
            )
        return logits[:, 0] if self.positive else -logits[:, 0], None


@dataclass(frozen=True, eq=False)
class Similarity(Target):
    """The cosine between the embedding that a model gives and another one: what makes this image like that one?

    Args:
        embedding: ``(D,)``, or ``(N, D)`` with one for each image; what the model says of a second image, for example.

    Raises:
        TargetError: not a vector of finite numbers, or only zeros, which point nowhere.

    >>> Similarity(torch.tensor([3.0, 4.0])).pick(torch.tensor([[1.0, 0.0], [6.0, 8.0]]), 2)[0]
    tensor([0.6000, 1.0000])
    """

    embedding: torch.Tensor

    name = "similarity"
    __repr__ = in_short

    def __post_init__(self) -> None:
        given = torch.as_tensor(self.embedding).detach()
        flat = given.flatten(1) if given.ndim > 1 else given
        flat = flat[0] if flat.ndim == 2 and len(flat) == 1 else flat
        if flat.ndim not in (1, 2) or not flat.is_floating_point() or not torch.isfinite(flat).all():
            raise TargetError(
                f"embedding must be a vector (D,) or (N, D) of finite numbers, got {given.dtype} of shape "
                f"{tuple(given.shape)}; take what the model returns for the second image"
            )
        if (flat.abs().amax(-1) == 0).any():
            raise TargetError("embedding must point somewhere, got only zeros; take that of another image")
        object.__setattr__(self, "embedding", flat)

    def pick(self, output: Any, count: int) -> Picked:
        found = find_tensor(output, count, (2, 4), EMBEDDINGS)
        if found is None:
            raise TargetError(
                f"target {self.name} must be asked of a model that returns embeddings ({count}, D), got "
                f"{described(output)}; cut it off before its head, or pass a callable as target"
            )
        found, other = found.flatten(1), self.embedding.to(found)
        if other.shape not in (found.shape, found.shape[1:]):
            raise TargetError(
                f"embedding must have the shape ({found.shape[1]},) or {tuple(found.shape)} of the model's own, got "
                f"{tuple(other.shape)}; take both from the same model"
            )
        return F.cosine_similarity(found, other.expand_as(found), dim=1), None

    def rows(self, images: torch.Tensor) -> Similarity:
        single = self.embedding.ndim == 1
        return self if single else Similarity(self.embedding[images.to(self.embedding.device)])
