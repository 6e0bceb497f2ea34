"""Backend `triton`: split decoding on CUDA."""
