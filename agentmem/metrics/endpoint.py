"""An HTTP endpoint with the numbers of one store, for Prometheus and `agentmem top`. Knows nothing of stores.

It is there only when it was asked for, has a registry of its own, and ends with its store.
"""

import errno
import importlib
import logging
import os
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from agentmem._version import __version__
from agentmem.errors import AgentMemError, ClosedError, InvalidInputError
from agentmem.metrics.places import Place, publish, withdraw

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 8
_TIMEOUT_S = 5.0
"""How long a client may be silent."""

_POLL_S = 60.0
"""How long the thread that accepts may sleep: `close` wakes it."""

_PATHS = {"/", "/metrics"}


class Endpoint:
    """Answers GET /metrics from when it is told to serve until it is closed, if it is to serve at all. Thread-safe.

    Attributes:
        url: Where it answers; for one that listens on all addresses, its address on this machine. None: nowhere.
    """

    def __init__(self, address: str | None) -> None:
        """Take the address "HOST:PORT"; port 0 takes any that is free. Nothing is answered before `serve`.

        Raises:
            InvalidInputError: It cannot be had, or the package `prometheus-client` is missing.
        """
        self.url: str | None = None
        self._pid = os.getpid()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._withdraw: Callable[[], None] = lambda: None
        if address is not None:
            self._exposition = importlib.import_module("agentmem.metrics.exposition").Exposition
            self._server = _bind(address)
            self.url = _url(self._server)

    def serve(self, read: Callable[[], Mapping[str, float]], *, store: Path, number: int) -> None:
        """Answer with what `read` returns, from a thread; tell of it in the directory of the `store`.

        Args:
            read: Returns the numbers; called for every scrape, by one thread at a time.
            store: The store's directory.
            number: The handle's byte in its `holders.lock`.
        """
        if self._server is None or self.url is None:
            return
        info = {"path": str(store), "pid": str(self._pid), "version": __version__}
        self._server.text = self._exposition(read, info).text
        publish(store, number, Place(url=self.url, pid=self._pid))
        self._withdraw = lambda: withdraw(store, number)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="agentmem-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Let go of the port, once a scrape that is running has been answered; again is harmless."""
        server, self._server = self._server, None
        if server is None:
            return
        if self._pid == os.getpid():  # else a forked child: the thread, and the file, are its parent's
            self._withdraw()
            server.end()
            if self._thread is not None:
                server.shutdown()
                self._thread.join()
        server.server_close()


def _bind(address: str) -> "_Server":
    host, _, port = address.rpartition(":")
    try:
        return _Server(host.strip("[]"), int(port))
    except OSError as error:
        advice = "port 0 takes any that is free" if error.errno == errno.EADDRINUSE else "name one of this machine"
        raise InvalidInputError(
            f"cannot serve metrics at Config.metrics={address!r} ({error.strerror}): {advice}"
        ) from error


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Answers a few connections at a time, each in a thread."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._reading = threading.Lock()
        self._is_over = False
        self.text: Callable[[str], tuple[bytes, str]] = lambda _accept: (b"", "")
        super().__init__((host, port), _Handler)

    def scrape(self, accept: str) -> tuple[bytes, str]:
        """Return the text of this moment and its content type; one thread at a time.

        Raises:
            ClosedError: The store is closed.
        """
        with self._reading:
            if self._is_over:
                raise ClosedError("the store is closed")
            return self.text(accept)

    def end(self) -> None:
        """Answer no more, and wake the thread that accepts: it would sleep on."""
        with self._reading:
            self._is_over = True
        try:
            # Also for a forked child that has the same socket: it must not keep the port.
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            logger.debug("the metrics' socket was closed already: %s", error)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, unless too many are being answered."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what became of a connection: the library prints nothing."""
        logger.debug("connection %r of %s failed: %s", request, client_address, sys.exc_info()[1])


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: _Server
    timeout = _TIMEOUT_S
    server_version = f"agentmem/{__version__}"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with the numbers."""
        if self.path.partition("?")[0] not in _PATHS:
            self.send_error(HTTPStatus.NOT_FOUND, "the metrics are at /metrics")
            return
        try:
            body, content_type = self.server.scrape(self.headers.get("Accept", ""))
        except AgentMemError as error:
            logger.info("metrics cannot be read: %s", error)
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, error.reason)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *words: object) -> None:  # noqa: A002 - http.server calls it so
        """Log a request for who looks for it."""
        logger.debug(format, *words)


def _url(server: _Server) -> str:
    host, port = str(server.server_address[0]), server.server_address[1]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - looked for, not bound
    return f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"
