"""HTTP server of models: OpenAI's protocol and others, on the engine that `generate` uses."""
