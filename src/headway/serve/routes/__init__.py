"""Functions that make the routes of a server, grouped by protocol."""

from headway.serve.routes import attention, llama, operation, page, texts

ROUTES = operation.routes, texts.routes, llama.routes, attention.routes, page.patterns, page.routes
"""Routers in order of matching."""
