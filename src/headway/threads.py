"""The largest supported number of CPU threads. Imports the standard library only, so that a command line is checked at
once."""

import os

MOST_THREADS = max(64, 4 * (os.cpu_count() or 1))
"""More threads than the cores can use. OpenMP ends or crashes the process if it cannot start as many threads as
requested, which happens at some ten thousand."""
