"""`redline report DIR --serve`: serves the page of a run on the loopback address, redrawn whenever the run has more.

    serve(Path("runs/ladder-gpt2-..."), port=8765)      # until Ctrl-C

It listens on 127.0.0.1 alone and answers only to that name or localhost: a web page elsewhere that points its own name
at this address (DNS rebinding) is refused. There is one page, without parameters, and nothing is written.
"""

from __future__ import annotations

import contextlib
import socketserver
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from redline.commands.standing import kind_of_run, page_of, read_standing, stamp_of
from redline.core.errors import EXIT_DONE, UserError, explained

HOST, DEFAULT_PORT = "127.0.0.1", 8765
NAMES = (HOST, "localhost")  # a forwarded port may have any number, but has one of these names
PATHS = ("/", "/report.html")
REFRESH_SECONDS = 5  # while a run continues; the page of a finished run does not refresh
IDLE_SECONDS = 30  # before a connection without a request is closed
HTML, TEXT = "text/html; charset=utf-8", "text/plain; charset=utf-8"


def serve(path: Path, port: int) -> int:
    kind_of_run(path)  # refuses a folder that is no run before a port is taken
    try:
        with open_server(Pages(path), port) as server:
            print(f"serving http://{HOST}:{server.server_port}/ (Ctrl-C ends it)", flush=True)
            server.serve_forever()
    except KeyboardInterrupt:  # the way to stop, and no failure
        print("no longer serving", file=sys.stderr)
    return EXIT_DONE


class Pages:
    """The newest page. It is redrawn only when the run has more: drawing takes a core from what is being measured."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._stamp: tuple[object, ...] | None = None
        self._page: tuple[bytes, bool] = (b"", False)

    def current(self) -> tuple[bytes, bool]:
        """Return the page, and whether the run is under way."""
        with self._lock:
            stamp = stamp_of(self._path)
            if stamp != self._stamp:
                standing = read_standing(self._path)
                self._page = page_of(standing, self._path).encode("utf-8"), standing.under_way
                self._stamp = stamp  # set last: a page that could not be drawn is tried again
            return self._page


class LocalServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, pages: Pages, port: int) -> None:
        self.pages = pages
        super().__init__((HOST, port), PageHandler)

    def server_bind(self) -> None:
        """Bind without http.server's lookup of the host name of 127.0.0.1, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that are gone: the reader left, or Ctrl-C came while one was accepted."""
        if not isinstance(sys.exc_info()[1], (OSError, ValueError)):
            super().handle_error(request, client_address)


def open_server(pages: Pages, port: int) -> LocalServer:
    if not 0 <= port <= 65535:
        raise UserError(f"--port is {port}", "ports go from 1 to 65535", f"choose one, such as {DEFAULT_PORT}")
    with explained(f"cannot serve on port {port}", "choose another --port; --port 0 takes any that is free"):
        return LocalServer(pages, port)


class PageHandler(BaseHTTPRequestHandler):
    server: LocalServer
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        status, kind, body, goes_on = self._answer()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")  # the page has the rest of the policy
        if goes_on:
            self.send_header("Refresh", str(REFRESH_SECONDS))
        with contextlib.suppress(ConnectionError):  # the reader has left
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self) -> tuple[HTTPStatus, str, bytes, bool]:
        if not self._is_for_us():
            return HTTPStatus.FORBIDDEN, TEXT, f"this server answers to {' and '.join(NAMES)} only\n".encode(), False
        if self.path.partition("?")[0] not in PATHS:
            return HTTPStatus.NOT_FOUND, TEXT, b"there is one page here: /\n", False
        try:
            page, goes_on = self.server.pages.current()
        except UserError as error:
            text = "".join(f"{label}: {words}\n" for label, words in error.lines())
            return HTTPStatus.INTERNAL_SERVER_ERROR, TEXT, text.encode(), True
        except OSError as error:
            text = f"the run cannot be read just now: {error.strerror or error}\n"
            return HTTPStatus.INTERNAL_SERVER_ERROR, TEXT, text.encode(), True
        return HTTPStatus.OK, HTML, page, goes_on

    def _is_for_us(self) -> bool:
        """True for a single Host header that is in `NAMES`, with any port, since it may be forwarded."""
        hosts = self.headers.get_all("Host") or [""]
        return len(hosts) == 1 and hosts[0].partition(":")[0].lower() in NAMES

    def version_string(self) -> str:
        return "redline"

    def log_message(self, *_: object) -> None:
        """Log nothing: a line per request would bury the address."""
