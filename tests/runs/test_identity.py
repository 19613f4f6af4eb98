"""What a run has already is known by its content: photos, labels, preprocessing and model, not by
names alone."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import explain
from explain import ExplainError, RunError
from explain.models import Classifier
from explain.store.identity import model_identity
from explain.store.manifest import must_agree
from tests.conftest import TinyNet, settled
from tests.runs.networks import as_it_is, contents, explainer, folder_of, picture, stored_run
from tests.store.test_sources import Items

METHODS = ["gradcam", "saliency"]


def go(
    source: Any, tmp_path: Path, model_explainer: explain.Explainer | None = None, **options: Any
) -> explain.Run:
    return stored_run(tmp_path, source, model_explainer, METHODS, **{"target": 1, **options})


def assert_is_of(run: explain.Run, photos: dict[str, Image.Image]) -> None:
    """Each row is what its photo gives alone, and no photo is missing."""
    rows = contents(run)
    assert rows.keys() == {(name, method, "class 1") for name in photos for method in METHODS}
    for row in rows.values():
        x = as_it_is(photos[row.name])[None]
        alone = explain.attribute(explainer().model, x, row.method, target=1)
        torch.testing.assert_close(row.values, alone.values[0], rtol=1e-3, atol=1e-6)


def turned(number: int) -> Image.Image:
    """A picture of another shape with the same bytes."""
    photo = picture(number)
    return Image.frombytes("RGB", photo.size[::-1], photo.tobytes())


@pytest.mark.long
@pytest.mark.parametrize(("kind", "workers"), [("photo", 1), ("item", 0)])
def test_other_pictures_of_equal_count_are_refused_and_what_is_there_is_kept(
    kind: str, workers: int, tmp_path: Path
) -> None:
    def source(photos: list[Image.Image]) -> Any:
        return iter(photos) if kind == "photo" else Items(list(map(np.asarray, photos)))

    photos = list(map(picture, range(3)))
    go(source(photos), tmp_path)
    for others in ([*photos[:2], picture(5)], photos[::-1], [*photos[:2], turned(2)]):
        with pytest.raises(RunError, match="photo"):
            go(source(others), tmp_path, workers=workers)
    run = go(source(photos), tmp_path, workers=workers)
    assert_is_of(run, {f"{kind} {number}": photo for number, photo in enumerate(photos)})


class Files(Items):
    """A data set that knows its files, as torchvision's have it, and transforms what is in them."""

    def __init__(self, paths: list[Path], transform: Callable[[Image.Image], Any]) -> None:
        super().__init__(paths, samples=[(path, 0) for path in paths])
        self.transform = transform

    def __getitem__(self, place: int) -> Any:
        with Image.open(self.items[place]) as opened:
            return self.transform(opened.convert("RGB")), 0


def test_a_data_set_with_another_transform_is_another_source(tmp_path: Path) -> None:
    paths = sorted(folder_of(tmp_path / "photos", 2).iterdir())
    go(Files(paths, as_it_is), tmp_path)
    with pytest.raises(RunError, match="photo"):
        go(Files(paths, lambda image: as_it_is(image).flip(-1)), tmp_path)
    picture(7).save(paths[1])  # a file that has changed is explained again
    run = go(Files(paths, as_it_is), tmp_path)
    assert_is_of(run, {str(paths[0]): picture(0), str(paths[1]): picture(7)})


def test_a_file_that_was_replaced_with_its_size_and_time_kept_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "photos" / "a.bmp"
    file.parent.mkdir()
    picture(0).save(file)
    go(file.parent, tmp_path)
    status = file.stat()
    picture(9).save(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size
    assert_is_of(go(file.parent, tmp_path), {"a.bmp": picture(9)})


def test_a_label_or_box_that_has_changed_is_noticed(tmp_path: Path) -> None:
    network = explainer(categories=list("abcde"))
    folder_of(tmp_path / "photos", 1)
    file = tmp_path / "list.csv"
    for label, edge in (("a", 5), ("b", 5), ("b", 7)):
        file.write_text(f"path,label,x0,y0,x1,y1\nphotos/000.png,{label},0,0,{edge},5\n")
        row = next(go(file, tmp_path, network).rows())
        assert (row.label, row.boxes) == (label, ((0.0, 0.0, edge, 5.0),))
        picture_run = go([(picture(0), label)], tmp_path, network, name="picture.sqlite")
        assert next(picture_run.rows()).label == label


def assert_alike(one: explain.Explainer, other: explain.Explainer, alike: bool) -> None:
    """Whether a run of one can be continued with the other."""
    with nullcontext() if alike else pytest.raises(RunError, match="continued"):
        must_agree(model_identity(one), model_identity(other), "run.sqlite")


PREPROCESSINGS: list[Any] = [  # of one name
    lambda image: as_it_is(image),
    lambda image: as_it_is(image) + 1e-3,
    lambda image: as_it_is(image).flip(0),
    lambda image: 1 / 0,
]


@pytest.mark.parametrize("other", PREPROCESSINGS)
def test_another_preprocessing_is_refused(other: Any) -> None:
    model = settled(TinyNet()).eval()
    one = explain.Explainer(model, preprocess=lambda image: PREPROCESSINGS[0](image))
    other_explainer = explain.Explainer(model, preprocess=lambda image: other(image))
    assert_alike(one, other_explainer, other is PREPROCESSINGS[0])


class Attributes(TinyNet):
    """A network with attributes outside its ``state_dict``, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.function = torch.nn.functional.hardtanh
        self.register_buffer("hidden", torch.zeros(5), persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.function(super().forward(x) * self.scale + self.hidden)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "scale", 2.0),
        lambda model: setattr(model, "function", torch.sigmoid),
        lambda model: setattr(model.bn1, "eps", 1e-2),
        lambda model: setattr(model.relu, "inplace", False),
        lambda model: model.hidden.add_(0.1),
        lambda model: model.fc.register_forward_hook(lambda module, inputs, output: output * 2),
    ],
)
def test_an_attribute_outside_the_state_dict_that_has_changed_is_refused(change: Any) -> None:
    plain, same, changed = (settled(Attributes()).eval() for _ in range(3))
    change(changed)
    plain(torch.rand(1, 3, 8, 8))
    assert_alike(explainer(plain), explainer(same), True)
    assert_alike(explainer(plain), explainer(changed), False)


def test_another_temperature_is_refused() -> None:
    model = settled(TinyNet()).eval()
    one, other = (
        explain.Explainer(Classifier(model, as_it_is, [*"abcde"], "net", temperature))
        for temperature in (1.0, 2.0)
    )
    assert_alike(one, other, False)


def test_a_target_of_the_callers_own_cannot_be_compared_and_is_refused(tmp_path: Path) -> None:
    go([picture(0)], tmp_path, target=lambda scores: scores[:, 0] - scores[:, 1])
    with pytest.raises(RunError, match="targets"):
        go([picture(0)], tmp_path, target=lambda scores: scores[:, 2] - scores[:, 3])


def test_a_run_of_another_version_is_refused(tmp_path: Path) -> None:
    file = go([picture(0)], tmp_path).path
    with closing(sqlite3.connect(file)) as db:
        db.execute("PRAGMA user_version = 99")
    for call in (lambda: explain.open_run(file), lambda: go([picture(0)], tmp_path)):
        with pytest.raises(RunError, match="got 99; update this package"):
            call()


def test_asking_in_sql_makes_and_changes_no_file(tmp_path: Path) -> None:
    run = go([picture(0)], tmp_path)
    content = run.path.read_bytes()
    for statement in (
        f"ATTACH '{tmp_path / 'other.sqlite'}' AS other",
        f"VACUUM INTO '{tmp_path / 'other.sqlite'}'",
        "PRAGMA query_only = OFF",
        "DELETE FROM photos",
        "BEGIN IMMEDIATE",
    ):
        with pytest.raises(ExplainError, match="run"):
            list(run.query(statement))
    assert [path.name for path in tmp_path.iterdir()] == ["run.sqlite"]
    assert run.path.read_bytes() == content
    assert len(list(run.query("SELECT * FROM explained"))) == 2
