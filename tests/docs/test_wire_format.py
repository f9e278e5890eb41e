"""The page of the wire format shows what the code writes."""

import doctest

from dilocox_jax.mailbox_protocol import messages
from dilocox_jax.mailbox_protocol.roster import MailboxRules, run_terms
from tests.docs import wire_example


def test_the_example_is_what_a_replica_writes():
  written = wire_example.written_objects()
  assert list(written) == list(wire_example.PATHS)
  shown = wire_example.objects_on_page()
  hint = "run python -m tests.docs.wire_example"
  assert shown == written, hint


def test_the_program_on_the_page_reads_the_message():
  failed, tried = doctest.testfile(
    str(wire_example.PAGE), module_relative=False
  )
  assert tried > 10 and not failed


def test_the_page_has_every_folder_and_every_term():
  page = wire_example.PAGE.read_text()
  folders = [
    messages.seat_path(2),
    messages.message_path(12, 0, "oslo"),
    messages.proposal_path(12, 0),
    messages.manifest_path(12, 0),
    *(messages.snapshot_path(64, part) for part in ("claim", "arrays")),
    messages.snapshot_path(64, "index"),
    *messages.gone_paths(0),
  ]
  terms = run_terms({}, "", MailboxRules())
  missing = [name for name in (*folders, *terms) if f"`{name}`" not in page]
  assert not missing
