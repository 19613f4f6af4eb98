"""Measure tiny-clip: zero-shot accuracy on the validation photos of Tiny-ImageNet.

    python examples/tiny_clip/evaluate.py work/ [--write]

``work/`` has what `prepare.py` computed. No template is one that was trained with, and half of
their words are not in the vocabulary. With ``--write``, the figures go to ``measured.json`` beside
this script, which the tests compare with the model card.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from train import phrases, read, templates

from explain.models import load
from explain.models.bundled import SHA256, TINY_CLIP, WEIGHTS, TinyCLIP

WRITTEN = Path(__file__).with_name("measured.json")
NEW = (
    "a snapshot showing a {}",
    "can you spot the {} here",
    "my holiday picture: {}",
    "the {} in question",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path, help="the folder that prepare.py wrote to")
    parser.add_argument("--write", action="store_true", help=f"also write {WRITTEN.name}")
    options = parser.parse_args()
    assert not set(NEW) & set(templates())
    features, labels = read(options.work / "validation.npz")
    model = load(TINY_CLIP).model
    assert isinstance(model, TinyCLIP)
    names = [row[0] for row in phrases()]
    rows = phrases()
    with torch.inference_mode():
        photos = F.normalize(model.image_projection(features), dim=-1)
        own = load("tiny-transformer").model.head(features)

    def logits(texts: list[str]) -> torch.Tensor:
        assert model.tokenizer is not None
        with torch.inference_mode():
            return photos @ F.normalize(model.encode_text(model.tokenizer(texts)), dim=-1).T

    def top(scores: torch.Tensor, count: int = 1) -> str:
        return f"{float((scores.topk(count).indices == labels[:, None]).any(1).float().mean()):.2%}"

    new = [logits([template.format(name) for name in names]) for template in NEW]
    alone = [float((each.argmax(1) == labels).float().mean()) for each in new]
    described = [next(text for text in row[1:] if len(text.split()) > 3) for row in rows]
    found = {
        "photos": f"{len(labels):,}",
        "top-1, names alone": top(logits(names)),
        "top-1, new templates, mean": f"{sum(alone) / len(alone):.2%}",
        "top-1, new templates, worst": f"{min(alone):.2%}",
        "top-5, new templates together": top(torch.stack(new).mean(0), 5),
        "top-1, a description it was trained with": top(logits(described)),
        "top-1, tiny-transformer with its own head": top(own),
        "size": f"{WEIGHTS.stat().st_size / 1e6:.2f} MB",
        "sha256": SHA256,
    }
    for name, value in found.items():
        print(f"{name:<42} {value}")
    if options.write:
        WRITTEN.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
