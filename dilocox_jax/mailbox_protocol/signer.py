"""Signs objects, so that only replicas with the secret can write them.

Every object has a message authentication code (HMAC-SHA256) of the run, the
path and the content. The path names the event, the turn and the replica. So an
object that was changed, cut, renamed or taken from another run is not accepted,
and counts as missing.

Arrays are raw bytes that follow the code. Everything else is JSON that anybody
can read: `{"mac":"<64 hexadecimal digits>","is":{...}}`.
"""

import hashlib
import hmac
import json
from typing import Any

Buffer = bytes | memoryview

TAG_BYTES = hashlib.sha256().digest_size
JSON_BYTES = 2**20  # More than any JSON object but the index of a snapshot.
INDEX_BYTES = 2**24  # An index has about 30 bytes a leaf, so 500,000 leaves.
# The text of a JSON object before the code, between code and content, and after
# the content.
_BEFORE = b'{"mac":"'
_BETWEEN = b'","is":'
_AFTER = b"}\n"


class Signer:
  """Signs and verifies the objects of one run."""

  def __init__(self, secret: bytes, run: str):
    """Makes the signer of a run.

    Args:
      secret: The secret that all replicas of the run share, and nobody else
        has.
      run: Identifier of the run, different from that of every other run.
    """
    self._secret = secret
    self._run = run

  def sign(self, path: str, *content: Buffer) -> bytes:
    """Returns the signed bytes to write at a path.

    Args:
      path: Path of the object.
      *content: The parts of the content, which follow each other.
    """
    return b"".join([self._tag(path, *content), *content])

  def verify(self, path: str, data: bytes | None) -> memoryview | None:
    """Returns the content of an object; None if its signature is wrong.

    Args:
      path: Path of the object.
      data: The bytes that were read there; None: the object is missing.
    """
    if data is None or len(data) < TAG_BYTES:
      return None
    content = memoryview(data)[TAG_BYTES:]
    is_ours = hmac.compare_digest(data[:TAG_BYTES], self._tag(path, content))
    return content if is_ours else None

  def sign_json(self, path: str, value: dict[str, Any]) -> bytes:
    """Returns the signed JSON to write at a path.

    Args:
      path: Path of the object.
      value: Values of JSON without NaN or infinity.
    """
    content = json.dumps(value, sort_keys=True, allow_nan=False).encode()
    tag = self._tag(path, content).hex().encode()
    return _BEFORE + tag + _BETWEEN + content + _AFTER

  def verify_json(self, path: str, data: bytes | None) -> dict[str, Any] | None:
    """Returns the value that `sign_json` signed; None if something is wrong.

    Args:
      path: Path of the object.
      data: The bytes that were read there; None: the object is missing.
    """
    start = len(_BEFORE) + 2 * TAG_BYTES
    if data is None or len(data) > INDEX_BYTES or not data.endswith(_AFTER):
      return None
    content = data[start + len(_BETWEEN) : -len(_AFTER)]
    tag = self._tag(path, content).hex().encode()
    expected = _BEFORE + tag + _BETWEEN
    if not hmac.compare_digest(data[: len(expected)], expected):
      return None
    return json.loads(content)

  def _tag(self, path: str, *content: Buffer) -> bytes:
    """Returns the message authentication code of an object, 32 bytes."""
    digest = hmac.new(self._secret, digestmod="sha256")
    for part in (self._run.encode(), path.encode()):
      digest.update(len(part).to_bytes(8, "little") + part)
    for part in content:
      digest.update(part)
    return digest.digest()
