"""Relevance on every classifier of torchvision, and on families of timm and Hugging Face: is what
is promised kept?

    python examples/relevance_matrix.py [--source torchvision|timm|transformers|all] [--pattern
    'resnet*'] [--giants]

The models are those of ``model_matrix.py``: random weights, the smallest input. Each is asked for
LRP-epsilon and for the composite that suits it. ``missed`` is what is neither at the input nor told
as taken on the way, as a share of all relevance, in float32; up to 1e-4 is rounding. ``apart`` is
the largest difference, in float64, between an image alone and in a batch, with another number of
threads, by the largest value: no more than a hundred times what a change of the input by 1e-15
makes, since sums near zero, which epsilon divides by, magnify rounding errors. ``unruled`` names
operations without a rule. A second call must give the same, and the model must be as it was.
Whatever else happens is a failure.
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from model_matrix import Subject, lively, smallest, state, subjects
from torch import nn

import explain
from explain.methods import LRP

COMPOSITES = ("Epsilon", "automatic")
MISSED = 1e-4
TINY = 1e-15


@dataclass
class Row:
    """What came of one model: for each composite, what is missed and how far apart results are."""

    name: str
    side: int = 0
    chosen: str = "-"
    missed: dict[str, float] = field(default_factory=dict)
    apart: float = 0.0
    unruled: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        missed = " ".join(f"{self.missed.get(name, float('nan')):>9.0e}" for name in COMPOSITES)
        words = "; ".join(self.failures) or ", ".join(self.unruled) or "-"
        found = f"{missed} {self.apart:>8.0e} {self.seconds:>6.1f}  {words}"
        return f"{self.name:<34} {self.side:>4} {self.chosen:<17} {found}"


def check(name: str, model: nn.Module, x: torch.Tensor) -> Row:
    """Ask a model for the relevance of two images ``(2, 3, H, W)`` and hold the answers against
    what is promised."""
    row = Row(name, x.shape[-1])
    before = state(model)
    start = time.perf_counter()
    for composite in COMPOSITES:
        _conserved(row, model, x, composite)
    after = state(model)
    row.failures += [
        f"left behind: {what}" for what, value in before.items() if after[what] != value
    ]
    _apart(row, model.double(), x.double())
    row.seconds = time.perf_counter() - start
    return row


def relevance(model: nn.Module, x: torch.Tensor, composite: str) -> explain.Attribution:
    with warnings.catch_warnings():
        # of operations without a rule; they are in the row
        warnings.simplefilter("ignore", explain.ExplainWarning)
        return explain.attribute(model, x, LRP(composite), target=1)


def _conserved(row: Row, model: nn.Module, x: torch.Tensor, composite: str) -> None:
    a = relevance(model, x, composite)
    assert a.delta is not None
    assert a.coverage is not None
    taken = sum((part.abs() for part in a.coverage.taken.values()), torch.zeros(len(x)))
    row.missed[composite] = float(
        (a.delta.abs() / (a.values.abs().flatten(1).sum(1) + taken)).max()
    )
    row.chosen, row.unruled = a.coverage.composite or "-", sorted(a.coverage.missed)
    if not a.values.isfinite().all():
        row.failures.append(f"{composite}: not finite")
    elif not a.values.any():
        row.failures.append(f"{composite}: zero")
    if not row.missed[composite] <= MISSED:
        row.failures.append(f"{composite}: misses {row.missed[composite]:.0e}")
    if not torch.equal(a.values, relevance(model, x, composite).values):
        row.failures.append(f"{composite}: a second call differs")


def _apart(row: Row, model: nn.Module, x: torch.Tensor) -> None:
    threads = torch.get_num_threads()
    for composite in COMPOSITES:
        together = relevance(model, x, composite).values
        moved = relevance(model, x * (1 + TINY * torch.randn_like(x)), composite).values
        try:
            torch.set_num_threads(3 - min(threads, 2))
            alone = torch.cat([relevance(model, one[None], composite).values for one in x])
        finally:
            torch.set_num_threads(threads)
        apart, by_chance = (
            float((together - other).abs().max() / together.abs().max()) for other in (alone, moved)
        )
        row.apart = max(row.apart, apart)
        if not apart <= 100 * max(by_chance, TINY):
            row.failures.append(
                f"{composite}: an image alone and in a batch are {apart:.0e} apart, by chance "
                f"{by_chance:.0e}"
            )


def examine(subject: Subject) -> Row:
    """Build a model, bring it to life, and check it with two random images."""
    torch.manual_seed(0)
    try:
        model, side = smallest(subject)
        lively(model, subject.inputs(4, side))
        return check(subject.name, model, subject.inputs(2, side))
    except Exception as error:  # whatever it is, it belongs into the table
        return Row(
            subject.name,
            failures=[f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"],
        )


def main(arguments: Sequence[str] | None = None) -> int:
    wanted = subjects((__doc__ or "").splitlines()[0], arguments)
    rows: list[Row] = []
    columns = f"{'missed: E':>9} {'missed: a':>9} {'apart':>8} {'s':>6}  unruled"
    print(f"{'model':<34} {'side':>4} {'automatic':<17} {columns}")
    for subject in wanted:
        rows.append(examine(subject))
        print(rows[-1], flush=True)
        gc.collect()
    failed = [row for row in rows if row.failures]
    print(
        f"\n{len(rows)} models, {len(failed)} with failures, "
        f"{sum(row.seconds for row in rows):.0f} s"
    )
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
