"""Checkpoints: the Hugging Face folder in and out, foreign formats in, pairing conversion; atomic writes."""
