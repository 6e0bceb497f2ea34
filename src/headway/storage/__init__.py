"""Tensors and files on disk: safetensors, shards, pickles, GGUF; strict reading and atomic writing."""
