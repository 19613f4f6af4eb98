"""The small classifier and the photos of the metrics' tests."""

from tests.metrics.conftest import model, photos

__all__ = ["model", "photos"]
