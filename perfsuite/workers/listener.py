"""Where ranks find the coordinator: a socket of its own, and a token that keeps strangers out."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
from pathlib import Path

from perfsuite.errors import WorkerError
from perfsuite.workers.protocol import Channel, Here

LOOPBACK = "127.0.0.1"
GREETING_LIMIT_S = 2.0
LONGEST_PATH_BYTES = 100
"""The kernel takes 107 bytes for the path of a unix socket; macOS takes 103."""


class Listener:
    """The coordinator's end: a unix socket below a private folder, or TCP where a path would be too long."""

    def __init__(self, folder: Path | None, host: str = LOOPBACK) -> None:
        """Listen in ``folder``; at a free port of ``host`` where there is none."""
        self.token = secrets.token_hex(16)
        path = folder / "ranks" if folder is not None else None
        if path is not None and len(bytes(path)) <= LONGEST_PATH_BYTES:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(str(path))
            self.address = f"unix:{path}"
        else:
            self._socket = socket.create_server((host, 0))
            self.address = f"tcp:{host}:{self._socket.getsockname()[1]}"
        self._socket.listen()

    def fileno(self) -> int:
        """The socket's descriptor, to wait on."""
        return self._socket.fileno()

    def accept(self) -> tuple[Channel, Here] | None:
        """The channel to a rank that has connected, and who it is; None where it is a stranger."""
        end, _ = self._socket.accept()
        end.settimeout(GREETING_LIMIT_S)
        channel = Channel(end)
        with contextlib.suppress(OSError, EOFError, WorkerError):
            here = channel.receive_here()
            if hmac.compare_digest(here.token.encode(), self.token.encode()):
                end.settimeout(None)
                return channel, here
        channel.close()
        return None

    def close(self) -> None:
        """Take no more connections."""
        self._socket.close()


def connect(address: str, here: Here) -> Channel:
    """A rank's channel to the coordinator; OSError where that is gone."""
    kind, _, place = address.partition(":")
    if kind == "unix":
        end = socket.socket(socket.AF_UNIX)
        end.connect(place)
    else:
        host, _, port = place.rpartition(":")
        end = socket.create_connection((host, int(port)))
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel = Channel(end)
    channel.send(here)
    return channel
