"""Tensors and files on disk: safetensors, shards, pickles; strict reading and atomic writing."""
