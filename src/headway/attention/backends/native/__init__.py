"""Backend `native`: this package's C++ kernels for CPUs."""
