"""How much the app takes, keeps and runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds that keep one visitor from using up the machine.

    ``upload`` is how many bytes a photo may have, ``pixels`` how many pixels, both checked before it is decoded.
    ``photos`` and ``kept_pixels`` are how many photos are kept, and of how many pixels together; ``explanations`` and
    ``kept_values`` how many answers can still be saved, and with how many values of maps together; ``age`` is after how
    many seconds without a question about them all of these are forgotten. ``waiting`` is how many questions may wait
    for a model. ``body`` is how many bytes a question may have, ``methods`` and ``targets`` how much it may ask for,
    and ``seconds`` how long a slow method may take.

    >>> Limits().upload
    33554432
    """

    upload: int = 32 * 2**20
    pixels: int = 50_000_000
    photos: int = 64
    kept_pixels: int = 200_000_000
    explanations: int = 48
    kept_values: int = 100_000_000
    age: float = 3600.0
    waiting: int = 64
    body: int = 64 * 2**10
    methods: int = 16
    targets: int = 8
    seconds: float = 120.0
