"""Methods for vision transformers: attention, rollout, LeGrad, and attention weighted by
gradients."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from explain._utils.errors import MethodError
from explain.engine import Evidence, Need
from explain.engine.needs import (
    Attention,
    AttentionMap,
    AttentionRelevance,
    BlockAttention,
    InputAttention,
    RelevanceCoverage,
)
from explain.layers.layouts import Size
from explain.methods.base import ATTENTION, Method, over_all, ratio, register
from explain.relevance.composites import transformer_attribution

_GRADIENTS = Attention(gradients=True)
_OF_INPUT = InputAttention(gradients=True)
_EVERYWHERE = Attention(gradients=True, unreached=True)
_RELEVANCE = AttentionRelevance(transformer_attribution())


def image_tokens(
    method: str, maps: Sequence[torch.Tensor], evidence: Evidence
) -> tuple[list[int], Size]:
    """The positions of the image's tokens in the attention ``maps`` ``(N, heads, queries, keys)``,
    and their grid ``(h, w)``. Refused without attention among all tokens, as within windows.
    """
    batch = len(evidence.inputs)
    # attention within windows has a row for each window
    is_by_image = all(len(weights) == batch for weights in maps)
    # where the photo's tokens are among those of a language model, if one reads them
    joint = evidence.grids.joint
    if joint is not None and maps and is_by_image:
        if not joint.size:
            raise MethodError(
                f"{method} must have tokens that lie on the image, got {len(joint.photo)} queries, "
                "which lie nowhere; take gradcam"
            )
        return list(joint.photo), joint.size
    # a last attention with a single query pools the tokens: all see all in those before it
    maps_among_tokens = maps[:-1] if maps and maps[-1].shape[-2] == 1 else maps
    shapes = {tuple(weights.shape[-2:]) for weights in maps_among_tokens}
    queries, keys = next(iter(shapes), (0, 0))
    # only how many tokens a sequence has counts here, not how many channels: 1
    grid = evidence.grids.grid((batch, keys, 1)) if keys else None
    has_same_keys = all(weights.shape[-1] == keys for weights in maps)
    if len(shapes) != 1 or queries != keys or grid is None or not is_by_image or not has_same_keys:
        got = sorted({tuple(weights.shape[-2:]) for weights in maps})
        raise MethodError(
            f"{method} must have attention among all tokens, got {got or 'none'}; use it for "
            "vision transformers"
        )
    return list(grid.tokens), grid.size


def weighted_attention(weights: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """The positive part of attention weights ``(N, heads, queries, keys)`` times their gradient,
    averaged over heads: ``(N, queries, keys)``; zero where no gradient reached the attention.
    """
    return (weights * (0 if gradient is None else gradient)).clamp(min=0).mean(1)


class AttentionMethod(Method):
    """A method that looks at the attention of a transformer."""

    family = ATTENTION
    only_for = "vision transformers"


class RolloutMethod(AttentionMethod):
    """A method that multiplies one matrix ``(N, tokens, tokens)`` for each block, and reads the
    class token's row."""

    attention: ClassVar[Attention] = _GRADIENTS
    """The attention that is followed."""

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({self.attention})

    def matrices(self, evidence: Evidence) -> Iterator[torch.Tensor]:
        """The matrix ``(N, queries, keys)`` of each block, from the first block to the last;
        `__call__` multiplies them in this order."""
        raise NotImplementedError

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        """Multiply the matrices of all blocks, and lay out the row that the score is read from as a
        map ``(N, h, w)`` over the image's patches.
        """
        maps = evidence[self.attention]
        tokens, size = image_tokens(self.name, [attention.weights for attention in maps], evidence)
        rollout = _identity(maps[0].weights).expand(len(evidence.inputs), -1, -1)
        for matrix in self.matrices(evidence):
            rollout = matrix @ rollout
        row = _row_of_score(rollout, maps[-1], evidence, tokens)
        return row[:, tokens].reshape((-1, *size))


def _row_of_score(
    matrix: torch.Tensor, last: AttentionMap, evidence: Evidence, tokens: Sequence[int]
) -> torch.Tensor:
    """The rollout's row ``(N, tokens)`` that the score is read from, or the mean of several; of
    rows ``matrix`` ``(N, queries, tokens)``, some of which belong to the image's ``tokens``.
    """
    joint = evidence.grids.joint  # not None where a language model reads the tokens
    rows = matrix.shape[1]
    extra_tokens = rows - len(tokens)
    is_pooled = rows == 1  # by the last attention
    extra_tokens_come_first = min(tokens) == extra_tokens
    if joint is None and (is_pooled or extra_tokens_come_first):
        # the pooled row, or that of the class token; without one, the head takes the mean of all
        return matrix.mean(1) if extra_tokens == 0 else matrix[:, 0]
    if joint is not None and last.gradient is None:
        # attention without gradients: the layout of the sequence says where the answer is read
        places = torch.tensor([list(row) for row in joint.read], device=matrix.device)[..., None]
        return matrix.gather(1, places.expand(len(matrix), -1, matrix.shape[2])).mean(1)
    # elsewhere, the last attention's gradient shows which rows the score is read from
    read = _rows_read(last)
    return (matrix * read).sum(1) / read.sum(1).clamp(min=1)


def _identity(attention: torch.Tensor) -> torch.Tensor:
    """The identity ``(queries, keys)``, for the shortcut around an ``attention`` ``(...)`` of this
    size; zero for one that pools the tokens, which has no shortcut."""
    queries, keys = attention.shape[-2:]
    return (torch.eye(queries, keys) * (queries == keys)).to(attention)


def mixed(attention: torch.Tensor) -> torch.Tensor:
    """Half an attention ``(N, queries, keys)`` and half the identity, which stands for the shortcut
    around it, with rows scaled to add up to one."""
    half = (attention + _identity(attention)) / 2
    return half / half.sum(-1, keepdim=True)


@register
class AttentionRollout(RolloutMethod):
    r"""Attention combined over all blocks.

    Follow attention through all blocks: :math:`\prod_l \bigl(\tfrac12 \bar A_l + \tfrac12 I\bigr)`,
    heads averaged.

    The map is the row of the class token, or the mean of all rows where there is none. No class is
    asked for.

    Returns:
        ``(N, h, w)``, one value for each patch: its share in the last class token; they add up to
        at most one.

    Abnar and Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020.

    >>> import explain, torch
    >>> from torchvision.models import VisionTransformer
    >>> model = VisionTransformer(16, 4, 2, 2, 8, 16, num_classes=3)
    >>> explain.attribute(model, torch.rand(1, 3, 16, 16), AttentionRollout()).values.shape
    torch.Size([1, 4, 4])
    """

    name = "rollout"
    attention = Attention()

    def matrices(self, evidence: Evidence) -> Iterator[torch.Tensor]:
        return (mixed(attention.weights.mean(1)) for attention in evidence[self.attention])


@register
class LeGrad(AttentionMethod):
    r"""Sensitivity of the score to the attention of every block.

    Sum over blocks how the score read off each block depends on its attention.

    For block l, the mean of its output tokens goes through the network's last normalisation and
    head; of the gradient of that score in the attention, the positive part is averaged over heads
    and queries. The class token's column is left out, and the blocks are averaged.

    Args:
        blocks: how many of the last blocks take part; None for all, as published.

    Returns:
        ``(N, h, w)``, one value for each patch, never negative.

    Bousselham et al., "LeGrad: An Explainability Method for Vision Transformers via Feature
    Formation Sensitivity", ICCV 2025 (arXiv:2404.03214).

    >>> import explain, torch
    >>> from torchvision.models import VisionTransformer
    >>> model = VisionTransformer(16, 4, 2, 2, 8, 16, num_classes=3)
    >>> torch.nn.init.normal_(model.heads.head.weight)[0, 0].isfinite()
    tensor(True)
    >>> explain.attribute(model, torch.rand(1, 3, 16, 16), LeGrad(), target=1).values.shape
    torch.Size([1, 4, 4])
    """

    blocks: int | None = None

    minimums = {"blocks": 1}
    needs = frozenset({BlockAttention()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        """The map of `LeGrad` ``(N, h, w)``: of the gradients in the attention of the last
        ``blocks`` blocks, the positive part, averaged over heads, queries and blocks."""
        gradients = evidence[BlockAttention()]
        tokens, size = image_tokens(self.name, gradients, evidence)
        last_gradients = gradients if self.blocks is None else gradients[-self.blocks :]
        key_sensitivity = torch.stack(
            [gradient.clamp(min=0).mean((1, 2)) for gradient in last_gradients]
        ).mean(0)
        return key_sensitivity[:, tokens].reshape((-1, *size))


@register
class GradECLIP(AttentionMethod):
    r"""What the last attention takes from each patch, for the score, with attention loosened to a
    similarity.

    :math:`\operatorname{ReLU}\bigl(\sum_q \lambda_{qi} \sum_c \partial y / \partial o_{qc}\,
    v_{ic}\bigr)` at patch i: the values v of the last block, weighted by the gradient in the
    attention's output o, and by the cosine
    :math:`\lambda` of query and key over all heads, scaled to [0, 1] over the patches. Only queries
    count that the score is read from, such as the class token's. (The authors' program runs the
    last block with a single head.)

    Of words that are explained too, the map is that of the tokens in the text's own tower. Of an
    answer in words, it is about the language model's attention, scaled over the tokens of image and
    text together.

    Args:
        blocks: how many of the last blocks are added up; the paper takes the last for images, and 8
            of 12 for texts.

    Returns:
        ``(N, h, w)``, one value for each patch, never negative; ``(N, L, 1)`` for L tokens of a
        text.

    Zhao et al., "Gradient-based Visual Explanation for Transformer-based CLIP", ICML 2024.

    >>> import explain
    >>> from torchvision.models import VisionTransformer
    >>> model = VisionTransformer(16, 4, 2, 2, 8, 16, num_classes=3)
    >>> torch.nn.init.normal_(model.heads.head.weight)[0, 0].isfinite()
    tensor(True)
    >>> explain.attribute(model, torch.rand(1, 3, 16, 16), GradECLIP(), target=1).values.shape
    torch.Size([1, 4, 4])
    """

    blocks: int = 1

    minimums = {"blocks": 1}
    only_for = "transformers"
    needs = frozenset({_OF_INPUT})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        """The map of Grad-ECLIP from the last ``blocks`` attentions: ``(N, h, w)`` for images,
        ``(N, L, 1)`` for embedded words."""
        maps = evidence[_OF_INPUT]
        is_text = evidence.inputs.ndim == 3
        weights = [attention.weights for attention in maps]
        joint = evidence.grids.joint
        all_tokens = list(range(weights[-1].shape[-1] if weights else 0))
        # of a text, all tokens in a column; without any attention, `image_tokens` refuses
        tokens, size = (
            (all_tokens, (-1, 1))
            if is_text and all_tokens
            else image_tokens(self.name, weights, evidence)
        )
        # where image and text share a sequence, similarities are scaled over all of its tokens
        compared_tokens = tokens if joint is None else all_tokens
        read = _rows_read(maps[-1])
        block_values = [
            self._of_block(attention, read, compared_tokens) for attention in maps[-self.blocks :]
        ]
        values = torch.stack(block_values).sum(0)
        if joint is not None and is_text:
            # the positions of the image among the words are no words
            values = values.index_fill(1, torch.tensor(joint.photo).to(values.device), 0)
        elif joint is not None:  # of all tokens, those of the image
            values = values[:, tokens]
        return values.clamp(min=0).reshape((len(values), *size))

    def _of_block(
        self, attention: AttentionMap, read: torch.Tensor, tokens: list[int]
    ) -> torch.Tensor:
        """What the score takes from ``tokens`` through one attention, ``(N, tokens)``; ``read``
        ``(N, queries, 1)`` marks the score's queries. Tokens that no query may see scale nothing.
        """
        query = attention.query
        key = attention.key
        gradient = attention.gradient
        if query is None or key is None or gradient is None:
            raise MethodError(
                f"{self.name} must see queries and keys multiplied as matrices, got others; take "
                "legrad"
            )
        # the vectors of all heads as one, of length 1: their products are cosines
        query, key = (
            nn.functional.normalize(vectors.transpose(1, 2).flatten(2), dim=-1)
            for vectors in (query, key)
        )
        visible = attention.weights[..., tokens].amax(1) > 0
        cosine = (query @ key.transpose(1, 2))[..., tokens]
        low = cosine.masked_fill(~visible, torch.inf).amin(-1, keepdim=True)
        span = cosine.masked_fill(~visible, -torch.inf).amax(-1, keepdim=True) - low
        # where all tokens are equally similar, each counts in full
        loosened = torch.where(visible & (span > 0), (cosine - low) / span, visible.to(cosine))
        # the gradient in an attention weight is that in the output times the value, over channels
        terms = loosened * gradient.sum(1)[..., tokens]
        # the score's queries are those of the last attention; of one with others, all count
        return (terms * read if read.shape[1] == terms.shape[1] else terms).sum(1)


def _rows_read(last: AttentionMap) -> torch.Tensor:
    """Which queries of an attention the score is read from: truth values ``(N, queries, 1)``, true
    where any gradient in the attention weights is not zero."""
    gradient = torch.zeros_like(last.weights) if last.gradient is None else last.gradient
    return (gradient != 0).any(1).any(-1, keepdim=True)


@register
class GradientRollout(RolloutMethod):
    r"""Attention combined over all blocks, weighted by its gradient.

    Follow attention through all blocks, weighted by how the score depends on it.

    :math:`\prod_l \bigl(\tfrac12 E_h (\nabla A_l \odot A_l)^+ + \tfrac12 I\bigr)` with rows that
    add up to one: rollout in which heads and places count as far as more attention there would
    raise the score, so that it knows of classes.

    Returns:
        ``(N, h, w)``, one value for each patch, never negative.

    Gildenblat, "Exploring Explainability for Vision Transformers", 2020.

    >>> import explain
    >>> from torchvision.models import VisionTransformer
    >>> model = VisionTransformer(16, 4, 2, 2, 8, 16, num_classes=3)
    >>> torch.nn.init.normal_(model.heads.head.weight)[0, 0].isfinite()
    tensor(True)
    >>> explain.attribute(model, torch.rand(1, 3, 16, 16), GradientRollout(), target=1).values.shape
    torch.Size([1, 4, 4])
    """

    def matrices(self, evidence: Evidence) -> Iterator[torch.Tensor]:
        for attention in evidence[_GRADIENTS]:
            yield mixed(weighted_attention(attention.weights, attention.gradient))


@register
class CheferAttribution(RolloutMethod):
    r"""Relevance times gradient of attention, combined over all blocks.

    Follow what attention has of the score through all blocks: relevance times gradient.

    :math:`\prod_l \bigl(I + E_h (\nabla A_l \odot R_l)^+\bigr)`, where :math:`\nabla A_l` is the
    gradient of the score in the attention of block l, and :math:`R_l` the attention's relevance.
    Relevance starts with 1 at the score. Linear maps share it out by positive contributions;
    activations, normalisations and softmaxes pass it on; the factors of a product get half each;
    and where a shortcut is added, both signals keep it by the magnitudes of their sums.

    Returns:
        ``(N, h, w)``, one value for each patch, never negative.

    Chefer, Gur and Wolf, "Transformer Interpretability Beyond Attention Visualization", CVPR 2021.

    >>> import explain
    >>> from torchvision.models import VisionTransformer
    >>> model = VisionTransformer(16, 4, 2, 2, 8, 16, num_classes=3)
    >>> torch.nn.init.normal_(model.heads.head.weight)[0, 0].isfinite()
    tensor(True)
    >>> explain.attribute(
    ...     model, torch.rand(1, 3, 16, 16), CheferAttribution(), target=1
    ... ).values.shape
    torch.Size([1, 4, 4])
    """

    needs = frozenset({_GRADIENTS, _RELEVANCE, RelevanceCoverage(_RELEVANCE.composite)})

    def matrices(self, evidence: Evidence) -> Iterator[torch.Tensor]:
        """Yield the matrix ``(N, tokens, tokens)`` of each block: the identity plus relevance times
        gradient of its attention. Attentions without a gradient are left out. Relevance is divided
        by the score, as it starts with 1 there.
        """
        maps = evidence[_GRADIENTS]
        relevance = evidence[_RELEVANCE]
        divisor = torch.where(evidence.score == 0, 1, evidence.score)
        for attention, relevance_map in zip(maps, relevance, strict=True):
            if relevance_map.gradient is not None:
                # a weight's relevance is its value times the gradient that the rules bring to it
                relevance_of_unit_score = (
                    relevance_map.weights
                    * relevance_map.gradient
                    / over_all(divisor, relevance_map.weights)
                )
                matrix = weighted_attention(relevance_of_unit_score, attention.gradient)
                yield matrix + _identity(matrix)


@register
class CheferBimodal(AttentionMethod):
    r"""Attention between a photo and other tokens, weighted by its gradient.

    Follow attention between a photo and something else (words, queries): what of the photo a token
    looked at.

    With :math:`\bar A = E_h (\nabla A \odot A)^+`, attention within s changes :math:`R^{ss}` and
    :math:`R^{sq}` by
    :math:`\bar A R`; attention from s to q changes :math:`R^{sq}` by
    :math:`(\bar R^{ss})^\top \bar A \bar R^{qq}` and :math:`R^{ss}` by :math:`\bar A R^{qs}`, where
    :math:`\bar R` is I plus the rest with rows that add up to one. Two attentions in a row that
    look at each other change at once. The photo's tokens are known by their number; they must be as
    many as a grid has places, and others not as many.

    Args:
        token: which of the others' tokens the score belongs to, such as the query of a detected
            box; None is those that it is read from, by the gradients of their last attention.

    Returns:
        ``(N, h, w)``, one value for each patch.

    Chefer, Gur and Wolf, "Generic Attention-model Explainability for Interpreting Bi-Modal and
    Encoder-Decoder Transformers", ICCV 2021.

    >>> import explain
    >>> from torch import nn
    >>> class Queries(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.patches, self.queries = (
    ...             nn.Conv2d(3, 4, 4, 4),
    ...             nn.Parameter(torch.randn(1, 3, 4)),
    ...         )
    ...         self.attention, self.head = (
    ...             nn.MultiheadAttention(4, 2, batch_first=True),
    ...             nn.Linear(4, 5),
    ...         )
    ...
    ...     def forward(self, x):
    ...         tokens = self.patches(x).flatten(2).transpose(1, 2)
    ...         found, _ = self.attention(self.queries.expand(len(x), -1, -1), tokens, tokens)
    ...         return self.head(found[:, 1])
    >>> explain.attribute(
    ...     Queries(), torch.rand(1, 3, 16, 16), CheferBimodal(token=1), target=3
    ... ).values.shape
    torch.Size([1, 4, 4])
    """

    token: int | None = None

    minimums = {"token": 0}
    only_for = "transformers with attention between a photo and other tokens"
    needs = frozenset({_EVERYWHERE})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        """The relevance ``(N, h, w)`` of the photo's patches for the other tokens (words or
        queries) that the score is read from, or for the one that ``token`` names."""
        maps = evidence[_EVERYWHERE]
        n_image, n_other = self._token_counts(maps, evidence)
        if self.token is not None and self.token >= n_other:
            raise MethodError(
                f"token of {self.name} must be below the {n_other} other tokens, got {self.token}"
            )
        attention_of_other = [
            attention for attention in maps if attention.weights.shape[-2] == n_other
        ]
        read = _rows_read(attention_of_other[-1])
        if self.token is not None:  # (n_other, 1), the same for all images
            read = torch.arange(n_other).to(read.device)[:, None] == self.token
        # the rows are the other tokens, the columns the image's
        relevance = _followed(maps, n_image, n_other)[n_other, n_image]
        row = (relevance * read).sum(1) / read.sum(-2).clamp(min=1)
        grid = evidence.grids.grid((len(evidence.inputs), n_image, 1))
        assert grid is not None  # n_image was chosen among the numbers that have one
        return row[:, list(grid.tokens)].reshape((-1, *grid.size))

    def _token_counts(self, maps: Sequence[AttentionMap], evidence: Evidence) -> tuple[int, int]:
        """How many tokens the image has, and how many the other kind (words or queries), told apart
        by which number fills a grid; refused where there are not exactly two kinds.
        """
        batch = len(evidence.inputs)
        shapes = [tuple(attention.weights.shape[-2:]) for attention in maps]
        between_kinds = [(queries, keys) for queries, keys in shapes if queries != keys]
        counts = {count for shape in shapes for count in shape}
        # the number of channels, 1 here, tells nothing; if both fill a grid, the larger one counts
        image_count = max(
            (count for count in counts if evidence.grids.grid((batch, count, 1)) is not None),
            default=0,
        )
        if (
            not between_kinds
            or len(counts) != 2
            or not image_count
            or any(len(attention.weights) != batch for attention in maps)
        ):
            got = sorted(set(shapes)) or "none"
            raise MethodError(
                f"{self.name} must have attention of an image and one other, got {got}; take legrad"
            )
        return image_count, next(count for count in counts if count != image_count)


def _followed(maps: Sequence[AttentionMap], *counts: int) -> dict[tuple[int, int], torch.Tensor]:
    """Chefer's bimodal rules over ``maps`` in the order of the network: relevance ``(N, a, b)`` for
    each pair of the token ``counts``. Attentions that look at each other change it at once."""
    first = maps[0].weights
    relevance = {}
    for a, b in itertools.product(counts, repeat=2):
        # each token has all of its own at first, and nothing of the other kind's
        start = torch.eye(a, b) * (a == b)
        relevance[a, b] = start.to(first).expand(len(first), a, b)
    weighted_maps = [
        weighted_attention(attention.weights, attention.gradient) for attention in maps
    ]
    while weighted_maps:
        queries, keys = weighted_maps[0].shape[1:]
        # of two attentions that look at each other, neither sees the other's change
        is_mutual = (
            queries != keys
            and len(weighted_maps) > 1
            and weighted_maps[1].shape[1:] == (keys, queries)
        )
        at_once = 2 if is_mutual else 1
        changes = dict[tuple[int, int], torch.Tensor]()
        for step in weighted_maps[:at_once]:
            queries, keys = step.shape[1:]
            if queries == keys:
                changes |= {(queries, other): step @ relevance[queries, other] for other in counts}
            else:
                query_relevance = _normalised(relevance[queries, queries]).transpose(1, 2)
                query_to_key = query_relevance @ step @ _normalised(relevance[keys, keys])
                changes |= {
                    (queries, keys): query_to_key,
                    (queries, queries): step @ relevance[keys, queries],
                }
        relevance |= {pair: relevance[pair] + change for pair, change in changes.items()}
        weighted_maps = weighted_maps[at_once:]
    return relevance


def _normalised(relevance: torch.Tensor) -> torch.Tensor:
    """The identity plus the rest of a relevance ``(N, tokens, tokens)``, the rest with rows scaled
    to add up to one; rows of zeros stay zero."""
    eye = torch.eye(relevance.shape[-1]).to(relevance)
    rest = relevance - eye
    return eye + ratio(rest, rest.sum(-1, keepdim=True))
