"""A network that misbehaves: a TCP proxy on this machine that slows, delays, stalls, cuts and damages what passes.

Knows no protocol.
"""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CHUNK_NBYTES = 1 << 14
_TICK_S = 0.01
_PIECE_S = 0.02
"""What a paced connection passes at once takes about this long."""


class Proxy:
    """Stands between clients and one server. What it does to the bytes may be changed at any time.

    Attributes:
        nbytes_per_s: Pace of each direction of each connection; None: as fast as it goes.
        delay_s: Seconds for which each piece from a client is held up: every round trip takes at least this long.
        is_stalled: Whether nothing passes; connections stay open.
    """

    def __init__(self, server: tuple[str, int]) -> None:
        """Listen on a free port of 127.0.0.1, and pass what comes to the server at a host and port."""
        self.nbytes_per_s: float | None = None
        self.delay_s = 0.0
        self.is_stalled = False
        self._server = server
        self._flip_at: int | None = None
        self._cut_at: int | None = None
        self._is_closed = False
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def flip(self, offset: int) -> None:
        """Flip a bit of the byte at `offset` of what the server sends from now on, once."""
        self._flip_at = offset

    def cut_after(self, nbytes: int) -> None:
        """Cut all connections once the server has sent so many bytes more."""
        self._cut_at = nbytes

    def cut(self) -> None:
        """Cut all connections that there are."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for each in sockets:
            with suppress(OSError):  # the other side may have hung up
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut all connections and accept no more."""
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            try:
                server = socket.create_connection(self._server)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._sockets += [client, server]
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with suppress(OSError), source:  # a connection ends when either side does
            try:
                while data := source.recv(self._piece_nbytes()):
                    self._hold_up(len(data), is_answer)
                    target.sendall(self._changed(data) if is_answer else data)
            finally:
                target.shutdown(socket.SHUT_RDWR)

    def _piece_nbytes(self) -> int:
        pace = self.nbytes_per_s
        return _CHUNK_NBYTES if pace is None else max(1, min(_CHUNK_NBYTES, int(pace * _PIECE_S)))

    def _hold_up(self, nbytes: int, is_answer: bool) -> None:
        if not is_answer and self.delay_s:
            time.sleep(self.delay_s)
        if self.nbytes_per_s:
            time.sleep(nbytes / self.nbytes_per_s)
        while self.is_stalled and not self._is_closed:
            time.sleep(_TICK_S)

    def _changed(self, data: bytes) -> bytes:
        """Return the bytes that reach the client in the place of `data`."""
        with self._lock:
            self._flip_at, flip_at = _passed(self._flip_at, len(data))
            self._cut_at, cut_at = _passed(self._cut_at, len(data))
        if flip_at is not None:
            data = data[:flip_at] + bytes([data[flip_at] ^ 0x10]) + data[flip_at + 1 :]
        if cut_at is not None:
            self.cut()
        return data


def _passed(offset: int | None, nbytes: int) -> tuple[int | None, int | None]:
    """Return what is left of an offset after so many bytes, and its place among them when it is there."""
    if offset is None or offset >= nbytes:
        return offset if offset is None else offset - nbytes, None
    return None, offset


@contextmanager
def proxied(port: int) -> Iterator[Proxy]:
    """Yield a proxy in front of a port of this machine."""
    proxy = Proxy(("127.0.0.1", port))
    try:
        yield proxy
    finally:
        proxy.close()
