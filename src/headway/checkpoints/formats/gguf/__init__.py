"""GGUF, the file format of llama.cpp: its container, block types, metadata and models."""
