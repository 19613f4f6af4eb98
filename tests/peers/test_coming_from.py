"""The rows of docs/coming-from.md that stand side by side: both packages are run."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import explain
from explain.methods import LRP
from tests.conftest import ROOT
from tests.peers.common import off, random, resnet

TABLE = (ROOT / "docs" / "coming-from.md").read_text("utf-8").partition("## Side by side")[2]
SETUP = re.findall(r"```py\n(.*?)```", TABLE, re.DOTALL)[0]
ROWS = re.findall(r"^\| (\w+) \| `(.*)` \| `(.*)` \|$", TABLE.partition("\n## ")[0], re.MULTILINE)
MODULES = ["captum", "pytorch_grad_cam", "torchcam", "zennit"]


def both(package: str, there: str, here: str, target: int) -> tuple[Any, Any, torch.Tensor]:
    """The values of a row by both packages, and the scores of the target."""
    for module in MODULES:
        pytest.importorskip(module, reason=f"{module} comes with the extra 'peers'")
    model = resnet()
    x = random(0, 2, 3, 64, 64)
    names = {"explain": explain, "LRP": LRP, "model": model, "x": x, "t": target}
    exec(SETUP, names)
    found = eval(here, names)
    return eval(there, names), found, model(x)[:, target]


def test_every_package_has_rows() -> None:
    assert {package for package, _, _ in ROWS} == set(MODULES)


@pytest.mark.parametrize(("package", "there", "here"), ROWS)
def test_a_row_gives_the_same_here_and_there(package: str, there: str, here: str) -> None:
    """For a class with scores of both signs where relevance follows them."""
    expected, found, _ = both(package, there, here, 0)
    is_resized = package == "pytorch_grad_cam"
    assert off(found, expected) <= (0.1 if is_resized else 1e-3)


def test_relevance_of_zennit_from_one_is_reversed_where_the_score_is_negative() -> None:
    (row,) = [row for row in ROWS if row[0] == "zennit" and "scores" not in row[1]]
    theirs, _, scores = both(*row, 0)
    ours = both(row[0], row[1], row[2].replace("/ a.score[:, None, None, None]", "* 1"), 0)[1]
    assert sorted(scores.sign().tolist()) == [-1, 1]
    products = (theirs * ours).flatten(1).sum(1)
    assert torch.equal(products.sign(), scores.sign())


JOBS = re.findall(
    r"^\| ([^|]+) \| (\w+) \| (`.*`) \| (`.*`) \| (\d) : (\d) \|$", TABLE, re.MULTILINE
)
RESIZED = {"a picture of why the best class", "layers fused to one map"}
"""Jobs of which only the number of results is compared: others enlarge and scale maps in another
way."""


def test_there_are_eight_jobs_and_every_package_has_some() -> None:
    assert len(JOBS) == 8
    assert {job[1] for job in JOBS} == set(MODULES)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job[0])
@pytest.mark.filterwarnings("ignore:Setting backward hooks")  # as Captum says each time
@pytest.mark.filterwarnings("ignore:.*misses the difference")  # of random weights
def test_a_job_takes_the_lines_that_are_counted_and_gives_the_same(job: tuple[str, ...]) -> None:
    name, _, there, here, *counts = job
    for module in MODULES:
        pytest.importorskip(module, reason=f"{module} comes with the extra 'peers'")
    from pytorch_grad_cam.utils.image import show_cam_on_image

    results = []
    for code, count in zip((there, here), counts, strict=True):
        lines = [line.strip("`") for line in code.split("<br>")]
        assert len(lines) == int(count)
        rgb = np.random.default_rng(0).random((64, 64, 3), np.float32)
        names = {"explain": explain, "LRP": LRP, "model": resnet(), "t": 0, "rgb": rgb}
        names |= {"x": random(0, 2, 3, 64, 64), "show_cam_on_image": show_cam_on_image}
        exec(SETUP, names)
        exec("\n".join(lines), names)
        results.append(names["result"])
    expected, result = results
    if name not in RESIZED:
        assert off(result, expected) <= 1e-3
        return
    sizes = [np.asarray(one).shape for one in results]
    assert sizes[0][0] == sizes[1][0]
