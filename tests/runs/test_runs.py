"""A run: each photo once with all its results, the same as alone; continued, refused, and what
fails is listed."""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import explain
from explain import LayerError, MethodError, ModelError, RunError, TargetError
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


def test_each_row_is_what_the_photo_gives_alone(tmp_path: Path) -> None:
    photos = [picture(number, (24, 20) if number % 3 else (20, 28)) for number in range(7)]
    model_explainer = explainer(categories=list("abcde"))
    state = snapshot(model_explainer.model)
    run = stored_run(tmp_path, photos, model_explainer, METHODS, targets=[None, "b"])
    assert snapshot(model_explainer.model) == state
    seen = set()
    for row in run.rows():
        photo = photos[int(row.name.split()[1])]
        alone_ = explain.attribute(
            model_explainer.model, as_it_is(photo)[None], row.method, target=row.target_class
        )
        torch.testing.assert_close(row.values, alone_.values[0], rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(torch.tensor([row.score]), alone_.score)
        assert row.layer == alone_.layer
        torch.testing.assert_close(row.heatmap, alone_.heatmap[0], rtol=2e-3, atol=1e-3)
        probabilities = alone_.logits[0].softmax(0)  # type: ignore[index]
        assert row.probability == pytest.approx(float(probabilities[row.target_class]), rel=1e-5)
        assert row.prediction_class == int(probabilities.argmax())
        assert row.prediction == "abcde"[int(probabilities.argmax())]
        assert row.prediction_probability == pytest.approx(float(probabilities.max()), rel=1e-5)
        assert row.sha256 == hashlib.sha256(photo.tobytes()).hexdigest()
        assert (row.size, row.input_size, row.box) == (
            photo.size,
            photo.size[::-1],
            locate(as_it_is, photo.size),
        )
        seen.add((row.name, row.method, row.target))
    tops = {row.name: row.prediction for row in run.rows()}
    wanted = {(n, m, t) for n in tops for m in METHODS for t in (tops[n], "b")}
    assert seen == wanted  # where the prediction is b, both targets are one row
    assert (len(run), run.photos, run.methods, run.failures, run.ended) == (
        len(wanted),
        7,
        METHODS,
        {},
        True,
    )


def test_maps_are_stored_in_half_precision_with_a_scale() -> None:
    values = np.random.default_rng(0).standard_normal((3, 8, 9)).astype(np.float32) * 1e-7
    columns = packed(values)
    assert (len(columns["map"]), columns["shape"], columns["scale"]) == (
        2 * 3 * 8 * 9,
        "[3, 8, 9]",
        np.abs(values).max(),
    )
    back = unpacked(columns)
    error = (back.numpy().astype(np.float64) - values) / np.abs(values)
    assert np.abs(error).max() < 2.0**-11 * 1.01
    assert back.abs().max() == np.abs(values).max()
    assert unpacked(packed(np.zeros((2, 2), np.float32))).tolist() == [[0, 0], [0, 0]]


def test_labels_say_which_predictions_are_right(tmp_path: Path) -> None:
    model_explainer = explainer(categories=list("abcde"))
    photos = [picture(number) for number in range(6)]
    says = [int(model_explainer.model(as_it_is(photo)[None]).argmax()) for photo in photos]
    labelled = [
        (photo, "abcde"[said] if number % 3 else (said + 1) % 5)
        for number, (photo, said) in enumerate(zip(photos, says, strict=True))
    ]
    run = stored_run(tmp_path, [*labelled, (picture(9), "zebra")], model_explainer)
    rows = list(run.rows())
    assert [row.correct for row in rows] == [False, True, True, False, True, True, None]
    assert (rows[6].label, rows[6].label_class) == ("zebra", None)
    assert [row.name for row in run.rows(correct=False)] == ["photo 0", "photo 3"]
    assert sum(count for _, _, count in run.query("SELECT * FROM confusions")) == 2
    assert sum(right for (right,) in run.query("SELECT correct FROM classes")) == 4
    worst = [row.label_probability for row in run.rows(order="worst")]
    assert worst[:-1] == sorted(p for p in worst if p is not None)
    assert worst[-1] is None
    assert [row.label_probability for row in run.rows(order="best")] == [*worst[-2::-1], None]
    label = rows[1].label
    assert [row.name for row in run.rows(label=label)] == [
        row.name for row in rows if row.label == label
    ]


def test_metrics_that_ask_the_method_again_judge_it_for_the_same_class(tmp_path: Path) -> None:
    model_explainer = explainer()
    run = stored_run(
        tmp_path,
        [picture(0), picture(1)],
        model_explainer,
        METHODS,
        name="r",
        metrics=["randomlogit"],
    )
    for row in run.rows():
        x = as_it_is(picture(int(row.name[-1])))[None]
        table = evaluate(
            model_explainer.model, x, row.method, "randomlogit", target=row.target_class
        )
        assert row.metrics["randomlogit"] == pytest.approx(
            float(table[row.method]["randomlogit"][0]), rel=1e-3
        )


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


OTHER_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"methods": ["gradcam"]}, "methods: gradcam and saliency before, gradcam now; ask for the"),
    ({"methods": ["lrp"]}, "methods: .* now; .* name the methods gradcam, saliency and lrp to add"),
    ({"methods": [GradCAM(relu=False), "saliency"]}, "methods, gradcam, relu: true before, false"),
    ({"target": 2}, "targets: class 1 before, class 2 now; .*give another output"),
    ({"top_k": 2, "target": None}, "targets: class 1 before, the top class and class 2 from the"),
    ({"layer": "layer1"}, "layer: none before, layer1 now; ask for the same again"),
    (
        {"model_explainer": explainer(settled(TinyNet(), seed=3).eval())},
        "weights: others than before; a",
    ),
    (
        {"model_explainer": explainer(categories=list("abcde"))},
        "categories: none before, a, b, c, d and",
    ),
    ({"source": "other"}, "source, path: .*photos before, .*other now"),
]


def test_a_run_with_other_options_refuses_to_be_mixed_in(tmp_path: Path) -> None:
    options: dict[str, Any] = {"source": "photos", "methods": METHODS, "target": 1}
    for name in ("photos", "other"):
        folder_of(tmp_path / name, 1)

    def go(options: dict[str, Any]) -> explain.Run:
        return stored_run(tmp_path, **{**options, "source": tmp_path / options["source"]})

    first = contents(go(options))
    for changed, message in OTHER_OPTIONS:
        with pytest.raises(
            RunError, match=f"run '.*run.sqlite' must be continued as it was begun, but {message}"
        ):
            go({**options, **changed})
    assert contents(go(options)).keys() == first.keys()


def test_methods_and_metrics_are_added_to_a_run_and_nothing_is_computed_twice(
    tmp_path: Path,
) -> None:
    folder = folder_of(tmp_path / "photos", 5)
    more: list[dict[str, Any]] = [
        {"methods": ["gradcam"]},
        {"methods": METHODS},
        {"methods": METHODS, "metrics": ["complexity"]},
        {"methods": METHODS, "metrics": ["complexity"]},
    ]
    done: list[list[tuple[str, int]]] = []
    for options in more:
        model_explainer = explainer()
        states = list[State]()
        asked = list[tuple[str, int]]()
        gather = explain.explanation.explainer.attribute

        def noted(
            model: Any, x: Any, methods: Any, asked: list[Any] = asked, **options_of_call: Any
        ) -> Any:
            asked += [(method.name, len(x)) for method in methods]
            return gather(model, x, methods, **options_of_call)  # noqa: B023

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("explain.explanation.explainer.attribute", noted)
            run = stored_run(
                tmp_path,
                folder,
                model_explainer,
                **options,
                target=1,
                batch_size=5,
                progress=states.append,
            )
        done.append(sorted(asked))
        assert (run.ended, run.photos, run.methods) == (True, 5, options["methods"])
    assert done == [[("gradcam", 5)], [("saliency", 5)], [("gradcam", 5), ("saliency", 5)], []]
    whole = stored_run(tmp_path, folder, name="whole.sqlite", **more[-1], target=1)
    assert_same(run, whole)
    one, other = (
        {row.name + row.method: row.metrics["complexity"] for row in one_run.rows()}
        for one_run in (run, whole)
    )
    assert one == pytest.approx(other)
    with pytest.raises(RunError, match="methods: gradcam and saliency before, gradcam now"):
        stored_run(tmp_path, folder, methods="gradcam", target=1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"methods": "gradcan"}, MethodError, "did you mean 'gradcam'"),
        ({"layer": "layr1"}, LayerError, "layr1"),
        ({"target": 9}, TargetError, "9"),
        ({"target": 1, "top_k": 2}, TargetError, "cannot both"),
        ({"explainer": explainer(categories=["a"])}, ModelError, "classes"),
        ({"workers": -1}, RunError, "workers must"),
        ({"batch_size": 0}, RunError, "batch_size must"),
        ({"timeout": 0}, RunError, "timeout must"),
        ({"source": []}, RunError, "source must"),
        ({"metod": "lrp"}, TypeError, "did you mean 'methods'"),
        ({"output": "."}, RunError, "output"),
        ({"output": "/dev/null/x"}, RunError, "cannot be written: "),
    ],
)
def test_what_is_wrong_for_all_photos_is_raised(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    defaults = {
        "source": [picture(0)],
        "explainer": explainer(),
        "output": tmp_path / "run.sqlite",
        "workers": 0,
    }
    with pytest.raises(error, match=message):
        explain.run(**{**defaults, **options})


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is no database at all")
    with sqlite3.connect(tmp_path / "other.sqlite") as db:
        db.execute("CREATE TABLE cats (name TEXT)")
    db.close()
    for name in ("text", "other.sqlite"):
        content = (tmp_path / name).read_bytes()
        with pytest.raises(RunError, match="must be a run or a new file"):
            stored_run(tmp_path, [picture(0)], name=name)
        with pytest.raises(RunError, match=r"run '.*' (cannot be read|must be the file of a run)"):
            explain.open_run(tmp_path / name)
        assert (tmp_path / name).read_bytes() == content


def test_tensors_are_given_to_the_model_as_they_are(tmp_path: Path) -> None:
    x = torch.rand(3, 3, 12, 10)
    model_explainer = explain.Explainer(settled(TinyNet()).eval(), preprocess=lambda photo: 1 / 0)  # type: ignore[arg-type]
    run = stored_run(tmp_path, [(tensor, 1) for tensor in x], model_explainer, target=0)
    expected = explain.attribute(model_explainer.model, x, "gradcam", target=0).values
    rows = list(run.rows())
    torch.testing.assert_close(
        torch.stack([row.values for row in rows]), expected, rtol=1e-3, atol=1e-6
    )
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
    model_explainer = explain.Explainer(
        settled(TinyNet()).eval(), preprocess=lambda photo: as_it_is(photo).mul(255).byte()
    )
    run = stored_run(tmp_path, [picture(0)], model_explainer, target=1)
    assert len(run) == 0
    assert [
        "must return a float tensor (C, H, W), got torch.uint8" in reason
        for reason in run.failures.values()
    ] == [True]
