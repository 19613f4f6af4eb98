"""The report: an explanation as one file for any browser, without a server, a network or a library.

    subject    what a report can be made of
    maps       maps, quantised at their own resolution; boxes and regions
    reproduce  the command and the Python code that repeat the explanation
    curves     deletion and insertion, and how many passes each method takes
    item       one photo, as plain values
    page       values, HTML, CSS and JavaScript, put together into one file
    sheets     many photos in one file, to filter and sort
    document   a page of sections with tables and pictures
    reported   `to_html` of an `explain.Explanation`, pages as files, the view in a notebook

The parts of the page are plain files in ``static``. The page gets its data through one small interface, `Source` in
``static/source.js``: in a report it reads the data in the file itself, and in the app it calls a live model.
"""

from explain.report.sheets import sheet

__all__ = ["sheet"]
