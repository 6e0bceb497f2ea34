"""Backend `native`: our own kernels for CPUs."""
