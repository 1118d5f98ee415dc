"""Ports for servers that tests start."""

import socket


def reserve_port():
    """Return a socket that keeps a free TCP port of 127.0.0.1 for a server until it is closed, and the port.

    The socket is bound and does not listen. A server that binds with SO_REUSEADDR, as vLLM's does, still gets the port;
    the kernel gives it to no process that asks for any free port.
    """
    keeper = socket.socket()
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind(("127.0.0.1", 0))
    return keeper, keeper.getsockname()[1]
