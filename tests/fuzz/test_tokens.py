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
def arrangements(draw: Any) -> Arrangement:
    rows = draw(st.integers(1, 4))
    columns = draw(st.integers(2, 5))
    patches = rows * columns
    others = draw(st.integers(0, 4))
    kind = draw(st.sampled_from(["at both ends", "among them", "by columns", "any"]))
    before = draw(st.integers(0, others))
    place = draw(st.integers(0, patches)) if kind == "among them" else 0
    of_patches = list(range(patches))
    if kind == "by columns":
        of_patches = [row * columns + column for column in range(columns) for row in range(rows)]
    of_others = list(range(patches, patches + others))
    order = [*of_others[:before], *of_patches, *of_others[before:]]
    if kind == "among them":
        order = [*of_patches[:place], *of_others, *of_patches[place:]]
    if kind == "any":
        order = draw(st.permutations(order))
    embedding = draw(st.sampled_from(["conv", "unfold", "reshape", "written"]))
    return Arrangement(rows, columns, others, tuple(order), embedding, draw(st.booleans()))


class TokensFirst(nn.Module):
    """A block that takes and gives ``(tokens, N, C)``."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(tokens.transpose(0, 1)).transpose(0, 1)


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
        blocks = [Block(), Block()]
        self.blocks = nn.ModuleList(
            map(TokensFirst, blocks) if arrangement.tokens_first else blocks
        )
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
def test_maps_do_not_depend_on_where_tokens_stand(arrangement: Arrangement, number: int) -> None:
    cells = arrangement.rows * arrangement.columns
    cell = number % cells
    place = divmod(cell, arrangement.columns)
    model, plainest = pair(arrangement, cell)
    x = photos(arrangement)
    assert_close(model(x), plainest(x), **EXACT)
    at = {"layer": "blocks.1"}
    found, expected = (
        explain.attribute(each, x, MAPS, target=1, **at) for each in (model, plainest)
    )
    for name in found:
        assert_close(found[name].values, expected[name].values, **EXACT)
    alone = explain.attribute(model, x, HiResCAM(relu=False), target=1, layer="norm").values
    expected_alone = torch.zeros_like(alone)
    expected_alone[:, place[0], place[1]] = alone[:, place[0], place[1]]
    assert alone.any()
    assert_close(alone, expected_alone, rtol=0, atol=1e-14)


@pytest.mark.filterwarnings("ignore:gradeclip is zero everywhere")
@hypothesis.settings(ALWAYS, max_examples=3)
@hypothesis.given(arrangements().filter(lambda each: each.others > 0))
def test_attention_of_another_token_does_not_depend_on_where_tokens_stand(
    arrangement: Arrangement,
) -> None:
    model, plainest = pair(arrangement, arrangement.plainest.order[0])
    x = photos(arrangement)
    for method in OF_ATTENTION:
        found, expected = (
            explain.attribute(each, x, method, target=1).values for each in (model, plainest)
        )
        assert found.any() or method == "gradeclip"
        assert_close(found, expected, **EXACT)


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


@hypothesis.settings(ALWAYS, max_examples=3)
@hypothesis.given(arrangements(), st.integers(0, 19))
def test_interventions_and_traces_meet_the_token_of_a_place(
    arrangement: Arrangement, number: int
) -> None:
    cells = arrangement.rows * arrangement.columns
    cell = number % cells
    row, column = divmod(cell, arrangement.columns)
    model, _ = pair(arrangement, cell)
    x = photos(arrangement)
    others = [divmod(i, arrangement.columns) for i in range(cells) if i != cell]
    region = (column * PATCH, row * PATCH, (column + 1) * PATCH, (row + 1) * PATCH)
    with torch.no_grad():
        before = model(x)
        without = model.head(torch.zeros(2, WIDTH, dtype=torch.float64))
        for ablated, expected in (
            (Ablate("norm", positions=[(row, column)]), without),
            (Ablate("norm", region=region), without),
            (Ablate("norm", positions=others), before),
        ):
            with intervene(model, [ablated]):
                assert_close(model(x), expected, **EXACT)
    effects = explain.trace(model, x[:1], x[1:], at="positions", layers="norm", target=1)
    found = effects.by_layer["norm"].reshape(arrangement.rows, arrangement.columns)
    expected_effects = torch.zeros_like(found)
    expected_effects[row, column] = (before[0] - before[1])[1]
    assert_close(found, expected_effects, rtol=1e-5, atol=1e-7)


class Latents(nn.Module):
    """As many latents as patches look at these: they lie nowhere on the photo (Perceiver, queries
    of detectors)."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.latents = nn.Parameter(torch.randn(1, count, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.of_patches = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.of_patches(self.patches(x).flatten(2).mT)
        latents = self.latents.expand(len(x), -1, -1)
        latents = self.norm(
            latents + self.attention(latents, tokens, tokens, need_weights=False)[0]
        )
        return self.head(latents.mean(1))


@pytest.mark.parametrize("count", [16, 9, 20])
def test_latents_lie_nowhere_even_if_they_are_as_many_as_patches(count: int) -> None:
    torch.manual_seed(0)
    model = Latents(count).eval()
    x = torch.rand(2, 3, 16, 16)
    assert explain.attribute(
        model, x, GradCAM(relu=False), target=1, layer="of_patches"
    ).values.shape == (2, 4, 4)
    for layer in ("norm", "attention"):
        with pytest.raises(explain.LayerError, match=f"'{layer}' must"):
            explain.attribute(model, x, GradCAM(relu=False), target=1, layer=layer)
    with (
        pytest.raises(explain.ExplainError, match="tokens="),
        intervene(model, [Ablate("norm", positions=[(0, 0)])]),
    ):
        model(x)
