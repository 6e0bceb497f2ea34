"""Backend `triton`: split-KV decoding on CUDA."""
