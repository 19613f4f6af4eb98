"""Runs: all photos of a source explained, stored in one SQLite file that survives any interruption.

    sources         what a source is: names first, pixels later; folders
    datasets        data sets of PyTorch and Hugging Face, lists in Python
    files           lists (CSV, tab-separated, JSON, JSON lines), WebDataset shards; a source for any argument
    schema          the tables, maps as they are stored, digests of rows
    preparing       from an entry to the model's input, in batches of one shape
    workers         the same ahead, in processes
    known_photos    labels of a source as classes of the model; which photos a run has already
    manifest        what fixes a run; identification of a model with its preprocessing
    explaining      maps, metrics and labels of a batch
    store           writing the SQLite file
    reading         reading it: rows, checked against their digests
    exporting       Parquet, CSV and JSON lines
    pictures        overlays and pages of some photos
    parts           a folder of Parquet files that several machines write, indexed as one SQLite file
    result          `Run`, and what can be made of it; `open_run`
    runner          `run`
    cluster         `run_on_ray`: on the machines of a Ray cluster

A source is one class that lists entries and reads them.
"""

from typing import TYPE_CHECKING

from explain._utils.errors import getattr_of
from explain.runs.cluster import run_on_ray
from explain.runs.reading import Row
from explain.runs.runner import State
from explain.runs.sources import Content, Entry, Source

__all__ = ["Content", "Entry", "Row", "Source", "State", "run_on_ray"]

if not TYPE_CHECKING:
    __getattr__ = getattr_of("runs")
