"""The parts of an attention while it is computed: queries, keys, values, weights, and the result of
each head.

A tracer follows the calls that a module makes, and lets hooks replace what they see. It knows the
attention of a fused kernel, `F.scaled_dot_product_attention`, and that of three calls: a product of
two computed tensors, a softmax over keys, and a product with the result, in matrices or by
`torch.einsum`; the queries come first in scores. `nn.MultiheadAttention` takes none of its
shortcuts while a tracer is active.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from explain.hooks.tracer import Tracer

Edit = Callable[[torch.Tensor], "torch.Tensor | None"]
"""From a part of an attention to what takes its place; None leaves it as it is."""
NO_ATTENTION = (
    "no attention was recognised in it (a fused kernel, or a softmax over the keys "
    "between two products)"
)
_PRODUCTS = frozenset(["matmul", "__matmul__", "bmm", "baddbmm", "einsum"])
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "heads", "nhead")


def head_count(module: nn.Module) -> int | None:
    """The number of heads that a module says its attention has, by one of the usual attributes;
    None if it has none."""
    return next(
        (count for name in _HEADS if isinstance(count := getattr(module, name, None), int)), None
    )


def fused_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    lowest: float = -math.inf,
) -> torch.Tensor:
    """The scores ``(..., queries, keys)`` of a fused attention before its softmax: query times key,
    scaled and masked.

    They are ``lowest`` where a boolean mask hides a key from a query; a mask of numbers is added.
    """
    key = spread(key, query.shape[-3]) if query.ndim > 3 else key
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        return scores
    return scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask


def spread(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat the heads (dimension -3) of keys or values that several queries share, up to
    ``heads``."""
    return (
        tensor.repeat_interleave(heads // tensor.shape[-3], -3)
        if tensor.shape[-3] != heads
        else tensor
    )


@dataclass
class _Product:
    """A product of two tensors, in the letters of `torch.einsum`: those of both, of each alone, and
    those summed over.

    >>> product = product_of(
    ...     "einsum", ("bihd,bjhd->bhij", torch.ones(2, 3, 4, 5), torch.ones(2, 6, 4, 5))
    ... )
    >>> product.shared, product.summed, product.separate
    ('bh', 'd', ['i', 'j'])
    """

    args: list[Any]
    """The arguments of the call; the two tensors among them follow one another."""
    first: int
    """Where the first tensor is among the arguments."""
    terms: list[str]
    """The letters of both tensors and of the result."""
    shared: str
    summed: str
    separate: list[str]


def product_of(name: str, args: tuple[Any, ...]) -> _Product | None:
    """Describe a call as a product that an attention may make: of two computed matrices for each
    image and head.

    None for anything else, such as products with weights. ``name`` is that of the function.
    """
    if name == "einsum":
        first = 1
        tensors = list(args[1]) if isinstance(args[1], (tuple, list)) else list(args[1:])
        args = (args[0], *tensors)
        terms = str(args[0]).replace(" ", "").replace("->", ",").split(",")
    else:
        first = 1 if name == "baddbmm" else 0  # `baddbmm` has the tensor that it adds first
        tensors = list(args[first : first + 2])
        terms = ["...ij", "...jk", "...ik"]
    are_tensors = [isinstance(tensor, torch.Tensor) for tensor in tensors]
    if are_tensors != [True, True] or len(terms) != 3:
        return None
    batch_dims = max(
        tensor.ndim - len(term) + 3 for tensor, term in zip(tensors, terms, strict=False)
    )
    terms = [term.replace("...", ascii_uppercase[:batch_dims]) for term in terms]
    left, right, result = terms
    if tensors[0].ndim != len(left) or tensors[1].ndim != len(right):
        return None
    shared = "".join(letter for letter in result if letter in left and letter in right)
    summed = "".join(letter for letter in left if letter in right and letter not in result)
    separate = [
        "".join(letter for letter in left if letter not in right),
        "".join(letter for letter in right if letter not in left),
    ]
    if not shared or [len(summed), *map(len, separate)] != [1, 1, 1]:
        return None
    return _Product(list(args), first, terms, shared, summed, separate)


class AttentionTracer(Tracer):
    """Lets ``edits`` replace parts of the attentions that ``module`` computes, for as long as its
    block lasts.

    Parts are given, and returned, as ``(N, heads, tokens, d)`` and ``(N, heads, queries, keys)``,
    also where the network has images and heads in one dimension.

    >>> layer, x = nn.MultiheadAttention(4, 2, batch_first=True), torch.rand(1, 3, 4)
    >>> with AttentionTracer(layer, {"heads": torch.zeros_like}):
    ...     output = layer(x, x, x, need_weights=False)[0]
    >>> torch.equal(output, layer.out_proj.bias.expand(1, 3, 4))
    True
    """

    def __init__(self, module: nn.Module, edits: Mapping[str, Edit]) -> None:
        """Prepare to show parts of the attentions inside ``module`` to ``edits``, by the names of
        the parts."""
        super().__init__()
        self._edits = edits
        self._heads = next(filter(None, map(head_count, module.modules())), None)
        self._scored = False
        """Whether a product has been made since the last softmax: the next one may be of its
        scores."""
        self._weights: list[torch.Tensor] = []
        """The result of the last softmax, and what was made of it, as by dropout or a
        transposition."""

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call, and let hooks see and replace its tensors if it is a step of an attention.

        Steps are recognised in their order: a product gives scores, the softmax of scores weights,
        the product with weights heads.
        """
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            return self._fused(*args, **kwargs)
        product = product_of(name, args) if name in _PRODUCTS else None
        if product is not None:
            return self._product(product, func, kwargs)
        output = func(*args, **kwargs)
        if name == "softmax" and self._scored:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if output.ndim > 2 and dim in (-1, output.ndim - 1):
                output = self._edited("pattern", output)
                self._scored = False
                self._weights = [output]
        elif (
            isinstance(output, torch.Tensor)
            and self._has_weights(args)
            and self._has_size_of_weights(output)
        ):
            self._weights.append(output)
        return output

    def _has_weights(self, args: tuple[Any, ...]) -> bool:
        """Whether attention weights are among the arguments of a call: what the last softmax gave,
        or what was made of it."""
        return any(arg is weights for arg in args for weights in self._weights)

    def _has_size_of_weights(self, output: torch.Tensor) -> bool:
        """Whether a tensor has as many values as the last attention weights, so that it may be made
        of them."""
        return output.numel() == self._weights[0].numel()

    def _product(self, product: _Product, func: Any, kwargs: dict[str, Any]) -> Any:
        """Make a product of an attention, with the hooks' edits: that of weights and values, else
        that of queries and keys."""
        left = product.args[product.first]
        right = product.args[product.first + 1]
        result = product.terms[2]
        if self._has_weights((left, right)):
            values = 0 if self._has_weights((right,)) and not self._has_weights((left,)) else 1
            queries = product.separate[1 - values]
            channels = product.separate[values]
            self._edit_factor(product, values, "v", product.summed + channels)
            self._weights = []
            output = func(*product.args, **kwargs)
            return self._edited("heads", output, result, product.shared + queries + channels)
        keys = 0 if product.separate[0] == result[-1] else 1  # the softmax is over the last one
        for part, number in (("q", 1 - keys), ("k", keys)):
            self._edit_factor(product, number, part, product.separate[number] + product.summed)
        self._scored = True
        return func(*product.args, **kwargs)

    def _edit_factor(self, product: _Product, number: int, part: str, order: str) -> None:
        """Let the hook on ``part`` see and replace factor ``number`` (0 or 1) of a product, its
        dimensions in the order that hooks know.

        ``order`` are the letters of the factor's last two dimensions. ``product.args`` is changed.
        """
        index = product.first + number
        product.args[index] = self._edited(
            part, product.args[index], product.terms[number], product.shared + order
        )

    def _fused(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Compute `F.scaled_dot_product_attention` with the hooks' edits; step by step only if a
        hook wants its weights."""
        query = self._edited("q", query)
        key = self._edited("k", key)
        value = self._edited("v", value)
        if "pattern" not in self._edits:
            options: dict[str, Any] = {"enable_gqa": True} if enable_gqa else {}
            heads = F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options
            )
            return self._edited("heads", heads)
        value = spread(value, query.shape[-3]) if enable_gqa else value
        scores = fused_scores(query, key, attn_mask, is_causal, scale)
        weights = F.dropout(self._edited("pattern", scores.softmax(-1)), dropout_p, dropout_p > 0)
        return self._edited("heads", weights @ value)

    def _edited(
        self, part: str, tensor: torch.Tensor, letters: str = "", order: str = ""
    ) -> torch.Tensor:
        """Let the hook on a part of the attention see a tensor; return the tensor or what the hook
        put in its place.

        The hook gets it as ``(N, heads, ..., ...)``: ``letters`` name the tensor's dimensions,
        ``order`` the order for the hook.
        """
        edit = self._edits.get(part)
        if edit is None:
            return tensor
        letters = letters or ascii_uppercase[: tensor.ndim]
        order = order or letters
        moved = tensor.permute([letters.index(letter) for letter in order])
        shape = moved.shape
        if moved.ndim == 3 and self._heads:
            moved = moved.reshape(-1, self._heads, shape[1], shape[2])
        edited_part = edit(moved)
        return (
            tensor
            if edited_part is None
            else edited_part.reshape(shape).permute([order.index(letter) for letter in letters])
        )
