"""The routes, by protocol. Each module makes a router of a server."""

from headway.serve.routes import anthropic, health, llama, openai, tasks, tokens

ROUTES = health.routes, openai.routes, anthropic.routes, llama.routes, tokens.routes, tasks.routes
"""In the order in which they are asked."""
