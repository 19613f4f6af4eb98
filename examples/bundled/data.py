"""Tiny-ImageNet in its usual folder layout, decoded once into memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 64


def classes(folder: Path) -> list[str]:
    """Return the WordNet ids of the 200 classes, in the order of ``wnids.txt``."""
    return (folder / "wnids.txt").read_text().split()


def words(folder: Path) -> dict[str, str]:
    """Return the dictionary words of each WordNet id."""
    lines = (folder / "words.txt").read_text().splitlines()
    return dict(line.split("\t", 1) for line in lines)


def training_files(folder: Path) -> list[tuple[Path, int]]:
    """Return every training image with its class."""
    return [
        (path, label)
        for label, wnid in enumerate(classes(folder))
        for path in sorted((folder / "train" / wnid / "images").iterdir())
    ]


def validation_files(folder: Path) -> list[tuple[Path, int]]:
    """Return every validation image with its class."""
    labels = {wnid: label for label, wnid in enumerate(classes(folder))}
    rows = [
        line.split("\t")
        for line in (folder / "val" / "val_annotations.txt").read_text().splitlines()
    ]
    return [(folder / "val" / "images" / row[0], labels[row[1]]) for row in rows]


def decode(files: list[tuple[Path, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels ``(N, 64, 64, 3)`` as uint8, and the labels ``(N,)``."""
    pixels = np.empty((len(files), SIDE, SIDE, 3), np.uint8)
    for i, (path, _) in enumerate(files):
        with Image.open(path) as image:
            pixels[i] = np.asarray(image.convert("RGB"))
    return pixels, np.array([label for _, label in files])
