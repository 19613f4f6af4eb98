"""A service with a small network."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from PIL import Image

import explain
from explain.app.requests import Limits
from explain.app.service import Service
from tests.report.conftest import LABELS, PREPROCESS, photo, small

LIMITS = Limits(upload=200_000, pixels=40_000, photos=3, explanations=2, waiting=40, body=2000)


def encoded(picture: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def explainer() -> explain.Explainer:
    return explain.Explainer(small(), LABELS, PREPROCESS)


@pytest.fixture
def service(
    explainer: explain.Explainer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    place = tmp_path_factory.mktemp("examples") / "stripes.png"
    photo().save(place)
    service = Service([explainer], LIMITS, {"stripes.png": place})
    yield service
    service.close()
