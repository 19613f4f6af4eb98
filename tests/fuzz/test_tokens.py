"""Tokens in any order, with others before, behind and among them: maps do not depend on where they
stand.

Attention does not see the order of tokens. So a network gives the same answer however its tokens
are arranged, and the same map, which the plainest arrangement shows: others first, and then patches
row by row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain.hooks import Ablate, intervene
from explain.methods import TIS, GradCAM, HiResCAM
from tests.conftest import Made
from tests.fuzz.test_networks import ALWAYS
from tests.networks import WIDTH, Block

PATCH = 4
CLASSES = 3
EXACT = {"rtol": 1e-7, "atol": 1e-10}


@dataclass(frozen=True)
class Arrangement:
    """Rows and columns of patches, and where each patch and each other token stands in the
    sequence."""

    rows: int
    columns: int
    others: int
    order: tuple[int, ...]
    """What stands where: patches row by row from 0, and others behind them."""
    embedding: str = "conv"
    tokens_first: bool = False

    @property
    def plainest(self) -> Arrangement:
        patches = self.rows * self.columns
        others = [each for each in self.order if each >= patches]
        return replace(self, order=(*others, *range(patches)), embedding="conv", tokens_first=False)


@st.composite
def arrangements(draw: Any, least_others: int = 0) -> Arrangement:
    rows = draw(st.integers(1, 4))
    columns = draw(st.integers(2, 5))
    patches = list(range(rows * columns))
    others = [len(patches) + i for i in range(draw(st.integers(least_others, 4)))]
    place = draw(st.integers(0, len(others)))
    middle = draw(st.integers(0, len(patches)))
    by_columns = sorted(patches, key=lambda patch: patch % columns)
    orders = {
        "at both ends": [*others[:place], *patches, *others[place:]],
        "among them": [*patches[:middle], *others, *patches[middle:]],
        "by columns": [*others[:place], *by_columns, *others[place:]],
    }
    kind = draw(st.sampled_from([*orders, "any"]))
    order = draw(st.permutations(patches + others)) if kind == "any" else orders[kind]
    embedding = draw(st.sampled_from(["conv", "unfold", "reshape", "written"]))
    return Arrangement(rows, columns, len(others), tuple(order), embedding, draw(st.booleans()))


def transposed(net: Any, tokens: Tensor) -> Tensor:
    return net.block(tokens.transpose(0, 1)).transpose(0, 1)


class Transformer(nn.Module):
    """The answer is read off one token: a patch, or another one."""

    def __init__(self, arrangement: Arrangement, read: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.arrangement = arrangement
        self.place = arrangement.order.index(read)
        self.patches = nn.Linear(3 * PATCH * PATCH, WIDTH)
        self.position = nn.Parameter(torch.randn(arrangement.rows * arrangement.columns, WIDTH))
        self.others = nn.Parameter(torch.randn(1, arrangement.others, WIDTH))
        self.blocks = nn.ModuleList([Block(), Block()])
        if arrangement.tokens_first:  # blocks take and give (tokens, N, C)
            self.blocks = nn.ModuleList([Made(transposed, block=block) for block in self.blocks])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def embed(self, x: Tensor) -> Tensor:
        """Patches row by row ``(N, T, C)``."""
        kind = self.arrangement.embedding
        weight = self.patches.weight
        bias = self.patches.bias
        if kind == "conv":
            return F.conv2d(x, weight.unflatten(1, (3, PATCH, PATCH)), bias, PATCH).flatten(2).mT
        if kind == "unfold":
            return self.patches(F.unfold(x, PATCH, stride=PATCH).mT)
        # (N, C, rows, PATCH, columns, PATCH)
        cut = x.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))
        return self.patches(cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        patches = self.embed(x) + self.position
        everything = torch.cat([patches, self.others.expand(len(x), -1, -1)], 1)
        order = torch.tensor(self.arrangement.order)
        if self.arrangement.embedding == "written":
            tokens = torch.zeros_like(everything)
            tokens[:, order.argsort()] = everything
        else:
            tokens = everything[:, order]
        tokens = tokens.transpose(0, 1) if self.arrangement.tokens_first else tokens
        for block in self.blocks:
            tokens = block(tokens)
        tokens = self.norm(tokens)
        return self.head(
            tokens[self.place] if self.arrangement.tokens_first else tokens[:, self.place]
        )


def pair(arrangement: Arrangement, read: int) -> tuple[nn.Module, nn.Module]:
    """A network, and the same one in the plainest arrangement."""
    return tuple(
        Transformer(each, read).double().eval() for each in (arrangement, arrangement.plainest)
    )


def photos(arrangement: Arrangement, count: int = 2) -> Tensor:
    size = arrangement.rows * PATCH, arrangement.columns * PATCH
    return torch.randn(
        count, 3, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


MAPS = [GradCAM(relu=False), HiResCAM(relu=False), "ablationcam(relu=False)", "fullgrad"]
OF_ATTENTION = ["rollout", "gradientrollout", "legrad", "gradeclip", "cheferattribution"]


BY_COLUMNS = Arrangement(4, 3, 0, (0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11), "written")


@hypothesis.settings(ALWAYS, max_examples=4)
@hypothesis.given(arrangements(), st.integers(0, 19))
@hypothesis.example(BY_COLUMNS, 11)
@hypothesis.example(replace(BY_COLUMNS, embedding="conv", tokens_first=True), 11)
def test_maps_and_interventions_do_not_depend_on_where_tokens_stand(
    arrangement: Arrangement, number: int
) -> None:
    cells = [divmod(i, arrangement.columns) for i in range(arrangement.rows * arrangement.columns)]
    row, column = cells.pop(number % len(cells))
    model, plainest = pair(arrangement, row * arrangement.columns + column)
    x = photos(arrangement)
    scores = model(x).detach()
    assert_close(scores, plainest(x).detach(), **EXACT)
    a, expected = (
        explain.attribute(network, x, MAPS, target=1, layer="blocks.1")
        for network in (model, plainest)
    )
    for name in a:
        assert_close(a[name].values, expected[name].values, **EXACT)
    alone = explain.attribute(model, x, HiResCAM(relu=False), target=1, layer="norm").values
    assert alone[:, row, column].all()
    assert_close(alone.abs().sum((1, 2)), alone[:, row, column].abs(), rtol=0, atol=1e-14)
    without = model.head(torch.zeros(2, WIDTH, dtype=torch.float64)).detach()
    region = (column * PATCH, row * PATCH, (column + 1) * PATCH, (row + 1) * PATCH)
    for ablated, output in (
        (Ablate("norm", positions=[(row, column)]), without),
        (Ablate("norm", region=region), without),
        (Ablate("norm", positions=cells), scores),
    ):
        with intervene(model, [ablated]):
            assert_close(model(x).detach(), output, **EXACT)
    effects = explain.trace(model, x[:1], x[1:], at="positions", layers="norm", target=1)
    of_cells = effects.by_layer["norm"].reshape(arrangement.rows, arrangement.columns)
    expected_effects = torch.zeros_like(of_cells)
    expected_effects[row, column] = (scores[0] - scores[1])[1]
    assert_close(of_cells, expected_effects, rtol=1e-5, atol=1e-7)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:gradeclip is zero everywhere")
@hypothesis.settings(ALWAYS, max_examples=3)
@hypothesis.given(arrangements(least_others=1))
def test_attention_of_another_token_does_not_depend_on_where_tokens_stand(
    arrangement: Arrangement,
) -> None:
    model, plainest = pair(arrangement, arrangement.plainest.order[0])
    x = photos(arrangement)
    a, expected = (
        explain.attribute(network, x, OF_ATTENTION, target=1) for network in (model, plainest)
    )
    for name in a:
        assert a[name].values.any() or name == "gradeclip"
        assert_close(a[name].values, expected[name].values, **EXACT)


def test_some_of_the_tokens_run_with_all_others_in_their_order() -> None:
    """Of two others, the last one is read, from the end: it is there whichever patches are left
    out."""
    model, plainest = pair(Arrangement(3, 4, 2, (12, *range(12), 13)), 13)
    model.place = -1
    x = photos(model.arrangement)
    found, expected = (
        explain.attribute(each, x, TIS(6), target=1).values for each in (model, plainest)
    )
    assert found.any()
    assert_close(found, expected, **EXACT)


def latents(net: Any, x: Tensor) -> Tensor:
    """As many latents as patches look at these: they lie nowhere on the photo (Perceiver, queries
    of detectors)."""
    tokens = net.of_patches(net.patches(x).flatten(2).mT)
    queries = net.latents.expand(len(x), -1, -1)
    looked = net.attention(queries, tokens, tokens, need_weights=False)[0]
    return net.head(net.norm(queries + looked).mean(1))


@pytest.mark.parametrize("count", [16, 9, 20])
def test_latents_lie_nowhere_even_if_they_are_as_many_as_patches(count: int) -> None:
    torch.manual_seed(0)
    norms = {"norm": nn.LayerNorm(8), "of_patches": nn.LayerNorm(8)}
    ends = {"patches": nn.Conv2d(3, 8, 4, 4), "head": nn.Linear(8, 3)}
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    model = Made(latents, **norms, **ends, attention=attention).eval()
    model.latents = nn.Parameter(torch.randn(1, count, 8))
    x = torch.rand(2, 3, 16, 16)
    method = GradCAM(relu=False)
    of_patches = explain.attribute(model, x, method, target=1, layer="of_patches")
    assert of_patches.values.shape == (2, 4, 4)
    for layer in ("norm", "attention"):
        with pytest.raises(explain.LayerError, match=f"'{layer}' must"):
            explain.attribute(model, x, method, target=1, layer=layer)
    ablated = intervene(model, [Ablate("norm", positions=[(0, 0)])])
    with pytest.raises(explain.ExplainError, match="tokens="), ablated:
        model(x)
