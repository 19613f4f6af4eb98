"""The step of Muon: an update made orthogonal."""

from __future__ import annotations

import torch


def orthogonal(matrix: torch.Tensor, rounds: int = 3) -> torch.Tensor:
    """Push the singular values of a matrix towards one, with the quintic Newton-Schulz iteration of
    Muon."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return (x.T if tall else x).float()
