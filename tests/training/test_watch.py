"""A training is watched, and goes on exactly as if it were not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.testing import assert_close

import explain
from explain import ExplainWarning, RunError
from explain.training import DeadUnits, GradientFlow, Monitor
from explain.training.writing import TrainingSnapshot, stored_name, writer_of


def picture(number: int, size: tuple[int, int] = (12, 10)) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3))
    return Image.fromarray(pixels.astype(np.uint8))


def as_it_is(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


PHOTOS = [(picture(0), 1), (picture(1), 3), (picture(2), None), (picture(3, (14, 10)), 0)]


class Training:
    """A plain loop; each step's batch depends on the random numbers of the process."""

    def __init__(self, seed: int = 0) -> None:
        self.model = network(seed).train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.losses: list[float] = []

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(torch.rand(4, 3, 10, 12)), torch.randint(4, (4,)))
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        return loss

    def through(self, steps: int, watch: Monitor | None = None) -> None:
        for _ in range(steps):
            loss = self.step()
            if watch is not None:
                watch.step(loss=loss)

    def monitor(self, photos: Any = PHOTOS, **options: Any) -> Monitor:
        return Monitor(explainer(self.model), photos, **options)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def steps_of(run: explain.Run, table: str = "steps") -> list[int]:
    return sorted({step for (step,) in run.query(f"SELECT step FROM {table}")})


def explainer(model: nn.Module) -> explain.Explainer:
    return explain.Explainer(model, list("abcd"), as_it_is)


def rows_at(run: explain.Run, step: int) -> dict[str, Any]:
    names = dict(
        run.query(
            "SELECT p.name, s.name FROM steps s JOIN photos p ON p.id = s.photo WHERE step = ?",
            (step,),
        )
    )
    return {names[row.name]: row for row in run.rows() if row.name in names}


def test_a_watched_training_is_the_same_as_one_that_is_not(tmp_path: Path) -> None:
    plain = Training()
    watched = Training()
    torch.manual_seed(1)
    plain.through(7)
    torch.manual_seed(1)
    with watched.monitor(every=3, window=2, output=tmp_path / "t.sqlite") as watch:
        watched.through(7, watch)
    assert watched.losses == plain.losses
    assert_close(watched.state(), plain.state(), rtol=0, atol=0)
    assert watched.model.training
    assert not any(p._backward_hooks for p in watched.model.parameters())


# of networks that have learnt nothing yet
@pytest.mark.filterwarnings("ignore:gradcam is zero everywhere")
def test_what_is_kept_of_a_step_is_what_the_network_of_that_step_says(tmp_path: Path) -> None:
    training = Training()
    at: dict[int, dict[str, Any]] = {}
    with training.monitor(every=3, output=tmp_path / "t.sqlite") as watch:
        for step in range(7):
            at[step] = training.state()
            training.through(1, watch)
    at[7] = training.state()
    run = explain.open_run(tmp_path / "t.sqlite")
    assert run.ended
    assert steps_of(run) == [0, 3, 6, 7]
    for step in (0, 3, 6, 7):
        model = network(5)
        model.load_state_dict(at[step])
        found = rows_at(run, step)
        for number, (photo, label) in enumerate(PHOTOS):
            x = as_it_is(photo)[None]
            expected = explain.attribute(model.eval(), x, "gradcam", target=label)
            row = found[f"photo {number}"]
            assert_close(row.values, expected.values[0], rtol=2e-3, atol=1e-6)
            assert row.target_class == (model(x).argmax().item() if label is None else label)
            assert row.score == pytest.approx(expected.score.item(), rel=1e-4)
    losses = dict(run.query("SELECT step, value FROM figures WHERE name = 'loss'"))
    assert losses == {3: pytest.approx(training.losses[2]), 6: pytest.approx(training.losses[5])}


def test_gradients_are_those_of_the_steps_before_a_look(tmp_path: Path) -> None:
    training = Training()
    with torch.no_grad():
        # after which no gradient comes back
        training.model[1].weight[2] = training.model[1].bias[2] = 0.0
        training.model[1].bias[2] = -1.0
    with training.monitor(every=4, window=2, output=tmp_path / "t.sqlite") as watch:
        training.through(2, watch)
        with GradientFlow(training.model) as flow, DeadUnits(training.model) as units:
            training.through(2, watch)
    run = explain.open_run(tmp_path / "t.sqlite")
    rows = run.query("SELECT parameter, rms, largest, zero, verdict FROM gradients")
    stored = {name: rest for name, *rest in rows}
    assert stored.keys() == flow.steps[0].keys()
    for name, (rms, largest, zero, verdict) in stored.items():
        steps = [step[name] for step in flow.steps]
        assert rms == pytest.approx(sum(each.rms for each in steps) / 2)
        assert largest == max(each.largest for each in steps)
        assert zero == pytest.approx(sum(each.zero for each in steps) / 2)
        assert verdict == flow.verdicts()[name]
    found = list(run.query("SELECT layer, units, dead, numbers FROM units ORDER BY layer"))
    counts = units.counts()
    dead = sorted(units.dead().items())
    assert found == [(name, counts[name], len(each), json.dumps(each)) for name, each in dead]
    assert found[0][:3] == ("0", 6, 1)


def test_a_training_goes_on_where_it_was_and_forgets_what_it_does_again(tmp_path: Path) -> None:
    file = tmp_path / "t.sqlite"
    training = Training()
    with training.monitor(every=2, output=file) as watch:
        training.through(4, watch)
        saved = training.state()
        training.through(4, watch)
    again = Training(3)
    again.model.load_state_dict(saved)
    with pytest.raises(RunError, match="continue"):
        again.monitor(every=2, output=file).begin()
    with again.monitor(every=3, output=file, start=4) as watch:
        again.through(2, watch)
    run = explain.open_run(file)
    assert steps_of(run) == [0, 2, 4, 6]
    assert steps_of(run, "gradients") == [2, 6]
    assert len(run) == 4 * len(PHOTOS)
    with pytest.raises(RunError, match="continued"):
        again.monitor(methods="saliency", output=file, start=6).begin()


def test_what_cannot_be_explained_later_is_a_warning_and_the_training_goes_on(
    tmp_path: Path,
) -> None:
    training = Training()
    state = training.state()
    with training.monitor(every=1, output=tmp_path / "t.sqlite") as watch:
        training.model[0].weight.data.fill_(float("nan"))
        with pytest.warns(ExplainWarning, match="4 of 4 photos could not be"):
            watch.step()
        training.model.load_state_dict(state)
        watch.step()
    run = explain.open_run(tmp_path / "t.sqlite")
    assert steps_of(run) == [0, 2]
    assert sorted(run.failures) == [f"step 00000001/photo {number}" for number in range(4)]


class Writer:
    """What TensorBoard would be given."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}
        self.images: dict[tuple[str, int], Any] = {}

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int) -> None:
        self.scalars[tag, global_step] = scalar_value

    def add_image(self, tag: str, img_tensor: Any, global_step: int, *, dataformats: str) -> None:
        assert dataformats == "HWC"
        self.images[tag, global_step] = img_tensor


def test_a_board_gets_maps_probabilities_gradients_and_dead_units() -> None:
    training = Training()
    writer = Writer()
    with training.monitor(PHOTOS[:2], every=2, board=writer) as watch:
        training.through(2, watch)
    tag = "maps/photo 0/gradcam/b"
    assert {(tag, 2), ("maps/photo 1/gradcam/d", 2)} <= writer.images.keys()
    found = explainer(training.model)(PHOTOS[0][0], "gradcam", target=1)
    np.testing.assert_array_equal(writer.images[tag, 2], np.asarray(found.overlay("gradcam")))
    probability = writer.scalars["probability/photo 0/gradcam/b", 2]
    assert probability == pytest.approx(found.probabilities[1].item(), rel=1e-4)
    assert writer.scalars["loss", 2] == pytest.approx(training.losses[1])
    assert {("gradient/0.weight", 2), ("dead units", 2)} <= writer.scalars.keys()


def test_a_snapshot_names_its_photos_by_their_step_and_counts_dead_units() -> None:
    assert stored_name(500, "cat.jpg") < stored_name(1000, "cat.jpg")
    assert TrainingSnapshot(0, [], {}, units=[("conv", 4, [1]), ("fc", 4, [])]).dead == 1 / 8
    assert TrainingSnapshot(0, [], {}).dead == 0
    with pytest.raises(RunError, match="board"):
        writer_of(3)
