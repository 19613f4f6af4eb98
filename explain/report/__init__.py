"""The report: an explanation as one file for any browser, without a server, a network or a library.

    subject    what a report can be made of
    maps       maps, quantised at their own resolution; boxes and regions
    reproduce  the command and the Python that make it again
    curves     deletion and insertion, and how many passes each method takes
    item       one photo, as plain values
    page       values, HTML, CSS and JavaScript, put together into one file
    sheets     many photos in one file, to filter and sort
    document   a page of sections with tables and pictures
    reported   `to_html` of an `explain.Explanation`, pages as files, what a notebook shows

The parts of the page lie in ``static`` as plain files. The page gets its data through one small interface, `Source` in
``static/source.js``: here it reads what lies in the file itself; another one may ask a live model.
"""

from explain.report.curves import STEPS, curve
from explain.report.document import Section, document
from explain.report.item import Detail, item
from explain.report.maps import as_drawn, plane
from explain.report.page import SCRIPTS, STYLES, PageTemplate, page, static
from explain.report.reported import Reportable, page_of, page_with, widget, written
from explain.report.reproduce import Reproduction
from explain.report.sheets import entry, figures_in, sheet, sheet_html, sheet_of

__all__ = [
    "SCRIPTS",
    "STEPS",
    "STYLES",
    "Detail",
    "PageTemplate",
    "Reportable",
    "Reproduction",
    "Section",
    "as_drawn",
    "curve",
    "document",
    "entry",
    "figures_in",
    "item",
    "page",
    "page_of",
    "page_with",
    "plane",
    "sheet",
    "sheet_html",
    "sheet_of",
    "static",
    "widget",
    "written",
]
