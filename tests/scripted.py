"""A server that says what a test tells it to."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Scripted:
    """A real HTTP server that gives prepared answers: path -> (status, body) or a callable."""

    def __init__(self):
        self.answers, self.seen = {}, []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                length = int(self.headers.get("content-length") or 0)
                outer.seen.append((self.path, self.headers.get("authorization"), self.rfile.read(length)))
                answer = outer.answers.get(self.path, (404, '{"detail":"Not Found"}'))
                status, body = answer() if callable(answer) else answer
                data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
