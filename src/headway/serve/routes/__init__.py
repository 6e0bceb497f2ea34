"""The routes, by protocol. Each module makes a router of a server."""

from headway.serve.routes import anthropic, health, openai

ROUTES = health.routes, openai.routes, anthropic.routes
"""In the order in which they are asked."""
