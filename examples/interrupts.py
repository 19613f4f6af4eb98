"""Interrupt explanations with real signals at random times, and count those that left any damage.

    python examples/interrupts.py --signals 5000 --seed 0

Each signal comes at a random time to a call drawn at random: methods by `attribute`,
`hooks.capture`, `HookGroup`, `FeatureExtractor`, `inspect`, `intervene`, `trace` and `Explainer`,
on a ResNet, a chain of 300 modules, and small networks, partly frozen and with dropout. It is a
SIGINT (Ctrl-C), a SIGINT with a handler that raises something else, or a SIGALRM with one that
raises (a time limit). Afterwards everything is compared with what it was before: modes, hooks,
parameters, ``.grad``, random numbers, the settings of torch, warning filters, handlers of signals,
and what the package counts itself. At the end every call must give the values that it gave at
first. The exit code is 1 if anything was damaged.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# the networks and checks lie with the tests
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torchvision

from tests import interruptions
from tests.interruptions import Tally


def show(tally: Tally) -> None:
    if tally.sent % 250 == 0 and sys.stderr.isatty():
        print(
            f"\r{tally.sent} signals, {len(tally.damaged)} damaged",
            end="",
            file=sys.stderr,
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--signals", type=int, default=5000, help="how many signals to send (5000)")
    parser.add_argument("--seed", type=int, default=0, help="which calls and times are drawn (0)")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    photos = torch.rand(2, 3, 16, 16)
    larger = torch.rand(1, 3, 48, 48)
    resnet = torchvision.models.resnet18(num_classes=5).train()
    calls = [
        *interruptions.calls_of("a small network", interruptions.small(), photos),
        *interruptions.calls_of(
            "a chain of 300 modules", interruptions.deep(), photos[:1], ["gradcam", "saliency"]
        ),
        *interruptions.calls_of(
            "resnet18", resnet, larger, ["gradcam", "saliency", "guidedbackprop"]
        ),
        *interruptions.calls_of_explainer(),
        *interruptions.calls_of_interventions(),
    ]
    tally = interruptions.interrupt_often(calls, options.signals, options.seed, show)
    print(
        f"{tally.sent} signals to {len(calls)} calls; {tally.in_time} ended a call before it was "
        "done"
    )
    wrong = {"damaged": tally.damaged, "lost": tally.lost, "twice": tally.twice}
    for kind, found in wrong.items():
        print(f"{kind}: {len(found)}", *found, sep="\n  ")
    return 1 if any(wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
