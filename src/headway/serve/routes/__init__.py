"""The routes, by protocol: each makes a router of a server."""

from headway.serve.routes import attention, llama, operation, page, texts

ROUTES = operation.routes, texts.routes, llama.routes, attention.routes, page.patterns, page.routes
"""In the order in which they are asked."""
