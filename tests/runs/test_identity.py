"""What a run has already is known by its content: photos, labels, preprocessing and model, not by
names alone."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import explain
from explain import ExplainError, RunError
from explain.models import Classifier
from explain.store.identity import model_identity
from explain.store.manifest import must_agree
from tests.conftest import TinyNet, settled
from tests.runs.networks import as_it_is, explainer, folder_of, picture, stored_run
from tests.store.test_sources import Items

METHODS = ["gradcam", "saliency"]


def go(
    source: Any, tmp_path: Path, model_explainer: explain.Explainer | None = None, **options: Any
) -> explain.Run:
    return stored_run(tmp_path, source, model_explainer, METHODS, **{"target": 1, **options})


def assert_is_of(
    run: explain.Run,
    photos: dict[str, Image.Image],
    model_explainer: explain.Explainer | None = None,
) -> None:
    """Each row is what its photo gives alone, and no photo is missing."""
    model_explainer = model_explainer or explainer()
    rows = list(run.rows())
    assert sorted((row.name, row.method) for row in rows) == sorted(
        (n, m) for n in photos for m in METHODS
    )
    for row in rows:
        alone = explain.attribute(
            model_explainer.model,
            model_explainer.preprocess(photos[row.name])[None],
            row.method,
            target=1,
        )
        torch.testing.assert_close(row.values, alone.values[0], rtol=1e-3, atol=1e-6)


def named(*numbers: int, word: str = "photo") -> dict[str, Image.Image]:
    return {f"{word} {place}": picture(number) for place, number in enumerate(numbers)}


SOURCES: dict[str, Callable[[list[int]], Any]] = {
    "iterator": lambda numbers: map(picture, numbers),
    "array": lambda numbers: Items(
        [as_it_is(picture(number)).mul(255).byte() for number in numbers]
    ),
}


@pytest.mark.parametrize(("kind", "workers"), [("iterator", 1), ("array", 0)])
def test_other_pictures_of_equal_count_are_refused_and_what_is_there_is_kept(
    kind: str, workers: int, tmp_path: Path
) -> None:
    word = "item" if kind == "array" else "photo"
    go(SOURCES[kind]([0, 1, 2]), tmp_path)
    for other in ([0, 1, 5], [1, 0, 2]):
        with pytest.raises(RunError, match="photo"):
            go(SOURCES[kind](other), tmp_path, workers=workers)
    run = go(SOURCES[kind]([0, 1, 2]), tmp_path, workers=workers)
    assert_is_of(run, named(0, 1, 2, word=word))


def test_pictures_of_another_shape_with_the_same_bytes_are_others(tmp_path: Path) -> None:
    content = picture(0).resize((24, 20)).tobytes()
    go([Image.frombytes("RGB", (24, 20), content)], tmp_path)
    with pytest.raises(RunError, match="photo"):
        go([Image.frombytes("RGB", (20, 24), content)], tmp_path)


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
    folder = folder_of(tmp_path / "photos", 0)
    for number in range(3):
        picture(number).save(folder / f"{number}.bmp")
    go(folder, tmp_path)
    status = os.stat(folder / "1.bmp")
    picture(9).save(folder / "1.bmp")
    os.utime(folder / "1.bmp", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert os.stat(folder / "1.bmp").st_size == status.st_size
    run = go(folder, tmp_path)
    assert_is_of(run, {"0.bmp": picture(0), "1.bmp": picture(9), "2.bmp": picture(2)})


@pytest.mark.parametrize("kind", ["picture", "csv"])
def test_a_label_or_box_that_has_changed_is_noticed(kind: str, tmp_path: Path) -> None:
    model_explainer = explainer(categories=list("abcde"))
    folder_of(tmp_path / "photos", 1)

    def source(label: str, edge: int) -> Any:
        if kind == "csv":
            (tmp_path / "list.csv").write_text(
                f"path,label,x0,y0,x1,y1\nphotos/000.png,{label},0,0,{edge},5\n"
            )
            return tmp_path / "list.csv"
        return [(picture(0), label)]

    assert {row.label for row in go(source("a", 5), tmp_path, model_explainer).rows()} == {"a"}
    assert {row.label for row in go(source("b", 5), tmp_path, model_explainer).rows()} == {"b"}
    if kind == "csv":
        assert {row.boxes for row in go(source("b", 7), tmp_path, model_explainer).rows()} == {
            ((0.0, 0.0, 7.0, 5.0),)
        }


def assert_alike(one: explain.Explainer, other: explain.Explainer, alike: bool) -> None:
    """Whether a run of one can be continued with the other."""
    with nullcontext() if alike else pytest.raises(RunError, match="continued"):
        must_agree(model_identity(one), model_identity(other), "run.sqlite")


@pytest.mark.parametrize(
    "other",
    [
        lambda image: as_it_is(image) * 2,
        lambda image: as_it_is(image) + 1e-3,
        lambda image: as_it_is(image).flip(0),
        lambda image: 1 / 0,
    ],
)
def test_another_preprocessing_is_refused(other: Any) -> None:
    model = settled(TinyNet()).eval()
    one, same = (
        explain.Explainer(model, preprocess=lambda image: as_it_is(image)) for _ in range(2)
    )
    assert_alike(one, same, True)
    assert_alike(one, explain.Explainer(model, preprocess=other), False)


class Attributes(TinyNet):
    """A network with attributes outside its ``state_dict``, and a counter."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.scale = 1.0
        self.factor = torch.ones(5)
        self.function = None
        self.register_buffer("hidden", torch.zeros(5), persistent=False)
        self.calls = 0
        self.shapes: list[Any] = []
        vars(self).update(options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.shapes.append(x.shape)
        scores = super().forward(x) * self.scale * self.factor + self.hidden
        if self.function is not None:
            scores = self.function(scores)
        return scores


def changed(change: Callable[[Any], Any]) -> nn.Module:
    model = settled(Attributes()).eval()
    change(model)
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "scale", 2.0),
        lambda model: setattr(model, "function", torch.sigmoid),
        lambda model: setattr(model.bn1, "eps", 1e-2),
        lambda model: setattr(model.relu, "inplace", False),
        lambda model: model.hidden.add_(0.1),
        lambda model: (
            model.fc.register_forward_hook(lambda module, inputs, output: output * 2) and None
        ),
    ],
)
def test_an_attribute_outside_the_state_dict_that_has_changed_is_refused(change: Any) -> None:
    plain = changed(lambda model: None)
    assert plain.state_dict().keys() == settled(TinyNet()).state_dict().keys()
    assert_alike(explainer(plain), explainer(changed(change)), False)


def test_another_temperature_is_refused() -> None:
    model = settled(TinyNet()).eval()
    one, other = (
        explain.Explainer(Classifier(model, as_it_is, list("abcde"), "net", t)) for t in (1.0, 2.0)
    )
    assert_alike(one, other, False)


def test_a_target_of_the_callers_own_cannot_be_compared_and_is_refused(tmp_path: Path) -> None:
    run = go([picture(0)], tmp_path, target=lambda scores: scores[:, 0] - scores[:, 1])
    assert run.photos == 1
    with pytest.raises(RunError, match="targets"):
        go([picture(0), picture(1)], tmp_path, target=lambda scores: scores[:, 2] - scores[:, 3])


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
        f"ATTACH '{tmp_path / 'model_explainer.sqlite'}' AS other",
        f"VACUUM INTO '{tmp_path / 'model_explainer.sqlite'}'",
        "PRAGMA journal_mode = DELETE",
        "PRAGMA query_only = OFF",
        "DELETE FROM photos",
        "CREATE TABLE cats (name)",
        "DROP TABLE photos",
        "BEGIN IMMEDIATE",
    ):
        with pytest.raises(ExplainError, match="run"):
            list(run.query(statement))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.sqlite"]
    assert run.path.read_bytes() == content
    assert list(
        run.query(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION SELECT i + 1 FROM n WHERE i < 3) "
            "SELECT max(i), upper('a') FROM n"
        )
    ) == [(3, "A")]
    assert len(list(run.query("SELECT * FROM explained"))) == 2
