"""A process that has imported everything and forks a server for each client: tests start hundreds of servers.

`forks.py SOCKET` is that process. `COMMAND`, with the path of the socket, is the text of a program that its caller
takes for `llama-server`: the server lives as long as that program.
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


def answer(connection: socket.socket) -> None:
    """Serves, in a forked process, until the other end of the connection is closed."""
    from tests.serve.shim import llama_server

    folder, *flags = json.loads(connection.makefile().readline())
    os.chdir(folder)

    def leave() -> None:
        connection.recv(1)
        os._exit(0)

    threading.Thread(target=leave, daemon=True).start()
    llama_server.main(flags)


def main() -> None:
    import uvicorn  # noqa: F401

    import headway.api
    import headway.serve.app  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                try:
                    answer(connection)
                finally:
                    os._exit(0)
            connection.close()


if __name__ == "__main__":
    main()
