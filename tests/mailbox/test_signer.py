"""Only what a replica signed at a path is accepted there, also a part of it."""

import itertools
import json
import time
from typing import Any

import numpy as np
import pytest

from dilocox_jax.mailbox_protocol import signer as signer_module
from dilocox_jax.mailbox_protocol.ranges import SignedRanges
from dilocox_jax.mailbox_protocol.signer import (
  INDEX_BYTES,
  TAG_BYTES,
  Signer,
  content_bytes,
  signed_bytes,
)
from dilocox_jax.mailbox_protocol.store import RetryingStore, Store

SIGNER = Signer(b"secret", "run")
BLOCK = 100


@pytest.fixture(name="blocks")
def blocks_fixture(monkeypatch):
  """Makes blocks short, so that a short content has many."""
  monkeypatch.setattr(signer_module, "BLOCK_BYTES", BLOCK)
  monkeypatch.setattr("dilocox_jax.mailbox_protocol.ranges.BLOCK_BYTES", BLOCK)


def signed(content, path="a", signer=SIGNER):
  return b"".join(signer.sign(path, content))


def signed_json(content, path="a", signer=SIGNER):
  return signer.sign_json(path, content)


def numbers(num_bytes, seed=0):
  return np.random.default_rng(seed).bytes(num_bytes)


def test_only_what_was_signed_at_a_path_is_accepted_there():
  cases: Any = (
    (signed, Signer.verify, b"content"),
    (signed_json, Signer.verify_json, {"x": [1, 2.5]}),
  )
  for sign, verify, content in cases:
    data = sign(content)
    assert verify(SIGNER, "a", data) == content
    assert verify(SIGNER, "b", data) is None
    assert verify(SIGNER, "a", None) is None
    for other in (Signer(b"another", "run"), Signer(b"secret", "another")):
      assert verify(SIGNER, "a", sign(content, signer=other)) is None
    for end in range(len(data)):
      assert verify(SIGNER, "a", data[:end]) is None
      changed = bytes([*data[:end], data[end] ^ 1, *data[end + 1 :]])
      assert verify(SIGNER, "a", changed) is None
    assert verify(SIGNER, "a", data + b" ") is None
  other = signed(b"", "bc", Signer(b"s", "a"))
  assert Signer(b"s", "ab").verify("c", other) is None
  assert json.loads(SIGNER.sign_json("a", {"x": 1}))["is"] == {"x": 1}
  endless = SIGNER.sign_json("a", {"x": "y" * INDEX_BYTES})
  assert SIGNER.verify_json("a", endless) is None


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(
  "num_bytes", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 40 * BLOCK + 7]
)
def test_a_content_of_any_size_comes_back_however_it_is_divided(num_bytes):
  content = numbers(num_bytes)
  data = signed(content)
  assert len(data) == signed_bytes(num_bytes)
  assert content_bytes(len(data)) == num_bytes
  assert SIGNER.verify("a", data) == content
  parts = [content[start : start + 7] for start in range(0, num_bytes, 7)]
  assert b"".join(SIGNER.sign("a", *parts)) == data


@pytest.mark.usefixtures("blocks")
def test_blocks_of_two_versions_or_at_other_places_are_not_accepted():
  size = 4 * BLOCK
  first = signed(numbers(size))
  second = signed(numbers(size, seed=1))
  start = len(first) - size

  def with_block(target, source, number):
    """Puts a block and its tag of another object in place of a block."""
    data = bytearray(target)
    block = slice(start + number * BLOCK, start + (number + 1) * BLOCK)
    tag = slice(TAG_BYTES * (1 + number), TAG_BYTES * (2 + number))
    data[block] = source[block]
    data[tag] = source[tag]
    return bytes(data)

  for number in range(4):
    assert SIGNER.verify("a", with_block(first, second, number)) is None
  swapped = (
    first[:TAG_BYTES]
    + first[2 * TAG_BYTES : 3 * TAG_BYTES]
    + first[TAG_BYTES : 2 * TAG_BYTES]
    + first[3 * TAG_BYTES : start]
    + first[start + BLOCK : start + 2 * BLOCK]
    + first[start : start + BLOCK]
    + first[start + 2 * BLOCK :]
  )
  assert len(swapped) == len(first)
  assert SIGNER.verify("a", swapped) is None


# Ranges.


def ranges_of(store, num_bytes, digest="", signer=SIGNER):
  return SignedRanges(RetryingStore(store), signer, "a", num_bytes, digest)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_a_range_is_read_without_the_other_blocks(kind, tmp_path):
  store = Store("memory:///" if kind == "memory" else tmp_path)
  content = numbers(10 * BLOCK + 30)
  store.put("a", SIGNER.sign("a", content))
  edges = [0, 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 10 * BLOCK, len(content)]
  for start, stop in itertools.combinations(edges, 2):
    reader = ranges_of(store, len(content))
    assert reader.read(start, stop) == content[start:stop]
  reader = ranges_of(store, len(content))
  before = store.bytes_down
  assert reader.read(210, 230) == content[210:230]
  assert reader.read(310, 330) == content[310:330]
  # The tags are read once, and one block for each range.
  tags = signed_bytes(len(content)) - len(content)
  assert store.bytes_down - before == tags + 2 * BLOCK
  for start, stop in ((-1, 5), (5, 5), (0, len(content) + 1)):
    with pytest.raises(ValueError, match="are not within its 1030 bytes"):
      reader.read(start, stop)


@pytest.mark.usefixtures("blocks")
def test_a_damaged_block_is_found_and_the_other_blocks_are_accepted():
  store = Store("memory:///")
  content = numbers(5 * BLOCK)
  data = bytearray(signed(content))
  data[-BLOCK - 1] ^= 1  # The last byte of block 3.
  store.put("a", bytes(data))
  assert ranges_of(store, len(content)).read(0, 3 * BLOCK) is not None
  assert ranges_of(store, len(content)).read(4 * BLOCK, 5 * BLOCK) is not None
  assert ranges_of(store, len(content)).read(3 * BLOCK, 4 * BLOCK) is None
  assert ranges_of(store, len(content)).read(0, 5 * BLOCK) is None


@pytest.mark.usefixtures("blocks")
def test_a_range_of_another_object_counts_as_missing():
  store = Store("memory:///")
  content = numbers(5 * BLOCK)
  size = len(content)
  assert ranges_of(store, size).read(0, 1) is None  # It is missing.
  data = signed(content)
  store.put("a", data)
  listed = data[:TAG_BYTES].hex()
  assert ranges_of(store, size, digest=listed).read(0, 1) == content[:1]
  assert ranges_of(store, size, digest="00" * TAG_BYTES).read(0, 1) is None
  assert ranges_of(store, size + 1).read(0, 1) is None
  assert ranges_of(store, size - 1).read(0, 1) is None
  stranger = Signer(b"guess", "run")
  assert ranges_of(store, size, signer=stranger).read(0, 1) is None
  store.put("a", data[:-1])
  assert ranges_of(store, size).read(4 * BLOCK, size) is None
  assert ranges_of(store, size).read(0, 1) == content[:1]


# Speed.


def test_large_objects_are_hashed_once_and_not_copied():
  content = np.zeros(2**26, np.uint8)

  def cpu_s(call):
    """Returns the CPU seconds of a call, the shortest of several."""
    seconds = []
    for _ in range(5):
      start_s = time.process_time()
      call()
      seconds.append(time.process_time() - start_s)
    return min(seconds)

  parts = SIGNER.sign("a", content.data)
  assert parts[1].obj is content  # pyright: ignore
  whole = b"".join(parts)
  hash_s = cpu_s(lambda: signer_module.hashlib.sha256(content.data).digest())
  assert cpu_s(lambda: SIGNER.sign("a", content.data)) < 1.5 * hash_s
  assert cpu_s(lambda: SIGNER.verify("a", whole)) < 1.5 * hash_s


def test_a_section_is_verified_alone_and_belongs_to_one_object():
  signer = Signer(b"s" * 64, "run")
  one = signer.sign_sections("path", [[b"head", b"a"], [b"head", b"b"]])
  other = signer.sign_sections("path", [[b"head", b"a"], [b"head", b"c"]])
  section = b"".join(one[:3])
  assert signer.verify_section("path", 0, 2, section) == b"heada"
  assert signer.verify_section("path", 1, 2, section) is None
  assert signer.verify_section("path", 0, 3, section) is None
  assert signer.verify_section("elsewhere", 0, 2, section) is None
  assert signer.verify_section("path", 0, 2, section[:-1] + b"x") is None
  assert signer.verify_section("path", 0, 2, None) is None
  # The same slice of another object has another digest.
  mixed = bytes(other[0])[:32] + section[32:]
  assert mixed != section
  assert signer.verify_section("path", 0, 2, mixed) is None
