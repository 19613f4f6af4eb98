"""The app: the report's page with a live model behind it, in the browser.

    requests   limits of the app; photos and requests as validated values; photos with a covered
    region jobs       a model and whose turn it is; a request, answered step by step; curves and
    checks of a map service    photos and answers, of which the least recently used are forgotten
    first web        which requests are allowed; the page, addresses and replies; a server, until an
    interrupt

Nothing here imports Starlette or uvicorn before an app is made: they come with ``pip install
'explain-hooks[app]'``.
"""

from explain.app.web import application

__all__ = ["application"]
