"""Lines between a trainer and one server, which a test can make bad: HTTP control, and the ZMQ payload in it."""

from __future__ import annotations

import http.client
import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import zmq

from fp8bridge.wire import Message, decode, encode


@dataclass
class Answer:
    """What a line says itself, instead of asking the server."""

    status: int
    body: bytes


def refusal(words: str) -> Answer:
    return Answer(400, json.dumps({"success": False, "message": words}).encode())


class Fault:
    """What happens to the messages of a line. This one lets everything pass; `fired` counts what was done."""

    payload = False
    """The buckets go through the line too."""

    def __init__(self) -> None:
        self.fired = 0

    def request(self, path: str, body: bytes) -> list[bytes] | Answer:
        """Trainer to server: the bodies that are passed on, in order; none: it is lost."""
        return [body]

    def response(self, path: str, answer: Answer) -> list[Answer]:
        """Server to trainer; none: it is lost."""
        return [answer]

    def to_server(self, message: Message, frames: list[bytes]) -> list[list[bytes]]:
        """A message of the payload's line, and its frames; what is passed on instead."""
        return [frames]

    def to_trainer(self, message: Message, frames: list[bytes]) -> list[list[bytes]]:
        return [frames]


class HttpLine:
    """Stands in front of a server; `url` is what the trainer is given. `fault` may be changed at any time."""

    def __init__(self, server_url: str) -> None:
        self.fault = Fault()
        self.server_url = server_url
        self._host, _, port = server_url.removeprefix("http://").rpartition(":")
        self._port = int(port)
        self.over = threading.Event()
        """Set when the requests that got no answer may end."""
        self._payload: list[PayloadLine] = []
        line = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                line.carry(self)

            do_POST = do_GET

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that has left
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def carry(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        path, fault = handler.path, self.fault
        if fault.payload and path == "/update_weights_from_zmq":
            body = self._through_lines(body, fault)
        asked = fault.request(path, body)
        if isinstance(asked, Answer):
            answer: Answer | None = asked
        else:
            answer = self._ask(handler, asked[0]) if asked else None
            for extra in asked[1:]:  # the first answer is the one that the trainer waits for
                threading.Thread(target=self._ask, args=(handler, extra), daemon=True).start()
        passed = fault.response(path, answer) if answer else []
        if not passed:
            handler.close_connection = True
            if answer or not asked:
                self.over.wait(60)
            return
        for answer in passed:
            head = f"HTTP/1.1 {answer.status} \r\ncontent-type: application/json\r\n"
            handler.wfile.write(f"{head}content-length: {len(answer.body)}\r\n\r\n".encode() + answer.body)

    def _ask(self, handler: BaseHTTPRequestHandler, body: bytes) -> Answer | None:
        """None: the server is not there, or went away."""
        connection = http.client.HTTPConnection(self._host, self._port)
        try:
            connection.request(handler.command, handler.path, body or None, {"content-type": "application/json"})
            response = connection.getresponse()
            return Answer(response.status, response.read())
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _through_lines(self, body: bytes, fault: Fault) -> bytes:
        asked = json.loads(body)
        made = [PayloadLine(endpoint, fault) for endpoint in asked["endpoints"]]
        self._payload += made
        return json.dumps(asked | {"endpoints": [line.endpoint for line in made]}).encode()

    def calm(self) -> None:
        """No fault from now on; what was held back ends."""
        self.fault = Fault()
        self.over.set()
        for line in self._payload:
            line.close()
        self._payload = []
        self.over = threading.Event()

    def close(self) -> None:
        self.calm()
        self._http.shutdown()
        self._http.server_close()


class PayloadLine:
    """Between one sender and the server: real sockets on both sides, whole messages in between."""

    def __init__(self, sender: str, fault: Fault) -> None:
        self._sender, self._fault = sender, fault
        self._context = zmq.Context()
        self._near = self._context.socket(zmq.ROUTER)
        self.endpoint = f"tcp://127.0.0.1:{self._near.bind_to_random_port('tcp://127.0.0.1')}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        far: dict[bytes, zmq.Socket[bytes]] = {}
        while not self._stop.is_set():
            if self._near.poll(5):
                identity, *frames = self._near.recv_multipart()
                if identity not in far:
                    far[identity] = self._context.socket(zmq.DEALER)
                    far[identity].connect(self._sender)
                for each in self._fault.to_trainer(decode(frames[0]), frames):
                    far[identity].send_multipart(each)
            for identity, socket in far.items():
                while socket.poll(0):
                    frames = socket.recv_multipart()
                    for each in self._fault.to_server(decode(frames[0]), frames):
                        self._near.send_multipart([identity, *each])
        for socket in (*far.values(), self._near):
            socket.close(linger=0)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def said(message: Message) -> list[bytes]:
    return [encode(message)]
