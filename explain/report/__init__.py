"""The report: an explanation as one file for any browser, without a server, a network or a library.

    reproduce  the command and the Python code that repeat the explanation
    item       one photo, as plain values: maps, quantised at their own resolution; curves; boxes
    pages      values, HTML, CSS and JavaScript, put together into one file; a page of sections,
               tables and pictures; of one photo, as a text, a file or the frame of a notebook; of
               many photos, to filter and sort

The parts of the page are plain files in ``static``. The page gets its data through one small
interface, `Source` in ``static/source.js``: in a report it reads the data in the file itself, and
in the app it calls a live model.
"""

from explain.report.pages import sheet

__all__ = ["sheet"]
