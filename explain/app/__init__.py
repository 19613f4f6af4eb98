"""The app: the report's page with a live model behind it, in the browser.

    requests      limits of the app; photos and requests as validated values; covered regions
    tasks         a model and whose turn it is; a request, answered step by step; curves and checks
    service       photos and answers, of which the least recently used are forgotten first
    connections   how long a connection may wait, and how many an address may have
    web           which requests are allowed; the page, addresses and replies; the server

Nothing here imports Starlette or uvicorn before an app is made: they come with ``pip install
'explain-hooks[app]'``.
"""

from explain.app.web import application

__all__ = ["application"]
