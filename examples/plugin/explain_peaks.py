"""A plug-in: installed, its method, metric, baseline, composite and command are found by their
names."""

from __future__ import annotations

from typing import Any

import click
import torch

from explain.baselines.base import Baseline
from explain.baselines.base import register as register_baseline
from explain.cli.commands import commands, json
from explain.engine.needs import Evidence
from explain.methods.base import Citation
from explain.methods.base import register as register_method
from explain.methods.cam import ClassActivationMap, weighted_maps
from explain.metrics import MapMetric, MetricResult
from explain.metrics import register as register_metric
from explain.relevance import COMPOSITES, Composite, Gamma, When


@register_method
class PeakCAM(ClassActivationMap):
    """Feature maps weighted by their largest gradient."""

    source = Citation("doe2026peak", "Doe, Jane", "Peak CAM", 2026, "Venue", shorthand="Doe, 2026")

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        weights = evidence.gradients.flatten(2).amax(2)
        return weighted_maps(weights, evidence, relu=True)


@register_metric
class TopShare(MapMetric):
    """Share of the map's magnitudes in its brightest pixels."""

    pixels: int = 10
    paper = "Doe, 2026"
    better = "more"

    def __call__(self, data: Any) -> MetricResult:
        sizes = data.maps.per_pixel("own").abs().flatten(1)
        return MetricResult(sizes.topk(self.pixels).values.sum(1) / sizes.sum(1))


@register_baseline
class Brightest(Baseline):
    """The largest value of each channel."""

    def replacement(self, images: torch.Tensor) -> torch.Tensor:
        return images.amax((2, 3), keepdim=True).expand_as(images)


COMPOSITES["Peaks"] = Composite("Peaks", ((When(("convolution", "dense")), Gamma(10)),))


@commands.command("peaks", key="peaks", epilog="Example: explain peaks")
@json
@click.pass_obj
def list_peaks(answer: Any) -> None:
    """List what this plug-in adds."""
    for name in ("peakcam", "topshare", "lrp(composite=Peaks)"):
        answer.add(name, [name])
