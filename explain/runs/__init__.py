"""Runs: all photos of a source explained, stored in one SQLite file that survives anything.

    sources         what a source is: names first, pixels later; folders
    files           lists (CSV, tab-separated, JSON, JSON lines) and WebDataset shards; what was given, as a source
    datasets        data sets of PyTorch and Hugging Face, lists in Python
    fingerprint     what tells one model with its preprocessing from another
    photo_identity  which photos a run has already
    digests         a digest for each row
    labels          from a source's labels to the classes of a model
    preparing       from an entry to what the model is given, in batches of one shape
    workers         the same ahead, in processes
    explaining      what is computed for each batch
    schema          the tables, and a map as it is stored
    manifest        what fixes a run
    store           the SQLite file, as it is written
    writing         one run at a time writes a file, in a thread
    reading         the SQLite file, as it is read: rows
    exporting       Parquet, CSV and JSON lines
    pictures        overlays and pages of some photos
    result          `Run`, and what can be made of it; `open_run`
    runner          `run`: all of it together
    storage         a folder that several machines write to
    parts           Parquet files in such a folder, and the SQLite file that they are read from
    cluster         `run_on_ray`: on the machines of a Ray cluster

A source is one class; anything that gives entries and reads them can be run.
"""

from explain.runs.cluster import run_on_ray
from explain.runs.exporting import export
from explain.runs.files import source_of
from explain.runs.pictures import to_html, write_pictures
from explain.runs.reading import Row
from explain.runs.result import Run, open_run
from explain.runs.runner import State, run
from explain.runs.sources import Content, Entry, Folder, Source, Trouble

__all__ = [
    "Content",
    "Entry",
    "Folder",
    "Row",
    "Run",
    "Source",
    "State",
    "Trouble",
    "export",
    "open_run",
    "run",
    "run_on_ray",
    "source_of",
    "to_html",
    "write_pictures",
]
