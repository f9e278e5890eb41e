import json
import pathlib
import sysconfig

import numpy as np
import pytest

from dilocox_jax.data import sources


def write(root, names):
  for name in names:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"text of {name}\n")


NAMES = [f"{folder}/{i}.txt" for folder in ("a", "b/c") for i in range(40)]


def test_text_files_reads_each_matching_file_once(tmp_path):
  write(tmp_path, NAMES + ["a/image.png"])
  corpus = sources.text_files(f"{tmp_path}/**/*.txt", validation_fraction=0.2)
  text = corpus.train.tobytes() + b"\n" + corpus.validation.tobytes()
  lines = [line for line in text.decode().split("\n") if line]
  assert sorted(lines) == sorted(f"text of {name}" for name in NAMES)
  assert corpus.num_files == len(NAMES)


def test_moving_a_folder_changes_neither_digest_nor_split(tmp_path):
  for place in ("here", "far/away"):
    write(tmp_path / place, NAMES)
  here, away = (
    sources.text_files(f"{tmp_path}/{place}/**/*.txt", validation_fraction=0.2)
    for place in ("here", "far/away")
  )
  assert here.digest == away.digest
  np.testing.assert_array_equal(here.validation, away.validation)


def test_a_file_in_a_new_folder_moves_no_other_file(tmp_path):
  # The common folder of the matches moves up; paths must not follow it.
  write(tmp_path, [n for n in NAMES if n.startswith("a/")])
  before = sources.text_files(f"{tmp_path}/**/*.txt", validation_fraction=0.2)
  write(tmp_path, ["z/new.txt"])
  after = sources.text_files(f"{tmp_path}/**/*.txt", validation_fraction=0.2)
  old = set(before.validation.tobytes().split(b"\n"))
  assert old - {b""} <= set(after.validation.tobytes().split(b"\n"))
  assert before.digest != after.digest


def test_a_pattern_may_be_relative_or_have_no_wildcard(tmp_path, monkeypatch):
  write(tmp_path, NAMES)
  monkeypatch.chdir(tmp_path)
  relative = sources.text_files("./**/*.txt", validation_fraction=0.2)
  absolute = sources.text_files(f"{tmp_path}/**/*.txt", validation_fraction=0.2)
  assert relative.digest == absolute.digest
  with pytest.raises(ValueError, match="of 1 files"):
    sources.text_files("a/0.txt")


@pytest.mark.parametrize("pattern", ["", "nowhere/*.txt", "a"])
def test_a_pattern_without_files_is_named_in_one_line(
  pattern, tmp_path, monkeypatch
):
  write(tmp_path, NAMES)
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match="give a pattern") as error:
    sources.text_files(pattern)
  assert repr(pattern) in str(error.value)
  assert "\n" not in str(error.value)


def test_a_single_file_is_too_few(tmp_path):
  write(tmp_path, ["only.txt"])
  with pytest.raises(ValueError, match="of 1 files .* more files are needed"):
    sources.text_files(f"{tmp_path}/*.txt")


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
  write(tmp_path, NAMES)

  def refuse(path, mode):
    raise PermissionError(13, "Permission denied")

  monkeypatch.setattr(pathlib.Path, "open", refuse)
  with pytest.raises(ValueError, match=r"cannot read .*\.txt \(Permission"):
    sources.text_files(f"{tmp_path}/**/*.txt")


def test_the_standard_library_is_real_text_in_the_share_asked_for():
  corpus = sources.stdlib(validation_fraction=0.1)
  num_bytes = corpus.train.size + corpus.validation.size
  assert num_bytes > 1_000_000
  assert corpus.num_files > 100
  # Files differ in size by a thousand, so bytes follow files only roughly.
  assert 0.05 < corpus.validation.size / num_bytes < 0.2
  assert b"import " in corpus.train.tobytes()
  assert corpus.digest == sources.stdlib(validation_fraction=0.3).digest


def fake_library(root, monkeypatch):
  modules = [
    f"{folder}module{i}.py" for folder in ("", "xml/") for i in range(50)
  ]
  left_out = [
    "test/test_x.py",
    "xml/tests/test_x.py",
    "site-packages/other/x.py",
    "dist-packages/x.py",
    "__pycache__/x.py",
    "idlelib/idle_test/x.py",
    "lib2to3/x.py",
    "config-3.11-machine/python-config.py",
    "_sysconfigdata_machine.py",
    "sitecustomize.py",
    "README.txt",
  ]
  write(root, modules + left_out)
  monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
  return modules


def test_the_standard_library_leaves_out_what_varies(tmp_path, monkeypatch):
  modules = fake_library(tmp_path, monkeypatch)
  corpus = sources.stdlib(validation_fraction=0.2)
  text = corpus.train.tobytes() + b"\n" + corpus.validation.tobytes()
  lines = [line for line in text.decode().split("\n") if line]
  assert sorted(lines) == sorted(f"text of {name}" for name in modules)


def test_an_unreadable_file_of_the_library_is_skipped(tmp_path, monkeypatch):
  modules = fake_library(tmp_path, monkeypatch)
  read_bytes = pathlib.Path.read_bytes

  def refuse_one(path):
    if path.name == "module7.py":
      raise PermissionError(13, "Permission denied")
    return read_bytes(path)

  monkeypatch.setattr(pathlib.Path, "read_bytes", refuse_one)
  assert sources.stdlib(validation_fraction=0.2).num_files == len(modules) - 2


def test_load_finds_every_source_by_its_name(tmp_path):
  write(tmp_path, NAMES)
  # The others have tests of their own, test_shards.py and test_huggingface.py.
  for name in sources.SOURCES.keys() - {"shards", "huggingface"}:
    corpus = sources.load_corpus(
      name, glob=f"{tmp_path}/**/*.txt", validation_fraction=0.2
    )
    assert corpus.name == name
    assert corpus.train.size > corpus.validation.size > 0


def test_load_hands_on_what_its_source_needs():
  first, second = (
    sources.load_corpus("synthetic", seed=s).digest for s in (1, 2)
  )
  assert first != second
  few, many = (
    sources.load_corpus(name, validation_fraction=f).validation.size
    for name in ("synthetic",)
    for f in (0.1, 0.2)
  )
  assert few < many


def test_an_unknown_source_is_answered_with_the_known_ones():
  with pytest.raises(ValueError, match="'wiki': have: stdlib, text_files"):
    sources.load_corpus("wiki")


def test_damage_is_an_error_or_left_out_counted_and_logged(tmp_path, caplog):
  lines = [json.dumps({"text": name}) for name in NAMES]
  (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{no", "[]"]))
  glob = f"{tmp_path}/*"
  with pytest.raises(ValueError, match="line 81 is no JSON"):
    sources.load_corpus("text_files", glob=glob)
  corpus = sources.load_corpus("text_files", glob=glob, damaged="skip")
  assert corpus.num_skipped == 2 and corpus.num_files == len(NAMES)
  for line, message in zip((81, 82), caplog.messages, strict=True):
    assert f"a.jsonl, line {line} " in message


@pytest.mark.parametrize("names", [("b", "a"), ("a", "b")])
def test_several_globs_are_parts_in_their_order(names, tmp_path):
  """Also where files of both have the same name."""
  for name in "ab":
    write(tmp_path / name, [f"{n}.txt" for n in range(40)])
    for path in (tmp_path / name).iterdir():
      path.write_text(f"{path.read_text()} in {name}")
  globs = ";".join(f"{tmp_path}/{name}/*.txt" for name in names)
  corpus = sources.text_files(globs, validation_fraction=0.2)
  first, second = np.split(corpus.train, corpus.parts[:1])
  assert len(corpus.parts) == 2 and sum(corpus.parts) == len(corpus.train)
  for part, name in zip((first, second), names, strict=True):
    lines = part.tobytes().decode().split("\n")
    ends = {line[-4:] for line in lines if not line.startswith("text")}
    assert ends == {f"in {name}"}
  assert corpus.num_files == 80
  one = sources.text_files(globs.split(";")[0], validation_fraction=0.2)
  assert one.parts == (len(one.train),)
  np.testing.assert_array_equal(one.train, first)


def test_a_glob_without_training_text_is_refused(tmp_path):
  write(tmp_path / "a", [f"{n}.txt" for n in range(40)])
  write(tmp_path / "b", ["only.txt"])
  (tmp_path / "b/only.txt").write_text("")
  globs = f"{tmp_path}/a/*.txt;{tmp_path}/b/*.txt"
  with pytest.raises(ValueError, match="training text in 1 of 2 globs"):
    sources.text_files(globs, validation_fraction=0.2)
