"""`trace` equals one pass for each patch, its estimate is exact for linear models; a lens ends in
the model's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import explain
from explain import HookError, lens, trace
from explain.cli import main
from explain.hooks import Patch, intervene
from tests.conftest import ROOT, TinyNet, settled
from tests.networks import Block


class Transformer(nn.Module):
    """Sixteen patches behind a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 5))

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).mT
        return torch.cat([self.token.expand(len(x), -1, -1), tokens], 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


def photos(seed: int, size: tuple[int, int]) -> torch.Tensor:
    return torch.rand(
        1, 3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def network(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    if name == "convolutional":
        return settled(TinyNet()).double().eval(), photos(0, (12, 10)), photos(1, (12, 10))
    return settled(Transformer()).double().eval(), photos(0, (16, 16)), photos(1, (16, 16))


def square(unit: int, wide: float, high: float) -> tuple[float, ...]:
    row, column = divmod(unit, 7)
    return column * wide, row * high, (column + 1) * wide, (row + 1) * high


CASES: list[tuple[str, str, Any, Any]] = [
    ("convolutional", "layers", None, None),
    ("convolutional", "channels", "layer1", lambda unit, grid: {"channels": [unit]}),
    (
        "convolutional",
        "positions",
        "layer2",
        lambda unit, grid: {"positions": [divmod(unit, grid[1])]},
    ),
    (
        "convolutional",
        "regions",
        "layer1",
        lambda unit, grid: {"region": square(unit, 10 / 7, 12 / 7)},
    ),
    ("transformer", "layers", None, None),
    ("transformer", "heads", None, lambda unit, grid: {"heads": [unit]}),
    (
        "transformer",
        "tokens",
        ["blocks.0", "blocks.1.attention:v"],
        lambda unit, grid: {"tokens": [unit]},
    ),
    (
        "transformer",
        "positions",
        "blocks.1",
        lambda unit, grid: {"positions": [divmod(unit, grid[1])]},
    ),
]


@pytest.mark.parametrize(("name", "at", "layers", "units"), CASES)
def test_a_trace_equals_one_pass_for_each_patch(
    name: str, at: Any, layers: Any, units: Any
) -> None:
    model, clean, corrupted = network(name)
    effects = trace(model, clean, corrupted, at, layers=layers, target=2, batch_size=5)
    before = model(corrupted)[0, 2].detach()
    rows = effects.rows()
    assert len(rows) >= 4
    for row in rows[:: max(1, len(rows) // 20)]:
        chosen = {} if units is None else units(row["unit"], effects.grid.get(row["layer"]))
        with intervene(model, [Patch(row["layer"], clean, from_input=True, **chosen)]):
            try:
                after = model(corrupted)[0, 2].detach()
            except HookError:  # no cell looks at the region
                assert at == "regions"
                after = before
        assert row["effect"] == pytest.approx(float(after - before), abs=1e-12)
    assert effects.clean == pytest.approx(model(clean)[0, 2].item())
    assert json.loads(json.dumps(effects.to_dict()))["effects"] == rows


def test_the_estimate_is_the_gradient_times_the_difference() -> None:
    model, clean, corrupted = network("transformer")
    effects = trace(model, clean, corrupted, "tokens", layers="blocks.1", target=3)
    there, here = (
        model.blocks[1](model.blocks[0](model.embed(x))).detach().requires_grad_()
        for x in (clean, corrupted)
    )
    (gradient,) = torch.autograd.grad(model.head(model.blocks[2](here)[:, 0])[0, 3], here)
    expected = ((there - here) * gradient).sum(-1)[0].detach()
    assert_close(effects.estimates["blocks.1"], expected)


def test_a_lens_ends_in_the_models_own_scores_and_reads_each_block() -> None:
    model, x, _ = network("transformer")
    x = torch.cat([x, x.flip(-1)])
    found = lens(model, x, tokens=True)
    assert found.layers == ("blocks.0", "blocks.1", "blocks.2")
    assert_close(found.scores[-1], model(x).detach())
    z = model.embed(x)
    for i, block in enumerate(model.blocks):
        z = block(z)
        assert_close(found.scores[i], model.head(z[:, 0]).detach())
        assert_close(found.tokens[i], model.head(z).detach())
    # the last block reads them all the same
    named = lens(model, x, layers=["blocks.1", "blocks.0"])
    assert named.layers == ("blocks.0", "blocks.1")
    assert_close(named.scores, found.scores[:2])


def test_what_cannot_be_traced_is_one_line() -> None:
    model, clean, corrupted = network("convolutional")
    other_size = F.pad(corrupted, (0, 2))
    for work, word in (
        (lambda: trace(model, clean, corrupted, "neurons"), "at"),
        (lambda: trace(model, clean, other_size), "shape"),
        (lambda: trace(model, clean, corrupted, "heads"), "heads"),
        (lambda: lens(model, clean, layers=["conv1", "layer2"]), "shape"),
        (lambda: lens(nn.Sequential(nn.Flatten(), nn.Linear(360, 3)), clean.float()), "blocks"),
    ):
        with pytest.raises(explain.ExplainError, match=word):
            work()


@pytest.mark.long
def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = [str(ROOT / "assets" / name) for name in ("chelsea.png", "coffee.png")]
    words = ["--model", "tiny-transformer", "--at", "heads", "--output", str(tmp_path), "--json"]
    assert main(["trace", *photos, *words]) == 0
    document = json.loads(capsys.readouterr().out)["results"][0]
    assert [Path(file).exists() for file in document["files"]] == [True]
    explainer = explain.Explainer("tiny-transformer")
    x = [explainer.as_input(photo) for photo in photos]
    expected = trace(explainer.model, *x, "heads", categories=explainer.categories)
    assert document["target"] == expected.target
    effects = [row["effect"] for row in expected.rows()]
    assert [row["effect"] for row in document["effects"]] == pytest.approx(effects, abs=1e-4)
    assert main(["trace", photos[0]]) == 2


def test_figures_and_tables_are_drawn() -> None:
    model, clean, corrupted = network("transformer")
    for at in ("layers", "heads", "positions"):
        effects = trace(model, clean, corrupted, at)  # type: ignore[arg-type]
        assert effects.figure().axes
        assert "correlation" in str(effects)
        assert effects.target == f"class {int(model(clean).argmax())}"
