"""The routes, by protocol. Each module makes a router of a server."""

from headway.serve.routes import anthropic, attention, llama, openai, operation, page, patterns, tasks

ROUTES = (
    operation.routes,
    openai.routes,
    anthropic.routes,
    llama.routes,
    tasks.routes,
    attention.routes,
    patterns.routes,
    page.routes,
)
"""In the order in which they are asked."""
