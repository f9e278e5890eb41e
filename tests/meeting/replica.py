"""One replica as a process of its own: `python -m tests.meeting.replica JSON`.

It writes what it has at the end, and when it took part, to a file.
"""

import json
import logging
import pathlib
import sys
import time
from typing import Any

from dilocox_jax.meeting.admission import DiffersError
from dilocox_jax.meeting.mailbox import Mailbox
from dilocox_jax.meeting.rules import MailboxRules
from dilocox_jax.meeting.store import AwayError, Store
from tests.meeting.toy import Toy

STEP_S = 0.03


class MarkedStore(Store):
  """It refuses to write while a file beside it says so."""

  def _write(self, path: str, data: bytes, mode: Any) -> None:
    if pathlib.Path(f"{self.where}.read-only").exists():
      raise AwayError("read-only file system")
    super()._write(path, data, mode)


def main(options: dict[str, Any]) -> None:
  """Takes part in a run until it ends."""
  logging.basicConfig(level=logging.INFO, format="%(message)s")
  times: list[float] = []

  def work(event: int) -> None:
    times.append(time.time())
    time.sleep(STEP_S)

  toy = Toy(options["name"], options["events"], work=work)
  skew = options["skew"]
  try:
    box = Mailbox(
      MarkedStore(options["folder"]),
      name=options["name"],
      secret=options["secret"],
      config=options["config"],
      rules=MailboxRules(**options["rules"]),
      accept_version=options.get("accept_version", False),
      clock=lambda: time.monotonic() + skew,
    )
  except DiffersError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
  toy.run(box)
  result = {"theta": toy.theta.tobytes().hex(), "times": times}
  result |= {"losses": toy.losses}
  pathlib.Path(options["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
  main(json.loads(sys.argv[1]))
