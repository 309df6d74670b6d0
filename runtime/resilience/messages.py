"""JSON lines over TCP: what the supervisor and its slots say to each other."""

import json
import socket
from typing import Any

Message = dict[str, Any]


class Line:
    """One connection. `receive` returns what has come, `send` is whole or raises OSError."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._pending = b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_dead_peers(connection)

    def send(self, **message: Any) -> None:
        """Sends one message."""
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """The messages that have come, once the socket is readable; None when the other end is gone."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            return None
        if not data:
            return None
        *lines, self._pending = (self._pending + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Hangs up."""
        self.socket.close()


def _notice_dead_peers(connection: socket.socket) -> None:
    """A peer whose link is cut sends no farewell: ask every 2 s whether it lives, and give it up after 3 silences."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 8000)):
        if hasattr(socket, option):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
