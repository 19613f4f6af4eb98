"""Runs: all photos of a source explained, stored in one SQLite file that survives anything.

    sources     what a source is: names first, pixels later; folders
    items       what one item of a list or data set holds
    lists       CSV, tab-separated, JSON and JSON lines
    shards      WebDataset: plain tar files
    datasets    data sets of PyTorch and Hugging Face, lists in Python
    given       what was given as a source, as a source
    fingerprint what tells one model with its preprocessing from another
    known       which photos a run has already
    digests     a digest for each row
    labels      from a source's labels to the classes of a model
    preparing   from an entry to what the model is given
    workers     the same ahead, in processes
    batches     photos of one shape together
    judging     metrics of the maps of a batch
    explaining  the question, and its answers for a batch
    maps        a map as it is stored
    schema      the tables
    manifest    what fixes a run
    lock        one run at a time writes a file
    store       the file, as it is written
    writer      the thread that writes
    reading     the file, as it is read: rows
    columns     the columns of a run as a table
    exporting   Parquet, CSV and JSON lines
    pictures    overlays, when they are asked for
    paging      a page of some photos
    insight/    what the maps of a run say together
    result      `Run`: a file that was read, and what can be made of it
    runner      `run`: all of it together
    places      a folder that several machines write to
    attempts    pieces whose process dies are tried again
    parts       `RunFolder`: a run in a folder of Parquet files
    spreading   a run in pieces that are explained anywhere
    cluster     `run_on_ray`: on the machines of a Ray cluster

A source is one class; anything that gives entries and reads them can be run.
"""

from explain.runs.cluster import run_on_ray
from explain.runs.exporting import export
from explain.runs.files import source_of
from explain.runs.parts import RunFolder
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
    "RunFolder",
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
