"""The notebooks in examples/notebooks run from beginning to end, and are kept without what they
print."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
named = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    return [
        cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == kind
    ]


@named
def test_notebooks_are_kept_without_outputs_and_their_links_lead_somewhere(path: Path) -> None:
    code = cells(path, "code")
    assert len(code) >= 5
    assert [(cell["execution_count"], cell["outputs"]) for cell in code] == [(None, [])] * len(code)
    text = "".join("".join(cell["source"]) for cell in cells(path, "markdown"))
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (path.parent / link).exists(), link


@named
@pytest.mark.notebooks
# of the machinery that runs notebooks; their own are outputs, and seen below
@pytest.mark.filterwarnings("ignore")
def test_notebooks_run_from_beginning_to_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient  # from the extra "notebooks"
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    )
    before = set(path.parent.rglob("*"))
    client.execute()  # raises what a cell raised
    assert set(path.parent.rglob("*")) == before, "a notebook leaves files behind"
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output["text"] for output in outputs if output.get("name") == "stderr"]
    shown = [output.get("data", {}) for output in outputs]
    assert sum("image/png" in data or "<img " in data.get("text/html", "") for data in shown) >= 3
    for data in shown:  # a result is stored once, in at most 300 kB
        assert not {"image/png", "text/html"} <= data.keys()
        assert sum(map(len, data.values())) <= 300_000
