"""The messages between the coordinator and a worker, and the channel that carries them."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Any, TypeVar

import msgspec

from perfsuite.errors import WorkerError
from perfsuite.measure.attempt import AttemptSpec
from perfsuite.measure.measurement import Measurement

ENVIRONMENT_VARIABLE = "PERFSUITE_WORKER"
_T = TypeVar("_T")
_HEADER = struct.Struct("!I")
MAX_MESSAGE_BYTES = 256 * 1024**2


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told when it starts: its end of the channel and the device to measure on.

    A rank has no end of a channel yet: it connects to ``address`` (``unix:/path`` or ``tcp:host:port``) and shows
    ``token``. ``device_index`` is the first rank's device on its node. ``rank_timeout_s`` is the longest time between
    two signs of life of a rank.
    """

    fd: int
    backend: str
    device_index: int
    sku: str
    compute_capability: str | None = None
    uuid: str | None = None
    l2_bytes: int | None = None
    threads: int = 1
    address: str | None = None
    token: str = ""
    rank: int = 0
    ranks: int = 1
    rank_timeout_s: float = 60.0


class Here(msgspec.Struct, frozen=True, kw_only=True, tag="here"):
    """A rank has started: the first message on a connection that it has made."""

    rank: int
    pid: int
    token: str


class Store(msgspec.Struct, frozen=True, kw_only=True, tag="store"):
    """Rank 0 hosts torch's store for the process group on this port."""

    port: int


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """To every rank: make the process group, by the store that is there."""

    host: str
    port: int


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A worker is ready: the versions of what it measures with, and how many cases it has collected."""

    environment: dict[str, str | None]
    cases: int


class Measure(msgspec.Struct, frozen=True, kw_only=True, tag="measure"):
    """Measure one case."""

    case: str
    spec: AttemptSpec


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """A look at a case that is being sampled: the interval of ln(judged value)."""

    samples: int
    y: float
    low: float
    high: float


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag="alive"):
    """A rank gets on with its case."""


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The measurement."""

    measurement: Measurement


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """No measurement: the outcome (ERROR, INCORRECT, SKIPPED), one line, and the user's traceback if there is one."""

    outcome: str
    reason: str
    traceback: str = ""


Reply = Store | Hello | Progress | Alive | Done | Failed


def _encodable(value: Any) -> Any:
    """``value`` without lone surrogates, which a traceback may hold and UTF-8 cannot."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(item) for item in value]
    return value


class Channel:
    """Length-prefixed msgpack over a socket; one end in the coordinator, one in the worker."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        """The socket's descriptor, to wait on."""
        return self._end.fileno()

    def send(self, message: Any) -> None:
        """Write one message whole; BrokenPipeError where the other end is gone."""
        data = msgspec.msgpack.encode(_encodable(msgspec.to_builtins(message)))
        self._end.sendall(_HEADER.pack(len(data)) + data)

    def receive_reply(self) -> Reply:
        """Read one message of a worker; EOFError where it is gone, WorkerError where it is not one of ours."""
        return self.receive(Reply)  # type: ignore[arg-type]

    def receive_measure(self) -> Measure:
        """Read one message of the coordinator; EOFError where it is gone."""
        return self.receive(Measure)

    def receive_here(self) -> Here:
        """Read the first message of a rank, within the socket's own time limit."""
        return self.receive(Here)

    def receive_join(self) -> Join:
        """Read what the coordinator answers a rank; EOFError where it is gone."""
        return self.receive(Join)

    def await_end(self, limit_s: float) -> None:
        """Wait until the other end is closed, for some seconds."""
        with contextlib.suppress(OSError):
            self._end.settimeout(limit_s)
            while self._end.recv(4096):
                pass

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def receive(self, type_: type[_T]) -> _T:
        """Read one message of this type; EOFError where the other end is gone, WorkerError where it is another."""
        (length,) = _HEADER.unpack(self._read(_HEADER.size))
        if length > MAX_MESSAGE_BYTES:
            raise WorkerError(f"a message of {length} bytes on the worker's channel: something else writes to it")
        try:
            return msgspec.msgpack.decode(self._read(length), type=type_)
        except msgspec.DecodeError as error:
            raise WorkerError(f"the worker's channel carries something else: {error}") from None

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            chunk = self._end.recv(count - len(data))
            if not chunk:
                raise EOFError("the other end of the worker's channel is closed")
            data += chunk
        return bytes(data)
