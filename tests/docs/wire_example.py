"""The example of docs/wire_format.md: the objects of a run of one replica.

  python -m tests.docs.wire_example

writes the objects that the code produces now into the page.
"""

import pathlib
import re
import secrets
from unittest import mock

import numpy as np

import dilocox_jax as dx
from dilocox_jax.mailbox_protocol.store import Store
from dilocox_jax.reference.codecs import Signs
from dilocox_jax.reference.messages import Messages

PAGE = pathlib.Path(__file__).parents[2] / "docs/wire_format.md"
RUN = "0123456789abcdef" * 2
SECRET = b"s" * 64
# The objects of one event and of the run, in the order of the page.
PATHS = (
  "run.json",
  "seat/0000",
  "event/0000000000/0/oslo",
  "manifest/0000000000.0",
  "snapshot/0000000000/arrays",
  "snapshot/0000000000/index",
)
_BEGIN = "<!-- example -->\n"
_END = "<!-- end of example -->\n"
_HEX_BYTES = 32  # Bytes in a line of the page.


def written_objects():
  """The objects that one replica writes in its first event, by path."""
  store = Store("memory:///")

  def run_or_token(num_bytes):
    return RUN if num_bytes == 16 else "0" * 2 * num_bytes

  with mock.patch.object(secrets, "token_hex", run_or_token):
    box = dx.Mailbox(
      store,
      name="oslo",
      secret=SECRET,
      config={"inner.learning_rate": 0.002},
      rules=dx.MailboxRules(replicas=1),
    )
  box.newest()
  theta = {"w": np.array([3, 4, 0, 0, 0, 0], np.float32)}
  messages = Messages(Signs(), theta, feedback=1.0)
  delta = {"w": np.array([0.5, -1, 1.5, 2, 0, -4], np.float32)}
  arrays, _ = messages.encode(delta)
  shared = [theta["w"], np.asarray(0, np.int32)]
  box.announce(0)
  box.exchange(
    0,
    0,
    arrays,
    weight=512.0,
    state=box.fingerprint(0, shared),
    snapshot=lambda: (0, shared),
  )
  contents = {path: store.get(path, 2**20) for path in PATHS}
  return {
    path: bytes(content)
    for path, content in contents.items()
    if content is not None
  }


def page_text(objects):
  """The objects as the page shows them."""
  blocks = []
  for path, content in objects.items():
    lines = [f"`{path}`, {len(content)} bytes:", ""]
    if content.startswith(b"{"):
      lines.append(f"    {content.decode().rstrip()}")
    else:
      for start in range(0, len(content), _HEX_BYTES):
        row = content[start : start + _HEX_BYTES]
        lines.append(f"    {start:03x}  {row.hex(' ', 2)}")
    blocks.append("\n".join(lines))
  return "\n" + "\n\n".join(blocks) + "\n\n"


def objects_on_page():
  """The objects that the page shows, by path."""
  example = PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0]
  objects = {}
  for block in re.split(r"^`", example, flags=re.MULTILINE)[1:]:
    path, _, rest = block.partition("`")
    lines = re.findall(r"^    (.*)$", rest, re.MULTILINE)
    if lines[0].startswith("{"):
      objects[path] = lines[0].encode() + b"\n"
    else:
      rows = [line.partition("  ")[2] for line in lines]
      objects[path] = bytes.fromhex("".join(rows))
  return objects


def main():
  """Writes the objects into the page."""
  before, _, rest = PAGE.read_text().partition(_BEGIN)
  _, _, after = rest.partition(_END)
  example = page_text(written_objects())
  PAGE.write_text(before + _BEGIN + example + _END + after)


if __name__ == "__main__":
  main()
