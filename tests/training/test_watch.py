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

    def __init__(self, model: nn.Module) -> None:
        self.model = model.train()
        self.optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
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
    plain = Training(network())
    torch.manual_seed(1)
    plain.through(7)
    watched = Training(network())
    torch.manual_seed(1)
    with Monitor(
        explainer(watched.model), PHOTOS, every=3, window=2, output=tmp_path / "t.sqlite"
    ) as watch:
        watched.through(7, watch)
    assert watched.losses == plain.losses
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, watched.model.state_dict()[name]), name
    assert watched.model.training
    assert not any(p._backward_hooks for p in watched.model.parameters())


# of networks that have learnt nothing yet
@pytest.mark.filterwarnings("ignore:gradcam is zero everywhere")
def test_what_is_kept_of_a_step_is_what_the_network_of_that_step_says(tmp_path: Path) -> None:
    training = Training(network())
    at: dict[int, dict[str, Any]] = {}
    with Monitor(explainer(training.model), PHOTOS, every=3, output=tmp_path / "t.sqlite") as watch:
        for step in range(8):
            if step in (0, 3, 6, 7):
                at[step] = {k: v.clone() for k, v in training.model.state_dict().items()}
            if step < 7:
                training.through(1, watch)
    run = explain.open_run(tmp_path / "t.sqlite")
    assert run.ended
    steps = run.query("SELECT DISTINCT step FROM steps ORDER BY step")
    assert [step for (step,) in steps] == [0, 3, 6, 7]
    for step, state in at.items():
        model = network(5)
        model.load_state_dict(state)
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
    training = Training(network())
    with torch.no_grad():
        # after which no gradient comes back
        training.model[1].weight[2] = training.model[1].bias[2] = 0.0
        training.model[1].bias[2] = -1.0
    watch = Monitor(
        explainer(training.model), PHOTOS, every=4, window=2, output=tmp_path / "t.sqlite"
    )
    with watch:
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
    training = Training(network())
    with Monitor(explainer(training.model), PHOTOS, every=2, output=file) as watch:
        training.through(4, watch)
        saved = {k: v.clone() for k, v in training.model.state_dict().items()}
        training.through(4, watch)
    with pytest.raises(RunError, match="continue"):
        Monitor(explainer(network()), PHOTOS, every=2, output=file).begin()
    again = Training(network(3))
    again.model.load_state_dict(saved)
    with Monitor(explainer(again.model), PHOTOS, every=3, output=file, start=4) as watch:
        again.through(2, watch)
    run = explain.open_run(file)
    assert sorted({s for (s,) in run.query("SELECT step FROM steps")}) == [0, 2, 4, 6]
    assert sorted({s for (s,) in run.query("SELECT step FROM gradients")}) == [2, 6]
    assert len(run) == 4 * len(PHOTOS)
    with pytest.raises(RunError, match="continued"):
        Monitor(explainer(again.model), PHOTOS, methods="saliency", output=file, start=6).begin()


def test_what_cannot_be_explained_later_is_a_warning_and_the_training_goes_on(
    tmp_path: Path,
) -> None:
    training = Training(network())
    with Monitor(explainer(training.model), PHOTOS, every=1, output=tmp_path / "t.sqlite") as watch:
        with torch.no_grad():
            training.model[0].weight.fill_(float("nan"))
        with pytest.warns(ExplainWarning, match="4 of 4 photos could not be"):
            watch.step()
        training.model.load_state_dict(network().state_dict())
        watch.step()
    run = explain.open_run(tmp_path / "t.sqlite")
    assert sorted({s for (s,) in run.query("SELECT step FROM steps")}) == [0, 2]
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
    training = Training(network())
    writer = Writer()
    with Monitor(explainer(training.model), PHOTOS[:2], every=2, board=writer) as watch:
        training.through(2, watch)
    assert {tag for tag, step in writer.images if step == 2} == {
        "maps/photo 0/gradcam/b",
        "maps/photo 1/gradcam/d",
    }
    found = explainer(training.model)(PHOTOS[0][0], "gradcam", target=1)
    training.model.train()
    np.testing.assert_array_equal(
        writer.images["maps/photo 0/gradcam/b", 2], np.asarray(found.overlay("gradcam"))
    )
    probability = writer.scalars["probability/photo 0/gradcam/b", 2]
    assert probability == pytest.approx(found.probabilities[1].item(), rel=1e-4)
    assert writer.scalars["loss", 2] == pytest.approx(training.losses[1])
    assert {tag for tag, step in writer.scalars if step == 2} >= {"gradient/0.weight", "dead units"}
