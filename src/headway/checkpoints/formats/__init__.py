"""Formats that checkpoints are converted from: Meta's, llama2.c's, GGUF (also written)."""
