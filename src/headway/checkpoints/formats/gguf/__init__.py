"""GGUF, the files of llama.cpp: their container, block types, metadata and models."""
