"""The native kernels: C++ compiled once per CPU level (`build`); the best library is opened at run time (`loader`).

Nothing is imported here, so that building the kernels does not import torch.
"""
