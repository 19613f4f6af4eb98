"""The notebooks in examples/notebooks run from beginning to end, and are kept without what they
print."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
named = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@named
def test_notebooks_are_kept_without_outputs_and_their_links_lead_somewhere(path: Path) -> None:
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        assert not cell.get("outputs")
        if cell["cell_type"] == "markdown":
            for link in re.findall(r"\]\(([^)]+)\)", "".join(cell["source"])):
                assert (path.parent / link).exists(), link


@named
@pytest.mark.notebooks
# of the machinery that runs notebooks; what cells print is output, and seen below
@pytest.mark.filterwarnings("ignore")
def test_notebooks_run_from_beginning_to_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient  # from the extra "notebooks"
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    files = set(path.parent.rglob("*"))
    nbclient.execute(notebook, timeout=300, kernel_name="python3", cwd=str(path.parent))
    assert set(path.parent.rglob("*")) == files, "a notebook leaves files behind"
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output["text"] for output in outputs if output.get("name") == "stderr"]
    pictures = 0
    for data in (output.get("data", {}) for output in outputs):
        is_picture = "image/png" in data
        pictures += is_picture or "<img " in data.get("text/html", "")
        assert not ("text/html" in data and is_picture), "a result is stored twice"
        assert sum(map(len, data.values())) <= 300_000
    assert pictures >= 3
