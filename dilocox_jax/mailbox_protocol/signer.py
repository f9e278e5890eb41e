"""Objects carry a keyed digest, so that only holders of the secret write them.

The digest (HMAC-SHA256) covers the run, the path and the content. The path has
the event, the turn and the replica. So an object that was changed, cut, renamed
or taken from another run does not open, and is as if it were missing.

Arrays are raw bytes behind the digest. Everything else is JSON that anybody can
read: `{"mac":"<64 hexadecimal digits>","is":{...}}`.
"""

import hashlib
import hmac
import json
from typing import Any

Buffer = bytes | memoryview

TAG_BYTES = hashlib.sha256().digest_size
JSON_BYTES = 2**20  # More than any JSON object but the index of a snapshot.
INDEX_BYTES = 2**24  # An index has about 30 bytes a leaf, so 500,000 leaves.
_BEFORE, _BETWEEN, _AFTER = b'{"mac":"', b'","is":', b"}\n"


class Signer:
  """Closes and opens the objects of one run."""

  def __init__(self, secret: bytes, run: str):
    """Makes the signer of a run.

    Args:
      secret: What all replicas share, and nobody else has.
      run: What tells this run from every other one.
    """
    self._secret, self._run = secret, run

  def sign(self, path: str, *content: Buffer) -> bytes:
    """Returns what to write at a path; the parts of it follow each other."""
    return b"".join([self._tag(path, *content), *content])

  def verify(self, path: str, data: bytes | None) -> memoryview | None:
    """Returns the content of what was read at a path; None if it is not so."""
    if data is None or len(data) < TAG_BYTES:
      return None
    content = memoryview(data)[TAG_BYTES:]
    is_ours = hmac.compare_digest(data[:TAG_BYTES], self._tag(path, content))
    return content if is_ours else None

  def sign_json(self, path: str, value: dict[str, Any]) -> bytes:
    """Returns what to write at a path so that it can be read as JSON."""
    content = json.dumps(value, sort_keys=True, allow_nan=False).encode()
    tag = self._tag(path, content).hex().encode()
    return _BEFORE + tag + _BETWEEN + content + _AFTER

  def verify_json(self, path: str, data: bytes | None) -> dict[str, Any] | None:
    """Returns what `sign_json` was given; None for anything else."""
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
    digest = hmac.new(self._secret, digestmod="sha256")
    for part in (self._run.encode(), path.encode()):
      digest.update(len(part).to_bytes(8, "little") + part)
    for part in content:
      digest.update(part)
    return digest.digest()
