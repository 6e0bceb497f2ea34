"""The routes, by protocol. Each module makes a router of a server."""

from headway.serve.routes import health, openai

ROUTES = health.routes, openai.routes
"""In the order in which they are asked."""
