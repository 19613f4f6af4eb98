"""The benchmark of Shapley values, in small: the truth, what is kept, and the table's figures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.hooks.test_tour import example


class Bent(nn.Module):
    """A sum over pixels and its square, if ``bend`` is not zero; counts the photos of its passes."""

    def __init__(self, bend: float) -> None:
        super().__init__()
        self.bend = bend
        self.photos = 0

    def forward(self, x: Tensor) -> Tensor:
        self.photos += len(x)
        weights = torch.linspace(-0.5, 1, x[0].numel(), dtype=x.dtype).reshape(x.shape[1:])
        total = (x * weights).flatten(1).mean(1)
        return torch.stack([total + self.bend * total**3 + 10, 0 * total], 1)


@pytest.fixture
def shapley(monkeypatch: pytest.MonkeyPatch) -> Any:
    """With photos of double precision, and without the packages that may be installed."""
    module = example("benchmarks/shapley")
    photos = module.manipulation.photos
    monkeypatch.setattr(module.manipulation, "photos", lambda *of: (photos(*of)[0].double(), None))
    for peers in ("shap_estimators", "shapiq_estimators"):
        monkeypatch.setattr(module, peers, dict)
    return module


def rows_of(module: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr("sys.argv", ["shapley.py", *words])
    return module.main()


def test_answers_are_kept_and_of_a_sum_every_estimator_has_no_error(
    shapley: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    model = Bent(0)
    monkeypatch.setattr(shapley, "planted", lambda: model)
    kept = str(tmp_path / "kept.pt")
    asked = ["run", kept, "1", "2", "--networks", "planted", "--regions", "4x5", "--seeds", "1"]
    asked += ["--passes", "80", "100", "--long", "200"]
    rows_of(shapley, monkeypatch, *asked)
    passes = model.photos
    assert 2 * (400 + 100) < passes < 2 * (400 + 3 * 100)
    rows_of(shapley, monkeypatch, *asked)
    assert model.photos == passes + 2 * 3  # the class, the whole photo and the blank one
    capsys.readouterr()
    rows_of(shapley, monkeypatch, "table", kept)
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 4
    for row in rows:
        cells = row.split("|")[4:-1]
        assert len(cells) == (1 if "long runs" in row else 2)
        assert all("0.0000 ± 0.0000" in cell for cell in cells)


def test_of_few_regions_the_truth_is_exact(shapley: Any) -> None:
    x = shapley.manipulation.photos(1, 3)[0]
    model = Bent(0.3)
    game = shapley.Game(model, x, 2, 3)
    labels = torch.arange(32)[:, None] // 16 * 3 + torch.arange(32) * 3 // 32
    first, second = shapley.truths(game, 100)
    coalitions = torch.tensor(
        [[number >> region & 1 for region in range(6)] for number in range(64)]
    ).bool()
    scores = torch.stack([model(x * seen[labels].double())[0, 0] for seen in coalitions])
    expected = torch.zeros(6, dtype=torch.float64)
    for number, seen in enumerate(coalitions.tolist()):
        size = sum(seen)
        for region in range(6):
            if not seen[region]:
                weight = 1 / 6 / math.comb(5, size)
                expected[region] += weight * (scores[number + 2**region] - scores[number])
    torch.testing.assert_close(first, expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(first, second)


def test_errors_of_long_runs_cancel_out_in_the_table(shapley: Any) -> None:
    """Of a thousand photos, an answer that misses by 0.1 in each region, by long runs that miss by
    1; its intervals are as wide as both together."""
    generator = torch.Generator().manual_seed(0)
    kept = {}
    for photo in range(1000):
        truth = torch.randn(49, generator=generator, dtype=torch.float64) * 10
        first, second = (
            truth + torch.randn(49, generator=generator, dtype=torch.float64) for _ in "ab"
        )
        missed = 0.1 * torch.randn(49, generator=generator, dtype=torch.float64)
        answer = (truth + missed, torch.full((49,), 0.1, dtype=torch.float64))
        kept["planted", 49, str(photo)] = (first, second), {("ours", 100, 0): answer}
    long, row = shapley.table(kept)
    assert 0.0045 < float(long.split("|")[4].split("±")[0]) < 0.0055
    error, rest = row.split("|")[4].split("±")
    assert abs(float(error) - 0.0001) < 2 * float(rest.split()[0]) + 1e-4
    assert 0.94 < float(rest.split("(")[1].rstrip("%) ")) / 100 < 0.96
