"""Texts of every source, and their split into training and held-out files."""

import math
import sysconfig

import numpy as np
import pytest

from dilocox_jax.data import corpus, sources

FILES = {f"folder/{i}.txt": f"content {i}\n".encode() * 3 for i in range(200)}
HELD_OUT = [path for path in FILES if corpus.is_held_out(path, 0.2)]


def made(files=FILES, fraction=0.2, **options):
  return corpus.from_files("text_files", files, fraction, **options)


def lines(tokens):
  return set(tokens.tobytes().split(b"\n")) - {b""}


def refused(text, function, *arguments, **options):
  with pytest.raises(ValueError, match=text) as error:
    function(*arguments, **options)
  assert "\n" not in str(error.value)


def test_every_file_is_in_one_text_and_a_larger_share_keeps_those_held_out():
  loaded = made()
  train = lines(loaded.train)
  held = lines(loaded.validation)
  assert not train & held and len(train | held) == len(FILES)
  assert held == {FILES[p].split(b"\n")[0] for p in HELD_OUT}
  assert loaded.num_files == 200 and loaded.vocab_size == 256
  assert loaded.bytes_per_token == 1.0 and loaded.train.dtype == np.uint8
  kept = [path for path in sorted(FILES) if path not in HELD_OUT]
  joined = b"\n".join(FILES[path] for path in kept)
  assert loaded.train.tobytes() == joined
  # Five standard deviations of a share of 200 draws.
  assert abs(len(HELD_OUT) / 200 - 0.2) < 5 * np.sqrt(0.2 * 0.8 / 200)
  assert corpus.is_held_out("a.txt", 0.1)
  assert corpus.is_held_out("ast.py", 0.8)
  assert not corpus.is_held_out("ast.py", 0.7)


def test_neither_more_files_nor_another_order_nor_copies_move_a_file():
  few = made({path: FILES[path] for path in sorted(FILES)[::2]})
  whole = made()
  turned = made(dict(reversed(FILES.items())))
  copies = {f"copies/{i}.txt": FILES[HELD_OUT[0]] for i in range(9)}
  for more in (whole, made(FILES | copies)):
    assert lines(few.train) < lines(more.train)
    assert lines(few.validation) < lines(more.validation)
    assert not lines(more.train) & lines(more.validation)
  np.testing.assert_array_equal(whole.train, turned.train)
  assert whole.digest == turned.digest


def test_held_out_files_choose_or_judge_and_training_stays():
  plain = made()
  copies = [f"copies/{i}.txt" for i in range(100)]
  copies = {p: FILES[HELD_OUT[0]] for p in copies if corpus.is_held_out(p, 0.2)}
  halved = made(FILES | copies, judge_fraction=0.5)
  parts = [lines(t) for t in (halved.train, halved.validation, halved.judge)]
  assert all(parts) and sum(map(len, parts)) == len(set().union(*parts)) == 200
  assert parts[1] | parts[2] == lines(plain.validation)
  np.testing.assert_array_equal(halved.train, plain.train)
  assert plain.judge is None
  for share in (1e-6, 1 - 1e-6):
    refused(f"judge_fraction={share}", made, judge_fraction=share)


def test_the_digest_names_paths_and_contents():
  first = FILES["folder/7.txt"]
  second = FILES["folder/8.txt"]
  others = (
    FILES,
    FILES | {"folder/7.txt": first[:-1] + b"."},
    FILES | {"folder/new.txt": b""},
    {p.replace("/7.txt", "/7.txu"): c for p, c in FILES.items()},
    FILES | {"folder/7.txt": second, "folder/8.txt": first},
    {"ab": b"c"},
    {"a": b"bc"},
  )
  digests = {corpus.digest_of(files) for files in others}
  assert len(digests) == len(others) and {len(d) for d in digests} == {16}


def test_a_share_that_leaves_a_text_empty_is_refused():
  one = {"a.txt": b"text"}
  refused("no validation text.*=1e-06 puts 0 of 1.* raise", made, one, 1e-6)
  refused("no training text.* more files.* lower", made, one, 1 - 1e-6)


NAMES = [f"{folder}/{i}.txt" for folder in ("a", "b/c") for i in range(40)]


def write(root, names=NAMES, text="text of {}\n"):
  for name in names:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.format(name))


def text_files(globs, **options):
  return sources.text_files(globs, validation_fraction=0.2, **options)


def texts(loaded):
  return lines(loaded.train) | lines(loaded.validation)


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_several_globs_are_parts_in_their_order(names, tmp_path):
  """Also where files of both have the same name."""
  for name in names:
    write(tmp_path / name, [f"{n}.txt" for n in range(40)], "{} in " + name)
  globs = [f"{tmp_path}/{name}/*.txt" for name in names]
  loaded = text_files(";".join(globs))
  first, second = np.split(loaded.train, loaded.parts[:1])
  assert len(loaded.parts) == 2 and sum(loaded.parts) == len(loaded.train)
  for part, name in zip((first, second), names, strict=True):
    assert {line[-4:].decode() for line in lines(part)} == {f"in {name}"}
  one = text_files(globs[0])
  assert one.parts == (len(one.train),) and loaded.num_files == 80
  np.testing.assert_array_equal(one.train, first)
  # One text is cut in pieces, of which some validate; one line is not.
  (tmp_path / "one.txt").write_text("".join(f"{n}\n" for n in range(1000)))
  one = text_files(f"{tmp_path}/one.txt")
  together = lines(one.train) | lines(one.validation)
  assert sorted(map(int, together)) == list(range(1000))
  assert 0.8 < len(one.train) / (len(one.train) + len(one.validation)) < 1
  refused("of 1 files .* more files are needed", text_files, f"{tmp_path}/a/0*")
  write(tmp_path / "empty", ["only.txt"], "")
  globs = f"{globs[0]};{tmp_path}/empty/*"
  refused("training text in 1 of 2 globs", text_files, globs)


def test_the_standard_library_leaves_out_what_varies(tmp_path, monkeypatch):
  real = sources.stdlib(validation_fraction=0.1)
  assert real.train.size + real.validation.size > 1_000_000
  assert b"import " in real.train.tobytes()
  modules = [f"{folder}{i}.py" for folder in ("", "xml/") for i in range(50)]
  left_out = (
    "test/test_x.py xml/tests/test_x.py site-packages/other/x.py README.txt"
    " dist-packages/x.py __pycache__/x.py idlelib/idle_test/x.py lib2to3/x.py"
    " config-3.11-machine/x.py _sysconfigdata_machine.py sitecustomize.py"
  )
  write(tmp_path, modules + left_out.split())
  monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
  loaded = sources.stdlib(validation_fraction=0.2)
  assert texts(loaded) == {f"text of {name}".encode() for name in modules}
  (tmp_path / "7.py").unlink()
  (tmp_path / "7.py").symlink_to("nowhere")
  assert sources.stdlib(validation_fraction=0.2).num_files == len(modules) - 1


def test_sources_have_names_and_get_the_settings_that_they_read():
  for name in ("stdlib", "synthetic"):
    loaded = [
      sources.load_corpus(name, glob="none", validation_fraction=f, seed=s)
      for f, s in ((0.2, 0), (0.3, 0), (0.2, 1))
    ]
    assert loaded[0].name == name
    assert 0 < loaded[0].validation.size < loaded[1].validation.size
    seeds_differ = loaded[0].digest != loaded[2].digest
    assert seeds_differ == sources.reads(name, "seed") == (name == "synthetic")
  refused("'wiki': have: stdlib, text_files", sources.load_corpus, "wiki")
  with pytest.raises(ValueError, match="color"):
    sources.register_source("bad", lambda color: None)  # pyright: ignore


ENTROPY_NATS = -sum(p * math.log(p) for p in (1 / 2, 1 / 4, 1 / 8, 1 / 8))


def test_synthetic_text_has_the_entropy_that_it_states():
  size = 16
  num_tokens = 200_000
  text = sources.synthetic(
    3, num_tokens=num_tokens, vocab_size=size, validation_fraction=0.5
  )
  assert len(text.train) == num_tokens == 2 * len(text.validation)
  counts = np.zeros((size,) * 3)
  np.add.at(counts, (text.train[:-2], text.train[1:-1], text.train[2:]), 1)
  pairs = counts.sum(0) / counts.sum((0, 1))[:, None]
  assert ((pairs > 0).sum(axis=1) == 4).all()
  np.testing.assert_allclose(counts.sum((0, 2)), num_tokens / size, rtol=0.1)
  triples = counts / np.maximum(counts.sum(2, keepdims=True), 1)
  for tokens in (text.train, text.validation):
    # Counting biases the loss by 1e-3 at most, its spread is 0.002 nats.
    loss = -np.log(pairs[tokens[:-1], tokens[1:]]).mean()
    assert abs(loss - ENTROPY_NATS) < 0.01
  # No longer context helps, and the two texts are independent.
  seen = text.train[:-2], text.train[1:-1], text.train[2:]
  assert abs(-np.log(triples[seen]).mean() - ENTROPY_NATS) < 0.01
  both = text.train[: num_tokens // 2] == text.validation
  assert both.mean() < 2 / size


def test_synthetic_text_is_the_same_everywhere():
  # The digest is from a second program, which does not use numpy.
  first, longer = (sources.synthetic(0, num_tokens=n) for n in (1000, 2000))
  assert first.digest == "a801deeb65440c84"
  np.testing.assert_array_equal(longer.train[:1000], first.train)
  for size in (4, 256, 1000):
    drawn = sources.synthetic(5, num_tokens=20_000, vocab_size=size).train
    assert (drawn.min(), drawn.max()) == (0, size - 1)
