"""A run: each photo once with all its results, the same as alone; continued, refused, and what
fails is listed."""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import explain
from explain import LayerError, MethodError, ModelError, RunError
from explain.data.boxes import locate
from explain.methods import GradCAM
from explain.metrics import evaluate
from explain.runs.runner import State
from explain.store.writing import packed, unpacked
from tests.conftest import TinyNet, settled, snapshot
from tests.runs.networks import (
    as_it_is,
    assert_same,
    contents,
    explainer,
    folder_of,
    picture,
    stored_run,
)

METHODS = ["gradcam", "saliency"]


def test_a_run_keeps_where_cells_look_and_rows_without_it_are_drawn_evenly(tmp_path: Path) -> None:
    convolutions = [torch.nn.Conv2d(3, 4, 3, 2, 1), torch.nn.Conv2d(4, 4, 3, 2, 1)]
    end = [torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
    model = settled(torch.nn.Sequential(*convolutions, *end, torch.nn.Linear(4, 5))).eval()
    network = explain.Explainer(model, categories=list("abcde"), preprocess=as_it_is)
    photo = picture(0, (32, 32))
    for placement in ("cells", "even"):
        folder = tmp_path / placement
        folder.mkdir()
        run = stored_run(folder, [photo], network, ["gradcam"], placement=placement)
        (row,) = run.rows()
        alone = explain.attribute(
            model, as_it_is(photo)[None], target=row.target_class, placement=placement
        )
        torch.testing.assert_close(row.heatmap, alone.heatmap[0], rtol=2e-3, atol=1e-3)
        old = replace(row, columns={**row.columns, "shape": str(list(row.values.shape))})
        even = explain.attribute(
            model, as_it_is(photo)[None], target=row.target_class, placement="even"
        )
        torch.testing.assert_close(old.heatmap, even.heatmap[0], rtol=2e-3, atol=1e-3)


def test_each_row_is_what_the_photo_gives_alone(tmp_path: Path) -> None:
    photos = [picture(number, (24, 20) if number % 3 else (20, 28)) for number in range(7)]
    network = explainer(categories=list("abcde"))
    state = snapshot(network.model)
    run = stored_run(tmp_path, photos, network, METHODS, targets=[None, "b"])
    assert snapshot(network.model) == state
    wanted = set()
    for row in run.rows():
        photo = photos[int(row.name.split()[1])]
        x = as_it_is(photo)[None]
        alone = explain.attribute(network.model, x, row.method, target=row.target_class)
        torch.testing.assert_close(row.values, alone.values[0], rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(row.heatmap, alone.heatmap[0], rtol=2e-3, atol=1e-3)
        probabilities = network.model(x)[0].softmax(0).tolist()
        top = max(range(5), key=probabilities.__getitem__)
        figures = [row.score, row.probability, row.prediction_probability]
        expected = [alone.score.item(), probabilities[row.target_class], probabilities[top]]
        assert figures == pytest.approx(expected, rel=1e-5)
        assert (row.layer, row.prediction, row.prediction_class) == (alone.layer, "abcde"[top], top)
        assert row.sha256 == hashlib.sha256(photo.tobytes()).hexdigest()
        place = (row.size, row.input_size, row.box)
        assert place == (photo.size, photo.size[::-1], locate(as_it_is, photo.size))
        # where the prediction is b, both targets are one row
        wanted |= {
            (row.name, method, target) for method in METHODS for target in ("abcde"[top], "b")
        }
    assert contents(run).keys() == wanted
    assert (len(run), run.photos, run.methods) == (len(wanted), 7, METHODS)
    assert (run.failures, run.ended) == ({}, True)


def test_maps_are_stored_in_half_precision_with_a_scale() -> None:
    values = np.random.default_rng(0).standard_normal((3, 8, 9)).astype(np.float32) * 1e-7
    columns = packed(values)
    assert len(columns["map"]) == 2 * values.size
    back = unpacked(columns).numpy().astype(np.float64)
    assert back == pytest.approx(values, rel=2.0**-11 * 1.01)
    assert np.abs(back).max() == columns["scale"] == np.abs(values).max()
    assert not unpacked(packed(np.zeros((2, 2), np.float32))).any()


def test_labels_say_which_predictions_are_right(tmp_path: Path) -> None:
    network = explainer(categories=list("abcde"))
    photos = []
    for number in range(6):
        predicted = int(network.model(as_it_is(picture(number))[None]).argmax())
        wrong = number % 3 == 0
        photos.append((picture(number), "abcde"[(predicted + wrong) % 5]))
    run = stored_run(tmp_path, [*photos, (picture(9), "zebra")], network)
    rows = list(run.rows())
    assert [row.correct for row in rows] == [False, True, True, False, True, True, None]
    assert (rows[6].label, rows[6].label_class) == ("zebra", None)
    assert [row.name for row in run.rows(correct=False)] == ["photo 0", "photo 3"]
    assert list(run.query("SELECT sum(photos) FROM confusions")) == [(2,)]
    assert list(run.query("SELECT sum(correct) FROM classes")) == [(4,)]
    names = [row.name for row in sorted(rows[:6], key=lambda row: row.label_probability or 0)]
    assert [row.name for row in run.rows(order="worst")] == [*names, "photo 6"]
    assert [row.name for row in run.rows(order="best")] == [*names[::-1], "photo 6"]
    assert [row.name for row in run.rows(label="zebra")] == ["photo 6"]


def test_metrics_that_ask_the_method_again_judge_it_for_the_same_class(tmp_path: Path) -> None:
    model = explainer().model
    photos = [picture(0), picture(1)]
    run = stored_run(tmp_path, photos, methods=METHODS, metrics=["randomlogit"])
    for row in run.rows():
        x = as_it_is(photos[int(row.name[-1])])[None]
        table = evaluate(model, x, row.method, "randomlogit", target=row.target_class)
        expected = table[row.method]["randomlogit"].item()
        assert row.metrics["randomlogit"] == pytest.approx(expected, rel=1e-3)


def test_a_run_says_which_methods_its_photos_support(tmp_path: Path) -> None:
    """As `evaluate` does of the same photos at once; without the metrics of "check", of none."""
    photos = [picture(number) for number in range(3)]
    run = stored_run(tmp_path, photos, methods=["saliency"], metrics=["check"], target=0)
    x = torch.stack([as_it_is(image) for image in photos])
    table = evaluate(explainer().model, x, "saliency", "check", target=0)
    stored = run.support["saliency"].intervals
    for name, interval in table.support["saliency"].intervals.items():
        assert stored[name].mean == pytest.approx(interval.mean, rel=1e-3, abs=1e-5), name
        assert stored[name].count == 3
    assert not run.support["saliency"].supported
    other = stored_run(tmp_path, photos, metrics=["covering"], name="other.sqlite")
    assert other.support == {}


class Stop(Exception):
    pass


@pytest.mark.parametrize(("error", "workers"), [(Stop, 0), (KeyboardInterrupt, 1)])
def test_what_is_done_before_an_interruption_is_kept_and_the_rest_is_done_later(
    error: type[BaseException], workers: int, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "photos", 8)
    options: dict[str, Any] = {"methods": METHODS, "batch_size": 2, "workers": workers}

    def stop(state: State) -> None:
        if state.done >= 4:
            raise error

    with pytest.raises(error):
        stored_run(tmp_path, folder, progress=stop, **options)
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("explain")]
    assert threads == []
    run = explain.open_run(tmp_path / "run.sqlite")
    assert (run.photos, len(run), run.ended) == (4, 8, False)
    assert "not finished" in repr(run)
    run = stored_run(tmp_path, folder, **options)
    assert_same(run, stored_run(tmp_path, folder, methods=METHODS, name="whole.sqlite"))
    assert run.ended


def test_photos_of_a_costly_method_are_stored_one_by_one(tmp_path: Path) -> None:
    """Of a cheap one, they are kept when their batch is complete."""
    model = explainer().model
    second = as_it_is(picture(1))

    def interrupted(module: torch.nn.Module, arguments: Any) -> None:
        if any(torch.equal(x, second) for x in arguments[0]):
            raise KeyboardInterrupt

    for method, stored in (("rise", 1), ("sufficient", 1), ("saliency", 0)):
        hook = model.register_forward_pre_hook(interrupted)
        file = f"{method}.sqlite"
        photos = [picture(number) for number in range(3)]
        with pytest.raises(KeyboardInterrupt):
            stored_run(tmp_path, photos, explainer(model), [method], target=1, name=file)
        hook.remove()
        assert explain.open_run(tmp_path / file).photos == stored


OTHER_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"methods": ["lrp"]}, "methods, gradcam: GradCAM.* before, none now; .*can be added"),
    ({"methods": [GradCAM(relu=False), "saliency"]}, "methods, gradcam, relu: true before, false"),
    ({"target": 2}, "targets: ClassTarget.*1.* before, .*2.* now; .*give another output"),
    ({"top_k": 2, "target": None}, "targets: ClassTarget.* before, TopClass.*1.* now"),
    ({"layer": "layer1"}, "layer: none before, layer1 now; ask for the same again"),
    ({"model_explainer": explainer(settled(TinyNet(), seed=3).eval())}, "weights: others than"),
    ({"model_explainer": explainer(categories=list("abcde"))}, "categories: none before, a, b, c"),
    ({"source": "other"}, "source, path: .*photos before, .*other now"),
]


def test_a_run_with_other_options_refuses_to_be_mixed_in(tmp_path: Path) -> None:
    options: dict[str, Any] = {"source": "photos", "methods": METHODS, "target": 1}
    for name in ("photos", "other"):
        folder_of(tmp_path / name, 1)

    def go(**changed: Any) -> explain.Run:
        source = tmp_path / changed.get("source", "photos")
        return stored_run(tmp_path, **{**options, **changed, "source": source})

    first = contents(go())
    for changed, message in OTHER_OPTIONS:
        with pytest.raises(RunError, match=f"must be continued as it was begun, but .*{message}"):
            go(**changed)
    assert contents(go()).keys() == first.keys()


def test_methods_and_metrics_are_added_to_a_run_and_nothing_is_computed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attribute = explain.explanation.explainer.attribute
    calls: list[tuple[str, int]] = []

    def counted(model: Any, x: Any, methods: Any, **options: Any) -> Any:
        calls.extend((method.name, len(x)) for method in methods)
        return attribute(model, x, methods, **options)

    monkeypatch.setattr("explain.explanation.explainer.attribute", counted)
    folder = folder_of(tmp_path / "photos", 5)
    options: dict[str, Any] = {"target": 1, "batch_size": 5}
    both = [("gradcam", 5), ("saliency", 5)]
    for methods, metrics, computed in (
        (["gradcam"], [], both[:1]),
        (METHODS, [], both[1:]),
        (METHODS, ["complexity"], both),
        (METHODS, ["complexity"], []),
    ):
        run = stored_run(tmp_path, folder, methods=methods, metrics=metrics, **options)
        assert sorted(calls) == computed
        assert (run.ended, run.photos, run.methods) == (True, 5, methods)
        calls.clear()
    whole = stored_run(
        tmp_path, folder, name="whole.sqlite", methods=METHODS, metrics=metrics, **options
    )
    assert_same(run, whole)
    figures = [[row.metrics["complexity"] for row in of_run.rows()] for of_run in (run, whole)]
    assert sorted(figures[0]) == pytest.approx(sorted(figures[1]))
    with pytest.raises(RunError, match=r"methods, saliency: Saliency.* before, none now"):
        stored_run(tmp_path, folder, methods="gradcam", target=1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"methods": "gradcan"}, MethodError, "did you mean 'gradcam'"),
        ({"layer": "layr1"}, LayerError, "layr1"),
        ({"explainer": explainer(categories=["a"])}, ModelError, "classes"),
        ({"workers": -1}, RunError, "workers must"),
        ({"timeout": 0}, RunError, "timeout must"),
        ({"source": []}, RunError, "source must"),
        ({"metod": "lrp"}, TypeError, "did you mean 'methods'"),
        ({"output": "."}, RunError, "output"),
        ({"output": "/dev/null/x"}, RunError, "cannot be written: "),
        ({"output": "x" * 300 + "/run.sqlite"}, RunError, "output"),
    ],
)
def test_what_is_wrong_for_all_photos_is_raised(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    defaults = {"source": [picture(0)], "explainer": explainer(), "output": tmp_path / "run.sqlite"}
    with pytest.raises(error, match=message):
        explain.run(**{**defaults, "workers": 0, **options})


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is no database at all")
    with closing(sqlite3.connect(tmp_path / "other.sqlite")) as db:
        db.execute("CREATE TABLE cats (name TEXT)")
    for file in list(tmp_path.iterdir()):
        content = file.read_bytes()
        with pytest.raises(RunError, match="must be a run or a new file"):
            stored_run(tmp_path, [picture(0)], name=file.name)
        with pytest.raises(RunError, match=r"run '.*' (cannot be read|must be the file of a run)"):
            explain.open_run(file)
        assert file.read_bytes() == content


def test_tensors_are_given_to_the_model_as_they_are(tmp_path: Path) -> None:
    x = torch.rand(3, 3, 12, 10)
    network = explain.Explainer(settled(TinyNet()).eval(), preprocess=lambda photo: 1 / 0)  # type: ignore[arg-type]
    rows = list(stored_run(tmp_path, [(tensor, 1) for tensor in x], network, target=0).rows())
    expected = explain.attribute(network.model, x, "gradcam", target=0).values
    values = torch.stack([row.values for row in rows])
    torch.testing.assert_close(values, expected, rtol=1e-3, atol=1e-6)
    assert rows[0].sha256 == hashlib.sha256(x[0].numpy().tobytes()).hexdigest()
    assert (rows[0].label_class, rows[0].path, rows[0].size) == (1, None, (10, 12))


def test_a_group_of_methods_is_chosen_by_the_first_photo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "explain.attribution.selection.list_methods", lambda: ["gradcam", "saliency", "rollout"]
    )
    run = stored_run(tmp_path, [picture(0), picture(1)], methods="all")
    assert sorted(run.methods) == ["gradcam", "saliency"]
    assert run.manifest["methods"] == "all"


def test_inputs_of_integers_are_refused(tmp_path: Path) -> None:
    model = settled(TinyNet()).eval()
    network = explain.Explainer(model, preprocess=lambda photo: as_it_is(photo).byte())
    (reason,) = stored_run(tmp_path, [picture(0)], network, target=1).failures.values()
    assert "must return a float tensor (C, H, W), got torch.uint8" in reason
