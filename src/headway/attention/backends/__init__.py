"""Attention backends, one file or folder for each."""
