"""README, CONTRIBUTING, CHANGELOG and SECURITY are true: their code runs, their links lead
somewhere, and the README is short."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import explain
from tests.conftest import ROOT

PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "llms.txt"]


def blocks_of(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)


# Each block in a child of its own, forked when the slow imports are done, and from a folder of its
# own.
RUN_BLOCKS = """
import json, os, pathlib, sys, traceback
import matplotlib, torch, torchvision

blocks, folder, assets = json.load(sys.stdin), pathlib.Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
failed = {}
for number, block in enumerate(blocks):
    place = folder / str(number)
    place.mkdir()
    (place / "assets").symlink_to(assets)
    child = os.fork()
    if not child:
        os.chdir(place)
        try:
            exec(compile(block, f"block {number}", "exec"), {"__name__": "__main__"})
        except BaseException:  # whatever ends the block, SystemExit too, is told to the parent
            (place / "failed").write_text(traceback.format_exc())
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        told = place / "failed"
        failed[number] = told.read_text() if told.exists() else f"ended with {code}"
print(json.dumps(failed), file=sys.stderr)
"""


def python(
    code: str, folder: Path, *words: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python in a new interpreter, from a folder."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done


def run_blocks(blocks: list[str], folder: Path) -> dict[int, str]:
    """Run blocks of Python one after the other; return what those that failed said, by their
    number."""
    words = (str(folder), str(ROOT / "assets"))
    done = python(RUN_BLOCKS, folder, *words, input=json.dumps(blocks))
    failed: dict[str, str] = json.loads(done.stderr.splitlines()[-1])
    return {int(number): said for number, said in failed.items()}


QUIET = "import warnings; warnings.simplefilter('error')\n"
SETUP = f"""{QUIET}
import explain, torch
from explain import hooks
model, x = explain.Explainer("tiny").model, explain.Explainer("tiny").as_input("assets/coffee.png")
mean, std = (0.48, 0.448, 0.398), (0.277, 0.269, 0.282)
"""


def jobs() -> dict[str, str]:
    """The README's table of jobs: the lines of each."""
    text = (ROOT / "README.md").read_text("utf-8")
    table = text.partition("## Your job in two lines")[2].partition("\n\n[")[0]
    rows = re.findall(r"^\| ([^|]+) \| `(.*)` \|$", table, re.MULTILINE)
    return {job: code.replace("`<br>`", "\n") for job, code in rows}


@pytest.mark.docs
def test_each_job_of_the_readme_is_two_lines_that_run_without_a_warning(tmp_path: Path) -> None:
    lines = jobs()
    assert len(lines) >= 11
    assert {code.count("\n") for code in lines.values()} == {1}
    assert run_blocks([SETUP + code for code in lines.values()], tmp_path) == {}


def test_the_readmes_first_photo_is_answered_right() -> None:
    label, probability = explain.explain(ROOT / "assets" / "coffee.png").predictions[0]
    assert (label, probability > 0.9) == ("espresso", True)


@pytest.mark.docs
def test_the_pages_python_runs_as_pasted_and_what_fails_would_be_told(tmp_path: Path) -> None:
    blocks = [QUIET + block for page in PAGES for block in blocks_of(page, "python")]
    wrong = ["import os; x = 1", "print(x)", "import sys; sys.exit(3)"]
    failed = run_blocks([*blocks, *wrong], tmp_path)
    assert failed.keys() == {len(blocks) + 1, len(blocks) + 2}, failed


def test_the_readmes_first_lines_run_in_a_new_interpreter_and_importing_is_light(
    tmp_path: Path,
) -> None:
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    unloaded = "assert not {{{}}} & set(sys.modules), sorted(sys.modules)"
    code = [
        "import sys, explain",
        unloaded.format("'torch', 'torchvision', 'matplotlib', 'cv2'"),
        "import explain.recording",
        unloaded.format("'PIL', 'torchvision', 'explain.hooks', 'explain.data'"),
        "explain.attribute, explain.list_methods()",
        unloaded.format("'torchvision', 'matplotlib', 'cv2'"),
        blocks_of("README.md", "python")[0],
        # they take longer to load than a photo
        unloaded.format("'torchvision', 'matplotlib', 'explain.metrics', 'torch._dynamo', 'sympy'"),
    ]
    python("\n".join(code), tmp_path)
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".png", ".npy", ".json"}


def anchors(page: str) -> set[str]:
    """The names by which the headings of a page are linked to."""
    headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_picture_of_the_gallery_is_on_its_page_and_every_page_is_found() -> None:
    gallery = (ROOT / "docs" / "pictures.md").read_text("utf-8")
    pictures = {path.name for path in (ROOT / "assets" / "gallery").iterdir()}
    assert {name for name in pictures if f"assets/gallery/{name})" not in gallery} == set()
    index = (ROOT / "docs" / "index.md").read_text("utf-8").splitlines()
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages - set(index) == set()
    readme = (ROOT / "README.md").read_text("utf-8")
    first_screen = "\n".join(readme.splitlines()[:12])
    for name in ("docs/hooks.md", "examples/hooks_tour.py", "docs/pictures.md", "docs/recipes.md"):
        assert f"({name})" in first_screen


def test_what_is_said_about_the_package_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert [author["name"] for author in project["authors"]] == re.findall(
        r'^  - name: "(.*)"$', citation, re.MULTILINE
    )
    cited = re.findall(r"^  - ([\w .-]+)$", citation, re.MULTILINE)
    assert {word.lower() for word in cited} <= set(project["keywords"])
    readme = (ROOT / "README.md").read_text("utf-8")
    table = readme.partition("| extra | for |")[2].partition("\n\n")[0]
    extras = set(re.findall(r"`([a-z]+)`", table))
    of_developers = {"test", "dev", "docs", "peers", "browser", "notebooks", "leaderboard"}
    assert extras == set(project["optional-dependencies"]) - of_developers


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text("utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        assert link.startswith("https://") or (ROOT / path).exists(), link
        assert not anchor or anchor in anchors(path or page), link


def test_the_readme_is_short_and_has_its_commands() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150
    shell = "".join(blocks_of("README.md", "sh")).splitlines()
    for wanted in ("explain assets/", "-m pytest"):  # which .ci/run looks for
        (line,) = [line for line in shell if wanted in line]
        assert line.startswith("python3 -m venv .venv && ")


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert versions[0] == explain.__version__
    assert versions == sorted(
        versions, key=lambda version: [*map(int, version.split("."))], reverse=True
    )


OLD = re.compile(
    r"\b(whereof|thereof|hereof|anew|amid|for ever|hitherto|to be had|is to show|legible)\b", re.I
)


def test_the_english_is_of_today() -> None:
    pages = [ROOT / page for page in PAGES]
    for pattern in ("docs/*.md", "explain/**/*.py", "examples/notebooks/*.ipynb"):
        pages += ROOT.glob(pattern)
    assert len(pages) > 100
    old = {page.name: words for page in pages if (words := OLD.findall(page.read_text("utf-8")))}
    assert old == {}
