"""The attentions in a recording: a softmax over keys between two products, however they are
written."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from explain.recording.images import Labels, MixedError, follow, mixed_along, numbers_along
from explain.recording.moves import is_move
from explain.recording.values import Step, Value


@dataclass(frozen=True)
class Factor:
    """A factor of a product, and its dimensions of tokens and of channels."""

    value: Value
    tokens: int | None
    """None where there is one token, and no dimension for it."""
    channels: int

    @property
    def batch_sizes(self) -> list[int]:
        """The sizes of the value, but 1 in the dimensions of tokens and channels."""
        dims = (self.tokens, self.channels)
        return [1 if dim in dims else size for dim, size in enumerate(self.value.shape)]

    def by_head(self, tensor: Tensor) -> Tensor:
        """A tensor in the shape of the value, or one that broadcasts to it, as ``(M, tokens,
        channels)``: all other dimensions in one."""
        # only dimensions that are joined to one must be written out
        sizes = [
            1 if old == 1 and dim in (self.tokens, self.channels) else size
            for dim, (old, size) in enumerate(zip(tensor.shape, self.value.shape, strict=True))
        ]
        tensor = tensor.expand(sizes)
        tokens = self.tokens
        if tokens is None:  # a last dimension, for one token
            tokens = tensor.ndim
            tensor = tensor.unsqueeze(tokens)
        moved = tensor.movedim((tokens, self.channels), (-2, -1))
        return moved.reshape(-1, *moved.shape[-2:])


@dataclass(frozen=True)
class RecordedAttention:
    """One attention: what it is made of, its weights, and what it gives."""

    scores: Value
    """The product that the weights come from."""
    weights: Factor
    """Its channels are the keys, its tokens the queries, None for one query without a dimension."""
    query: Factor
    key: Factor
    value: Factor
    result: Factor
    predecessors: frozenset[int] = frozenset()
    """The numbers of the attentions that it is computed from."""

    @property
    def number(self) -> int:
        """The number of its weights in the recording."""
        return self.weights.value.number

    @property
    def shape(self) -> Sequence[int]:
        """The shape of its weights."""
        return self.weights.value.shape

    @property
    def module(self) -> str:
        """The path of the innermost module that computes it, from the projection of queries on."""
        projected: Value | None = self.query.value
        while projected is not None and projected.step is not None:
            if projected.step.operation.kind in ("matrixproduct", "convolution"):
                break
            projected = next((value for value in projected.step.inputs if value.depends), None)
        values = (projected, self.scores, self.weights.value, self.result.value)
        steps = [value.step for value in values if value is not None]
        paths = [step.module.split(".") for step in steps if step is not None]
        # the names at each depth, from the outermost on, as long as all paths have the same
        shared = takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
        return ".".join(names[0] for names in shared)


@dataclass(frozen=True)
class _PairProduct:
    """A product of two factors that may be that of an attention; ``rows`` and ``columns`` are the
    dimensions of ``result`` with the tokens of the first and of the second one."""

    result: Value
    factors: tuple[Factor, Factor]
    rows: int | None
    columns: int | None

    @property
    def tokens(self) -> tuple[Labels, Labels]:
        """The numbers of the tokens of both factors in the result."""
        return numbers_along(self.result, self.rows), numbers_along(self.result, self.columns)


@dataclass(frozen=True)
class _Scores:
    """A value that is made of a product, element by element or by mixing heads. ``tokens`` are the
    numbers of both factors; after a softmax, ``attention`` is known but for its value."""

    product: _PairProduct
    tokens: tuple[Labels, Labels]
    is_exponential: bool = False
    log_dim: int | None = None
    """The dimension over which it is the logarithm of a softmax."""
    attention: RecordedAttention | None = None
    keys: int = 1
    """Which of the factors has the keys."""


def attentions_in(steps: Iterable[Step]) -> list[RecordedAttention]:
    """Find each attention of a recording, in the order of their softmaxes."""
    steps = list(steps)
    scores: dict[Value, _Scores] = {}
    attentions: dict[Value, RecordedAttention] = {}
    for step in steps:
        followed = _followed(step, scores)
        if followed:
            scores |= followed
            continue
        product = _product(step)
        if product is None:
            continue
        attention = _weighted_sum(product, scores)
        if attention is not None:
            attentions.setdefault(attention.weights.value, attention)
        scores[product.result] = _Scores(product, product.tokens)
    return _in_order(attentions, steps)


def _in_order(
    attentions: Mapping[Value, RecordedAttention], steps: Iterable[Step]
) -> list[RecordedAttention]:
    """Attentions by their weights in the order of these, each with those before it."""
    leading: dict[Value, frozenset[int]] = {}
    for step in steps if attentions else ():
        of_step = frozenset[int]().union(*(leading.get(value, ()) for value in step.inputs))
        for value in step.results:
            if value is not None:
                leading[value] = of_step | {value.number} if value in attentions else of_step
    ordered = []
    for weights, attention in sorted(attentions.items(), key=lambda item: item[0].number):
        ordered.append(replace(attention, predecessors=leading[weights] - {weights.number}))
    return ordered


class _Numbered(Protocol):
    """An attention of a recording, or what is kept of it."""

    @property
    def number(self) -> int: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def predecessors(self) -> frozenset[int]: ...


T = TypeVar("T", bound=_Numbered)


def heads_together(attentions: Iterable[T]) -> list[list[T]]:
    """The attentions of a recording, in their order, each with those beside it: several where a
    network computes its heads, or images, one by one."""
    groups: list[list[T]] = []
    for attention in attentions:
        last_groups = [{of_head.number for of_head in group} for group in groups[-2:]]
        # they follow each other, have weights of the same shape, and none depends on another; all
        # depend on the attention before, if there is one
        is_head = (
            bool(groups)
            and groups[-1][0].shape == attention.shape
            and attention.predecessors.isdisjoint(last_groups[-1])
            and (len(last_groups) == 1 or not attention.predecessors.isdisjoint(last_groups[0]))
        )
        if is_head:
            groups[-1].append(attention)
        else:
            groups.append([attention])
    return groups


def token_numbers(factor: Factor, unknown: Iterable[Value] = ()) -> Tensor | None:
    """The tokens ``(M, tokens)`` of a factor, by their numbers in the last linear map, or window of
    a map. None if they are mixed since, or along channels, or come from ``unknown``."""
    numbers = _tokens_of(factor.value, dict.fromkeys(unknown))
    try:
        if numbers is None:
            return None
        return factor.by_head(mixed_along(numbers, [factor.channels]))[..., 0]
    except MixedError:
        return None


def _tokens_of(value: Value, memo: dict[Value, Labels | None]) -> Labels | None:
    """The numbers of the tokens that the elements of a value belong to; ``memo`` gets those of all
    that are asked on the path."""
    if value not in memo:
        memo[value] = _from_arguments(value, memo)
    return memo[value]


def _from_arguments(value: Value, memo: dict[Value, Labels | None]) -> Labels | None:
    """The numbers of a value's tokens: new ones, if a linear map has made it."""
    step = value.step
    if step is None:  # such as learned queries
        return _numbered(value, [len(value.shape) - 1])
    operation = step.operation
    if operation.kind == "convolution" or operation.has("pools"):
        return _numbered(value, [1])
    if operation.kind == "matrixproduct" or step.name == "embedding":
        return _numbered(value, [len(value.shape) - 1])
    labels: dict[Value, Labels] = {}
    for source in step.inputs:
        # a weight or a mask beside a signal says nothing of the signal's tokens
        if source.depends != value.depends:
            continue
        of_source = _tokens_of(source, memo)
        if of_source is not None:
            labels[source] = of_source
        elif not step.is_pointwise:  # value by value, another source may still tell
            return None
    if not labels:
        return None
    of_value = follow(step, labels).get(value)
    if of_value is None and step.is_pointwise:
        # tokens of two maps are added up, and are new ones
        ndim = len(value.shape)
        parts = [part for part in labels.values() if part.ndim == ndim]
        channels = [d for d in range(ndim) if all(part.shape[d] == 1 for part in parts)]
        of_value = _numbered(value, channels)
    return of_value


def _numbered(value: Value, channels: Sequence[int]) -> Labels:
    """Numbers of the tokens of a value, from 1 on: of its elements in all dimensions but those of
    channels."""
    sizes = [1 if d in channels else size for d, size in enumerate(value.shape)]
    return torch.arange(1, math.prod(sizes) + 1, dtype=torch.int32, device="cpu").reshape(sizes)


def _followed(step: Step, scores: Mapping[Value, _Scores]) -> dict[Value, _Scores]:
    """What the results of a step are made of, if it leaves the tokens of scores apart."""
    carriers = [value for value in step.inputs if value in scores]
    if not carriers:
        return {}
    source = min(carriers, key=lambda value: _preference(scores[value]))
    of_source = scores[source]
    # the tokens of both factors of the product, rows and columns, are followed one by one
    rows: dict[Value, Labels] = {}
    columns: dict[Value, Labels] = {}
    for value in carriers:
        # others, such as a bias that is a product too, are only added to it
        if scores[value].product is of_source.product:
            rows[value], columns[value] = scores[value].tokens
    if step.operation.kind == "softmax":
        result = step.results[0]
        assert result is not None
        return {result: _normalised(step, source, result, of_source)}
    of_rows = follow(step, rows)
    of_columns = follow(step, columns)
    carried = {}
    for value in of_rows.keys() & of_columns.keys():
        of_value = replace(of_source, tokens=(of_rows[value], of_columns[value]))
        carried[value] = _normalised(step, source, value, of_value)
    return carried


def _preference(scores: _Scores) -> tuple[bool, int, int]:
    """What orders scores that are added up: weights first, then products of two signals, then the
    earlier ones."""
    depending = sum(factor.value.depends for factor in scores.product.factors)
    return scores.attention is None, -depending, scores.product.result.number


def _normalised(step: Step, source: Value, result: Value, scores: _Scores) -> _Scores:
    """Scores after a step: they are weights if it completes a softmax, by hand or not."""
    if scores.attention is not None:
        return scores
    # a softmax is one step, or exp(x) / exp(x).sum(dim), or exp(x - x.logsumexp(dim))
    name = step.name
    softmax_dim: int | None = None
    log_dim = scores.log_dim
    if step.operation.kind == "softmax":
        softmax_dim = step.args[1] % len(result.shape)
        if name == "_log_softmax":
            return replace(scores, log_dim=softmax_dim)
    elif name == "sub":
        log_dim = _reduced_over(step.args[1], source, "logsumexp")
    elif name in ("exp", "exp2"):
        softmax_dim = log_dim
        scores = replace(scores, is_exponential=True)
    elif name in ("div", "mul") and scores.is_exponential:  # by the sum, or its reciprocal
        divisors = [value for value in step.inputs if value is not source]
        softmax_dim = _reduced_over(divisors[-1], source, "sum") if divisors else None
    if softmax_dim is None:
        return replace(scores, log_dim=log_dim)
    return _weights(result, softmax_dim, scores)


def _weights(value: Value, dim: int, scores: _Scores) -> _Scores:
    """The weights that a softmax over a dimension gives, if it is over the tokens of a factor."""
    # keys are what the softmax is over: mostly the second factor, which is tried first
    for keys in (1, 0):
        of_keys = scores.tokens[keys]
        of_queries = scores.tokens[1 - keys]
        along_queries = [d for d, size in enumerate(of_queries.shape) if size > 1]
        along_keys = [d for d, size in enumerate(of_keys.shape) if size > 1]
        is_single_key = not along_keys and value.shape[dim] == 1
        # the softmax must be over the keys, and queries may lie along one dimension
        if len(along_queries) > 1 or not (along_keys == [dim] or is_single_key):
            continue
        if not along_queries:  # a single query, which may have a dimension for it
            of_size_one = [d for d, size in enumerate(value.shape) if size == 1 and d != dim]
            along_queries = of_size_one[-1:]
        query = scores.product.factors[1 - keys]
        key = scores.product.factors[keys]
        queries = along_queries[0] if along_queries else None
        # values and result are not met yet; keys stand in their place until then
        attention = RecordedAttention(
            scores=scores.product.result,
            weights=Factor(value, tokens=queries, channels=dim),
            query=query,
            key=key,
            value=key,
            result=key,
        )
        return replace(scores, attention=attention, keys=keys)
    return scores


def _reduced_over(value: object, source: Value, name: str) -> int | None:
    """The dimension over which a value is the sum of ``source``, or another reduction by its name;
    None if it isn't."""
    # back from the value, through what only moves or scales the reduction
    while isinstance(value, Value) and value.step is not None:
        step = value.step
        if step.name == name and step.args[0] is source:
            dims = step.args[1] if len(step.args) > 1 else range(len(source.shape))
            dims = [dims] if isinstance(dims, int) else list(dims)
            return dims[0] % len(source.shape) if len(dims) == 1 else None
        depending = [part for part in step.inputs if part.depends]
        if len(depending) != 1 or not (step.is_pointwise or is_move(step)):
            return None
        value = depending[0]
    return None


def _product(step: Step) -> _PairProduct | None:
    """The product that a step makes, if it may be one of an attention: of two signals, or of
    matrices of each image, and no linear layer."""
    if step.name == "sum" and isinstance(step.args[0], Value):
        return _product_by_hand(step)
    result = step.results[0]
    if step.operation.kind != "matrixproduct" or result is None or len(result.shape) < 2:
        return None
    start = int(step.operation.has("adds to first"))  # behind what the product is added to
    left, right = step.args[start : start + 2]
    last_dim = len(left.shape) - 1
    are_matrices = last_dim < 2
    is_linear = are_matrices and not (left.depends and right.depends)
    if is_linear or len(result.shape) != len(left.shape):
        return None
    of_left = Factor(left, tokens=last_dim - 1, channels=last_dim)
    of_right = Factor(right, tokens=last_dim, channels=last_dim - 1)
    return _PairProduct(result, (of_left, of_right), rows=last_dim - 1, columns=last_dim)


def _product_by_hand(step: Step) -> _PairProduct | None:
    """The product that a sum of products of single values makes, as ``(q[:, None] * k).sum(-1)``
    does."""
    products = step.args[0].step
    result = step.results[0]
    if result is None or products is None or products.name != "mul" or len(step.args) < 2:
        return None
    factors = [part for part in products.args if isinstance(part, Value) and part.depends]
    summed = [step.args[1]] if isinstance(step.args[1], int) else list(step.args[1] or ())
    if len(factors) != 2 or len(summed) != 1:
        return None
    ndim = len(step.args[0].shape)
    summed_dim = summed[0] % ndim
    # as they are broadcast to each other: where one alone has several elements, its tokens lie
    left, right = [[1] * (ndim - len(factor.shape)) + [*factor.shape] for factor in factors]
    rows = [d for d in range(ndim) if left[d] > 1 and right[d] == 1]
    columns = [d for d in range(ndim) if right[d] > 1 and left[d] == 1]
    if len(rows) > 1 or len(columns) > 1:
        return None
    of_tokens = []
    result_dims = []
    for factor, dims in zip(factors, (rows, columns), strict=True):
        missing_dims = ndim - len(factor.shape)
        dim = dims[0] if dims else None
        token_dim = None if dim is None else dim - missing_dims
        of_tokens.append(Factor(factor, tokens=token_dim, channels=summed_dim - missing_dims))
        # one less in the result, if the sum has dropped its dimension before this one
        moves_up = len(result.shape) < ndim and dim is not None and summed_dim < dim
        result_dims.append(dim if dim is None else dim - moves_up)
    left_factor, right_factor = of_tokens
    row_dim, column_dim = result_dims
    return _PairProduct(result, (left_factor, right_factor), rows=row_dim, columns=column_dim)


def _weighted_sum(
    product: _PairProduct, scores: Mapping[Value, _Scores]
) -> RecordedAttention | None:
    """The attention whose weights a product multiplies with values, and adds up over the keys."""
    # the weights stand left or right; ``dims`` are those of both factors' tokens in the product
    first, second = product.factors
    for weights, values, dims in (
        (first, second, (product.rows, product.columns)),
        (second, first, (product.columns, product.rows)),
    ):
        of_weights = scores.get(weights.value)
        if of_weights is None or of_weights.attention is None:
            continue
        of_keys = of_weights.tokens[of_weights.keys]
        along_keys = [d for d, size in enumerate(of_keys.shape) if size > 1]
        if along_keys == [weights.channels] and values.tokens is not None:
            # a product sums over the channels of its factors: here over the keys
            value = Factor(values.value, tokens=values.channels, channels=values.tokens)
            queries, channels = dims
            assert channels is not None
            result = Factor(product.result, tokens=queries, channels=channels)
            return replace(of_weights.attention, value=value, result=result)
    return None
