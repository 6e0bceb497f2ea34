"""Models behind an address: OpenAI's protocol, on the engine that `generate` uses."""
