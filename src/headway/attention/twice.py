"""What is said where a second derivative is asked for of a backend that has the first one only."""

from __future__ import annotations

from headway.errors import BackendError


def no_second(backend: str) -> BackendError:
    """The error that names the backend which ran, and the one that could."""
    return BackendError(
        f'second derivatives of attention: only backend="dense" has them, this call ran on {backend!r}; '
        'pass backend="dense" to it'
    )
