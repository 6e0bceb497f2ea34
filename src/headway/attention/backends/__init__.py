"""One file or folder per backend."""
