"""Runs: all photos of a source explained, stored in one SQLite file that survives any interruption.

    sources         what a source is: names first, pixels later; folders, lists in Python, data sets
    files           lists (CSV, tab-separated, JSON, JSON lines), WebDataset shards; a source for any argument
    preparing       from an entry to the model's input, in batches of one shape, also ahead in processes; labels as
                    classes of the model; which photos a run has already
    manifest        what fixes a run; identification of a model with its preprocessing
    store           the SQLite file: its tables, maps as they are stored, digests of rows; writing it
    reading         reading it: rows, checked against their digests
    exporting       Parquet, CSV and JSON lines; a folder of Parquet files that several machines write, indexed as one
                    SQLite file
    result          `Run`, and what can be made of it: overlays and pages of some photos; `open_run`
    runner          `run`; maps, metrics and labels of a batch
    cluster         `run_on_ray`: on the machines of a Ray cluster

A source is one class that lists entries and reads them.
"""

from typing import TYPE_CHECKING

from explain._utils.errors import imported_later
from explain.runs.sources import Content, Entry, Source

__all__ = ["Content", "Entry", "Source", "run_on_ray"]

if TYPE_CHECKING:
    from explain.runs.cluster import run_on_ray
else:
    __getattr__ = imported_later(__name__, {"run_on_ray": "explain.runs.cluster"})  # which needs all else
