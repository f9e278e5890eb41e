"""The part of S3 that a mailbox asks for, over HTTP, in memory.

It knows no keys. Whether the real thing answers alike is another question: this
one holds the way from a store's calls to S3's requests.
"""

import contextlib
import hashlib
import http.server
import re
import threading
import urllib.parse
from collections.abc import Iterator
from xml.sax import saxutils


class _Requests(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  objects: dict[str, bytes] = {}

  def do_PUT(self):
    data = self.rfile.read(int(self.headers["Content-Length"]))
    if self.headers["If-None-Match"] == "*" and self._key() in self.objects:
      return self._answer(412, _error("PreconditionFailed"))
    self.objects[self._key()] = data
    return self._answer(200, b"", ETag=_tag(data))

  def do_GET(self):
    url = urllib.parse.urlsplit(self.path)
    query = dict(urllib.parse.parse_qsl(url.query))
    if "list-type" in query:
      return self._answer(200, self._listed(query.get("prefix", "")))
    data = self.objects.get(self._key())
    if data is None:
      return self._answer(404, _error("NoSuchKey"))
    return self._answer(200, data, ETag=_tag(data))

  def do_POST(self):
    """Deletes many objects."""
    data = self.rfile.read(int(self.headers["Content-Length"])).decode()
    keys = re.findall("<Key>(.*?)</Key>", data)
    for key in keys:
      self.objects.pop(saxutils.unescape(key), None)
    rows = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
    return self._answer(200, f"<DeleteResult>{rows}</DeleteResult>".encode())

  def _key(self) -> str:
    path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
    return path.split("/", 2)[2]

  def _listed(self, prefix: str) -> bytes:
    rows = "".join(
      f"<Contents><Key>{saxutils.escape(key)}</Key><Size>{len(data)}</Size>"
      "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
      for key, data in sorted(self.objects.items())
      if key.startswith(prefix)
    )
    return (
      f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}"
      "</ListBucketResult>"
    ).encode()

  def _answer(self, status: int, data: bytes, **headers: str) -> None:
    self.send_response(status)
    headers |= {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
    for name, value in headers.items():
      self.send_header(name, value)
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  def log_message(self, format, *args):
    pass


def _error(code: str) -> bytes:
  return f"<Error><Code>{code}</Code></Error>".encode()


def _tag(data: bytes) -> str:
  return f'"{hashlib.md5(data).hexdigest()}"'


@contextlib.contextmanager
def serving() -> Iterator[dict[str, str]]:
  """Serves any bucket; yields the options of a store that finds it."""
  handler = type("_OwnRequests", (_Requests,), {"objects": {}})
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  try:
    yield {
      "endpoint": f"http://127.0.0.1:{server.server_port}",
      "access_key_id": "key",
      "secret_access_key": "secret",
      "region": "us-east-1",
    }
  finally:
    server.shutdown()
    server.server_close()
