import dataclasses

import numpy as np
import pytest

from dilocox_jax.data import corpus

FILES = {f"folder/{i}.txt": f"content {i}\n".encode() * 3 for i in range(200)}


def lines(tokens):
  return set(tokens.tobytes().split(b"\n")) - {b""}


def test_every_file_is_in_one_part_and_no_line_in_both():
  loaded = corpus.from_files("text_files", FILES, 0.2)
  train, validation = lines(loaded.train), lines(loaded.validation)
  assert not train & validation
  assert train | validation == {f"content {i}".encode() for i in range(200)}
  assert loaded.num_files == 200


def test_the_validation_part_has_about_the_share_of_files_asked_for():
  share = sum(corpus.is_held_out(path, 0.2) for path in FILES) / len(FILES)
  # Five standard deviations of a share of 200 draws.
  assert abs(share - 0.2) < 5 * np.sqrt(0.2 * 0.8 / 200)


def test_adding_files_moves_no_other_file():
  few = {path: FILES[path] for path in sorted(FILES)[::2]}
  before = corpus.from_files("text_files", few, 0.2)
  after = corpus.from_files("text_files", FILES, 0.2)
  assert lines(before.train) < lines(after.train)
  assert lines(before.validation) < lines(after.validation)


def test_a_larger_share_keeps_the_files_held_out_before():
  small = {path for path in FILES if corpus.is_held_out(path, 0.1)}
  large = {path for path in FILES if corpus.is_held_out(path, 0.3)}
  assert small and small < large


def test_a_copy_of_a_validation_file_is_not_trained_on():
  held_out = next(p for p in FILES if corpus.is_held_out(p, 0.2))
  copy = next(
    p
    for p in (f"copies/{i}.txt" for i in range(100))
    if not corpus.is_held_out(p, 0.2)
  )
  loaded = corpus.from_files(
    "text_files", {**FILES, copy: FILES[held_out]}, 0.2
  )
  assert not lines(loaded.train) & lines(loaded.validation)
  assert FILES[held_out].split(b"\n")[0] in lines(loaded.validation)


def test_held_out_files_choose_or_judge_and_training_stays():
  plain = corpus.from_files("text_files", FILES, 0.2)
  copy = next(p for p in FILES if corpus.is_held_out(p, 0.2))
  copies = [f"copies/{i}.txt" for i in range(100)]
  copies = {p: FILES[copy] for p in copies if corpus.is_held_out(p, 0.2)}
  first, again = (
    corpus.from_files("text_files", files | copies, 0.2, judge_fraction=0.5)
    for files in (FILES, dict(reversed(FILES.items())))
  )
  parts = [lines(t) for t in (first.train, first.validation, first.judge)]
  assert all(parts) and sum(map(len, parts)) == len(set().union(*parts)) == 200
  assert parts[1] | parts[2] == lines(plain.validation)
  np.testing.assert_array_equal(first.train, plain.train)
  for part in ("train", "validation", "judge"):
    np.testing.assert_array_equal(getattr(first, part), getattr(again, part))
  assert plain.judge is None


@pytest.mark.parametrize("fraction", [1e-6, 1 - 1e-6, 1.0, -0.1, float("nan")])
def test_a_share_that_leaves_no_file_to_judge_or_to_choose_is_refused(fraction):
  with pytest.raises(ValueError, match=f"judge_fraction={fraction}") as error:
    corpus.from_files("text_files", FILES, 0.2, judge_fraction=fraction)
  assert "\n" not in str(error.value)


def test_files_are_kept_apart_by_a_separator():
  files = {path: b"word" for path in FILES if not corpus.is_held_out(path, 0.2)}
  files |= {path: b"held" for path in FILES if corpus.is_held_out(path, 0.2)}
  loaded = corpus.from_files("text_files", files, 0.2)
  assert lines(loaded.train) == {b"word"}
  assert lines(loaded.validation) == {b"held"}


def test_the_digest_ignores_the_order_of_files():
  assert corpus.digest_of(FILES) == corpus.digest_of(
    dict(reversed(FILES.items()))
  )


@pytest.mark.parametrize(
  "other",
  [
    {**FILES, "folder/7.txt": FILES["folder/7.txt"][:-1] + b"."},
    {**FILES, "folder/new.txt": b""},
    {p.replace("/7.txt", "/7.txu"): c for p, c in FILES.items()},
    {
      **FILES,
      "folder/7.txt": FILES["folder/8.txt"],
      "folder/8.txt": FILES["folder/7.txt"],
    },
  ],
  ids=["byte", "empty file", "path", "two contents swapped"],
)
def test_the_digest_changes_with(other):
  assert corpus.digest_of(other) != corpus.digest_of(FILES)


def test_the_digest_tells_a_path_from_content():
  assert corpus.digest_of({"ab": b"c"}) != corpus.digest_of({"a": b"bc"})


def test_a_digest_is_16_hex_digits():
  digest = corpus.digest_of(FILES)
  assert len(digest) == 16 and int(digest, 16) >= 0


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 5.0, float("nan")])
def test_a_share_that_leaves_a_part_empty_is_refused(fraction):
  with pytest.raises(ValueError, match=f"={fraction} must lie above 0"):
    corpus.from_files("text_files", FILES, fraction)


def test_an_empty_part_is_an_error_that_says_what_to_change():
  files = {"a.txt": b"text"}
  text = f"validation_fraction={1e-6} puts 0 of 1 files in validation"
  with pytest.raises(ValueError, match="more files are needed") as error:
    corpus.from_files("text_files", files, 1e-6)
  assert text in str(error.value)
  assert "no validation text" in str(error.value)
  assert "raise validation_fraction" in str(error.value)
  with pytest.raises(ValueError, match="no training text.* lower") as error:
    corpus.from_files("text_files", files, 1 - 1e-6)
  assert "\n" not in str(error.value)


def test_a_corpus_is_a_value():
  loaded = corpus.from_files("text_files", FILES, 0.2)
  with pytest.raises(dataclasses.FrozenInstanceError):
    loaded.name = "other"  # pyright: ignore[reportAttributeAccessIssue]
  assert loaded.train.dtype == np.uint8 and loaded.vocab_size == 256
