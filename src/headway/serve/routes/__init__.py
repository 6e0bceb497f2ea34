"""The routes, by protocol. Each module makes a router of a server."""

from headway.serve.routes import attention, llama, operation, page, patterns, tasks, texts

ROUTES = (
    operation.routes,
    texts.routes,
    llama.routes,
    tasks.routes,
    attention.routes,
    patterns.routes,
    page.routes,
)
"""In the order in which they are asked."""
