"""A process that has imported everything, and forks a server for whoever asks: hundreds of servers are started.

`forks.py SOCKET` is that process; what `COMMAND` says, with the path of the socket, is `llama-server` to its caller:
the server lives as long as it does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading

COMMAND = """#!{python} -IS
import json, os, signal, socket, sys
there = socket.socket(socket.AF_UNIX)
signal.signal(signal.SIGTERM, lambda *_: there.shutdown(socket.SHUT_WR))  # it ends when the server has ended
there.connect({path!r})
there.sendall(json.dumps([os.getcwd(), *sys.argv[1:]]).encode() + b"\\n")
there.recv(1)
"""


def answer(there: socket.socket) -> None:
    """In a process of its own: a server, until the other end is closed."""
    from tests.serve.shim import llama_server

    folder, *flags = json.loads(there.makefile().readline())
    os.chdir(folder)

    def leave() -> None:
        there.recv(1)
        os._exit(0)

    threading.Thread(target=leave, daemon=True).start()
    llama_server.main(flags)


def main() -> None:
    import uvicorn  # noqa: F401

    import headway.api
    import headway.serve.app  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(sys.argv[1])
        door.listen()
        while True:
            there, _ = door.accept()
            if os.fork() == 0:
                door.close()
                try:
                    answer(there)
                finally:
                    os._exit(0)
            there.close()


if __name__ == "__main__":
    main()
