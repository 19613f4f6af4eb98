"""A photo with a mark and two decoys, and what some methods say of it."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.figure import Figure
from PIL import Image

import explain

METHODS = ["gradcam", "layercam", "lrp", "integratedgradients", "occlusion", "guidedbackprop", "eigencam", "randomcam"]
PHOTO = Path(__file__).resolve().parents[1] / "assets" / "chelsea.png"


def maps(results: Path) -> Figure | None:
    """Draw them with the model of one mark; None where it was not trained here."""
    from planted_evidence import CLASSES, SIDE, CenterCrop, load, network, planted, replace

    file = results / "marks-1.pt"
    if not file.exists():
        return None
    base = load("tiny")
    assert isinstance(base.preprocess, CenterCrop)
    look = replace(base.preprocess, side=SIDE, crop=1.0)
    model = network(base, list(range(CLASSES)), 1)
    model.load_state_dict(torch.load(file, weights_only=True))
    model.requires_grad_(False)
    with Image.open(PHOTO) as opened:
        photo = look(opened.convert("RGB"))
    scene = planted(photo, [0], 2, look, torch.Generator().manual_seed(4))
    found = explain.attribute(model, scene.x[None], METHODS, target=CLASSES)
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (look.mean, look.std))
    shown = (scene.x * std + mean).clamp(0, 1).permute(1, 2, 0).numpy()
    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(2, (len(METHODS) + 2) // 2).flatten()
    for axes in panels:
        axes.axis("off")
    panels[0].imshow(shown)
    panels[0].set_title("the mark (framed) decides,\nthe two decoys do not", fontsize=9)
    for axes, (name, each) in zip(panels[1:], found.items(), strict=False):
        axes.imshow(shown.mean(2), cmap="gray", alpha=0.6)
        axes.imshow(each.heatmap[0].numpy(), cmap="magma", alpha=0.75, vmin=0, vmax=1)
        axes.set_title(name, fontsize=9)
    rows, columns = (scene.marks[0].any(dim).nonzero().flatten() for dim in (1, 0))
    for axes in panels[: len(METHODS) + 1]:
        low, left = int(rows[0]) - 0.5, int(columns[0]) - 0.5
        axes.plot(
            [left, left + len(columns), left + len(columns), left, left],
            [low, low, low + len(rows), low + len(rows), low],
            color="#00e5ff", linewidth=1.2,
        )  # fmt: skip
    return figure
