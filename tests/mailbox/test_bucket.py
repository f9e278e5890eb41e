"""What the answers of a server mean, for each call."""

import http.server
import pathlib
import threading

import pytest

from dilocox_jax.mailbox_protocol.answers import (
  ClosedError,
  StoreUnavailableError,
)
from dilocox_jax.mailbox_protocol.bucket import Bucket
from dilocox_jax.mailbox_protocol.store import Store

PAGE = (
  pathlib.Path(__file__).parents[2] / "docs/mailbox/how_to.md"
).read_text()
CALLS = {
  "get": lambda store: store.get("a", 10),
  "get_range": lambda store: store.get_range("a", 0, 10),
  "create": lambda store: store.create("a", b"x"),
  "put": lambda store: store.put("a", b"x"),
  "delete": lambda store: store.delete(["a"]),
  "list": lambda store: store.sizes("a"),
}
ALL = tuple(CALLS)
DELETED = "<DeleteResult><Error><Key>run/a</Key>{}<Message>m</Message></Error>"


class Server:
  """A server of S3's protocol that answers as it is told.

  Attributes:
    answers: Status and code by the request's method; the default is "".
    asked: Methods and paths of the requests.
  """

  def __init__(self):
    self.answers = {}
    self.asked = []
    server = self

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = "HTTP/1.1"

      def log_message(self, *given):
        pass

      def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        server.asked.append(f"{self.command} {self.path}")
        status, body = server.answer(self.command)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"x"')
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
          self.wfile.write(body)

      do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

    self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=self._server.serve_forever, daemon=True).start()

  def answer(self, method):
    status, code = self.answers.get(method, self.answers[""])
    body = f"<Error><Code>{code}</Code>\n<Message>m</Message></Error>"
    if code.startswith("<"):
      body = code
    return status, body.encode() if code else b""

  def store(self):
    return Store(
      "s3://bucket/run",
      endpoint=f"http://127.0.0.1:{self._server.server_port}",
      region="us-east-1",
      access_key_id="any",
      secret_access_key="any",
      retry_config={"max_retries": 0},
    )

  def close(self):
    self._server.shutdown()
    self._server.server_close()


@pytest.fixture(name="server", scope="module")
def server_fixture():
  server = Server()
  yield server
  server.close()


def answer_of(server, call, answers):
  """Returns what a call comes to, or the class of its error and its text."""
  server.answers = answers
  server.asked = []
  try:
    return CALLS[call](server.store())
  except StoreUnavailableError as error:
    assert "\n" not in str(error)
    return type(error), str(error)


@pytest.mark.parametrize("call", ALL)
@pytest.mark.parametrize("code", ["NoSuchBucket", "ContainerNotFound"])
def test_a_missing_bucket_is_closed_whatever_is_asked(server, call, code):
  found = answer_of(server, call, {"": (404, code)})
  assert found[0] is ClosedError
  assert f"there is no such bucket (404 {code}: m)" in found[1]


@pytest.mark.parametrize(
  ("status", "code", "expected"),
  [
    (400, "InvalidRequest", ClosedError),
    (400, "RequestTimeout", StoreUnavailableError),
    (401, "Unauthorized", ClosedError),
    (403, "AccessDenied", ClosedError),
    (403, "RequestTimeTooSkewed", ClosedError),
    (408, "RequestTimeout", StoreUnavailableError),
    (429, "TooManyRequests", StoreUnavailableError),
    (500, "InternalError", StoreUnavailableError),
    (501, "NotImplemented", ClosedError),
    (503, "SlowDown", StoreUnavailableError),
    (507, "InsufficientStorage", StoreUnavailableError),
  ],
)
@pytest.mark.parametrize("call", ALL)
def test_what_is_wrong_for_ever_is_closed_and_the_rest_is_away(
  server, call, status, code, expected
):
  found, text = answer_of(server, call, {"": (status, code)})
  assert found is expected
  assert f"{status} {code}: m" in text


def test_another_region_is_closed(server):
  found, text = answer_of(server, "get", {"": (301, "PermanentRedirect")})
  assert found is ClosedError and "region" in text


@pytest.mark.parametrize("code", ["NoSuchKey", ""])
def test_a_missing_object_is_absent_and_nothing_is_written_by_404(server, code):
  answers = {"": (404, code)}
  assert answer_of(server, "get", answers) is None
  assert answer_of(server, "get_range", answers) is None
  assert answer_of(server, "delete", answers) is None
  for call in ("create", "put", "list"):
    assert answer_of(server, call, answers)[0] is ClosedError


def test_an_object_that_ends_before_a_range_counts_as_missing(server):
  assert answer_of(server, "get_range", {"": (416, "InvalidRange")}) is None
  assert answer_of(server, "get", {"": (416, "InvalidRange")})[0] is ClosedError


@pytest.mark.parametrize("status", [409, 412, 304])
def test_a_condition_that_does_not_hold_means_something_for_creations_alone(
  server, status
):
  answers = {"": (status, "Code" if status != 304 else "")}
  for call in ("get", "get_range", "put", "delete", "list"):
    assert answer_of(server, call, answers)[0] is StoreUnavailableError


@pytest.mark.parametrize("status", [412, 304])
def test_who_creates_what_exists_is_told_so_by_one_answer(server, status):
  assert answer_of(server, "create", {"": (status, "")}) is False
  assert len(server.asked) == 1


def test_after_a_conflict_the_object_is_looked_for(server):
  exists = {"": (409, "BlobAlreadyExists"), "HEAD": (200, "")}
  assert answer_of(server, "create", exists) is False
  missing = {"": (409, "ConditionalRequestConflict"), "HEAD": (404, "")}
  found, text = answer_of(server, "create", missing)
  assert (
    found is StoreUnavailableError and "409 ConditionalRequestConflict" in text
  )
  closed = {"": (409, "Code"), "HEAD": (403, "")}
  assert answer_of(server, "create", closed)[0] is ClosedError


def test_what_could_not_be_deleted_is_said(server):
  denied = DELETED.format("<Code>AccessDenied</Code>") + "</DeleteResult>"
  found, text = answer_of(server, "delete", {"": (200, denied)})
  assert found is ClosedError and "AccessDenied" in text
  missing = DELETED.format("<Code>NoSuchKey</Code>") + "</DeleteResult>"
  assert answer_of(server, "delete", {"": (200, missing)}) is None


def test_those_after_a_missing_object_are_deleted_too(server):
  server.answers = {"": (404, "NoSuchKey")}
  server.asked = []
  server.store().delete(["a", "b", "c"])
  assert len(server.asked) == 1 + 3


def test_nothing_counts_as_written_that_was_not(server):
  server.answers = {"": (404, "NoSuchBucket")}
  store = server.store()
  for call in ("create", "put"):
    with pytest.raises(ClosedError):
      CALLS[call](store)
  assert store.bytes_up == 0


@pytest.mark.parametrize(
  "options", [{"region": 5}, {"client_options": {"timeout": 5}}, {"reign": "a"}]
)
def test_options_that_a_bucket_does_not_take_are_one_line(options):
  with pytest.raises(ValueError) as caught:
    Bucket("s3://bucket/run", options)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("url", "setting"),
  [
    ("s3://bucket/run", "bucket"),
    ("gs://bucket/run", "bucket"),
    ("az://container/run", "container_name"),
  ],
)
def test_the_urls_of_the_page_name_a_bucket_and_a_folder_in_it(
  url, setting, monkeypatch
):
  assert f"`{url}`" in PAGE
  monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
  monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
  objects = Bucket(url, {})._objects
  _, _, name, folder = url.split("/")
  assert objects.config[setting] == name and objects.prefix == folder
