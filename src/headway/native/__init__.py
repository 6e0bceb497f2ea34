"""The native kernels: C++ compiled once per CPU level (`build`), the best one opened at run time (`loader`).

Nothing is imported here, so that building imports no torch.
"""
