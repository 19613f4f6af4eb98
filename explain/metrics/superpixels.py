"""Pieces of a photo of one colour and place: simple linear iterative clustering (SLIC)."""

from __future__ import annotations

import torch


def superpixels(images: torch.Tensor, count: int, compactness: float = 1.0, rounds: int = 5) -> torch.Tensor:
    """Cut photos into about ``count`` pieces of like colour: ``(N, H, W)`` whole numbers from 0, without gaps.

    Every pixel goes to the nearest of the nine centres around it, in colour and place together; then each centre moves
    to the mean of its pixels, ``rounds`` times. Colours are measured in each photo's own deviation, and places in
    widths of a piece times ``compactness``. A piece need not hang together.

    Achanta et al., "SLIC Superpixels Compared to State-of-the-Art Superpixel Methods", TPAMI 2012; the colours here are
    those of the model's input.

    >>> two = torch.zeros(1, 3, 4, 8)
    >>> two[..., 4:] = 1.0
    >>> superpixels(two, 2)[0, 0]
    tensor([0, 0, 0, 0, 1, 1, 1, 1])
    """
    return torch.stack([_of_photo(image.float(), count, compactness, rounds) for image in images])


def _of_photo(photo: torch.Tensor, count: int, compactness: float, rounds: int) -> torch.Tensor:
    height, width = photo.shape[1:]
    side = max(1.0, (height * width / count) ** 0.5)
    down, across = max(1, round(height / side)), max(1, round(width / side))
    rows, columns = (torch.arange(length, device=photo.device) for length in (height, width))
    own = (rows * down // height)[:, None], (columns * across // width)[None]
    centred = photo - photo.mean((1, 2), keepdim=True)
    colours = centred / centred.pow(2).mean().sqrt().clamp(min=torch.finfo(photo.dtype).tiny)
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij")).to(photo) * (compactness / side)
    features = torch.cat([colours, places]).flatten(1)  # (F, H * W)
    labels = (own[0] * across + own[1]).flatten()
    for _ in range(rounds):
        labels = _nearest(features, _centres(features, labels, down * across), own, (down, across))
    return torch.unique(labels, return_inverse=True)[1].reshape(height, width)  # type: ignore[no-any-return]


def _centres(features: torch.Tensor, labels: torch.Tensor, count: int) -> torch.Tensor:
    """The mean of each piece's pixels ``(F, count)``; one without pixels is out of reach."""
    sums = features.new_zeros(len(features), count).index_add_(1, labels, features)
    sizes = torch.bincount(labels, minlength=count)
    return torch.where(sizes > 0, sums / sizes.clamp(min=1), 1e6)


def _nearest(
    features: torch.Tensor, centres: torch.Tensor, own: tuple[torch.Tensor, torch.Tensor], cells: tuple[int, int]
) -> torch.Tensor:
    best = features.new_full((features.shape[1],), torch.inf)
    labels = torch.zeros_like(best, dtype=torch.long)
    for below in (-1, 0, 1):
        for beside in (-1, 0, 1):
            row, column = (own[0] + below).clamp(0, cells[0] - 1), (own[1] + beside).clamp(0, cells[1] - 1)
            candidate = (row * cells[1] + column).flatten()
            distance = (features - centres[:, candidate]).pow(2).sum(0)
            labels = torch.where(distance < best, candidate, labels)
            best = torch.minimum(best, distance)
    return labels
