"""Formats that are converted: Meta's, llama2.c's, GGUF."""
