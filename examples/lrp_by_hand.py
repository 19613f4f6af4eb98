"""What the rules of relevance propagation and of DeepLIFT do, on three neurons, with figures to
work out on paper.

Two inputs, two hidden neurons with ReLUs and biases, one output:

    x = (2, 1)
    h1 = relu( 1 x1 - 1 x2 + 1) = 2        the inputs contribute 2 and -1, the bias 1
    h2 = relu( 1 x1 + 2 x2 - 2) = 2        the inputs contribute 2 and  2, the bias -2
    y  = 3 h1 - 1 h2            = 4        the hidden neurons contribute 6 and -2

Every rule starts with R(y) = y = 4 and shares it out, first between h1 and h2, then between x1 and
x2.

    python examples/lrp_by_hand.py
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
from torch import nn

import explain
from explain.methods import LRP, DeepLIFT
from explain.relevance import (
    AlphaBeta,
    Composite,
    Epsilon,
    Flat,
    Gamma,
    Gradient,
    When,
    WSquare,
    ZBox,
    ZPlus,
)

DENSE = ("dense",)


def network() -> nn.Module:
    hidden = nn.Linear(2, 2)
    out = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        hidden.weight.copy_(torch.tensor([[1.0, -1.0], [1.0, 2.0]]))
        hidden.bias.copy_(torch.tensor([1.0, -2.0]))
        out.weight.copy_(torch.tensor([[3.0, -1.0]]))
    return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), out)


# Rule, how it shares out the 4, and how the input gets its part; all with epsilon 0 but where it
# says otherwise.
RULES: dict[str, tuple[Any, str]] = {
    "gradient": (
        Gradient(),
        "y: 6, -2 of 4: R(h) = (6, -2). h1: 2, -1 of 2; h2: 2, 2 of 2. The biases take 3 and 2",
    ),
    "epsilon 1": (
        Epsilon(1.0, absolute=True),
        "as above, but each sum is larger by 1: R(h) = (4.8, -1.6), then 2/3 and -1/3, 2/3 and 2/3",
    ),
    "z+": (
        ZPlus(0.0),
        "positive contributions alone: R(h) = (4, 0). h1: 2 of 2 + 1, where 1 is the bias",
    ),
    "z+ without biases": (ZPlus(0.0, bias=False), "R(h) = (4, 0). h1: 2 of 2: x1 has it all"),
    "alpha 2 beta 1": (
        AlphaBeta(2, 1, 0.0),
        (
            "R(h) = 2 (4, 0) - (0, 4) = (8, -4). h1: 2 * 8 * 2/3 to x1, -8 to x2; h2: -2 * 4 * 1/2 to "
            "each"
        ),
    ),
    "gamma 1": (
        Gamma(1.0, 0.0),
        (
            "positive contributions twice: 12, -2 of 10: R(h) = (4.8, -0.8). h1: 4, -1 of 5; h2: 4, 4 "
            "of 6"
        ),
    ),
    "w2 at the input": (
        WSquare(0.0),
        "after the gradient's (6, -2): by squares 1, 1 of 2; 1, 4 of 5",
    ),
    "flat at the input": (Flat(0.0), "after the gradient's (6, -2): half each, whatever x and w"),
    "zB in [0, 2] at the input": (
        ZBox((0.0,), (2.0,), 0.0),
        "after the gradient's (6, -2): h1: 2, -1 + 2 of 3; h2: 2, 2 of 4",
    ),
}


# DeepLIFT compares with a baseline, here (-1, 0), where h1 = relu(0) = 0, h2 = relu(-3) = 0 and y =
# 0. So it shares out the change of y from 0 to 4 among the changes of the input, 3 and 1.
RESCALE = """h1 rises from 0 to 2 as its sum does: slope 1; h2 from 0 to 2 as its sum rises by 5: slope 0.4.
    x1: 3 * (3 * 1 - 1 * 0.4), x2: 1 * (3 * -1 - 1 * 0.4 * 2)"""


def composite(rule: Any) -> Composite:
    """The rule everywhere, or one for the input below the plain gradient."""
    if isinstance(rule, (WSquare, Flat, ZBox)):
        return Composite(
            "at the input", ((When(DENSE, first=True), rule), (When(DENSE), Gradient()))
        )
    return Composite("everywhere", ((When(DENSE), rule),))


def main() -> None:
    """Print the relevance of the two inputs under every rule, and their shares of a difference."""
    model = network()
    x = torch.tensor([2.0, 1.0]).reshape(1, 2, 1, 1)
    print((__doc__ or "").split("\n\n    python")[0])
    for name, (rule, how) in RULES.items():
        with warnings.catch_warnings():
            # one of 1 is meant to take much
            warnings.filterwarnings("ignore", ".*epsilon", explain.ExplainWarning)
            a = explain.attribute(
                model, x, LRP(composite(rule)), target=lambda output: output[:, 0]
            )
        one, two = a.values.flatten().tolist()
        assert a.coverage is not None
        taken = {
            cause: round(float(part), 3) + 0.0
            for cause, part in a.coverage.taken.items()
            if abs(part) > 1e-6
        }
        told = (
            ", ".join(f"{cause} took {part:g}" for cause, part in taken.items())
            or "nothing was taken"
        )
        print(f"\n{name}: R(x1) = {one:.4g}, R(x2) = {two:.4g}; {told}\n    {how}")
    baseline = torch.tensor([-1.0, 0.0]).reshape(2, 1, 1)
    a = explain.attribute(model, x, DeepLIFT(baseline), target=lambda output: output[:, 0])
    one, two = a.values.flatten().tolist()
    print(f"\nrescale: C(x1) = {one:.4g}, C(x2) = {two:.4g}; they add up to 4\n    {RESCALE}")


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
