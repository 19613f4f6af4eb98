"""Where photos come from, and where their maps are kept.

    sources     what a source is: names first, pixels later; folders, lists in Python, data sets
    lists       lists (CSV, JSON, JSON lines), WebDataset shards; a source for any argument
    identity    identification of a model with its preprocessing
    manifest    what fixes a run, compared with what it was begun with
    writing     the SQLite file of a run: its tables, maps, digests of rows; writing it
    reading     reading it: rows, checked against their digests; their photos once more

A source is one class that lists entries and reads them.
"""
