"""How many CPU threads may be asked for. The standard library only, so that a command line is checked at once."""

import os

MOST_THREADS = max(64, 4 * (os.cpu_count() or 1))
"""More than the cores have any use for. OpenMP ends the process, or crashes it, where it cannot start as many as it is
told to: at some ten thousand."""
