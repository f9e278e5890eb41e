"""Folders of tensors: what belongs to a checkpoint, and damaged ones."""

import json
import os
import struct
import weakref

import jax
import ml_dtypes
import numpy as np
import pytest

from dilocox_jax.models import adapters, tensor_files, weights
from dilocox_jax.models.transformer import build_model
from dilocox_jax.plan.model.adapters import Lora
from dilocox_jax.plan.model.shapes import ModelShape
from tests import damage

numpy_files = pytest.importorskip("safetensors.numpy")
SHAPE = ModelShape(2, 8, 2, 8, 16)
FIRST, SECOND = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
INDEX = tensor_files.INDEX_FILE


@pytest.fixture(scope="module", name="params")
def params_fixture():
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(build_model(SHAPE).init, jax.random.key(0))
  return jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape)), shapes)


@pytest.fixture(name="folder")
def folder_fixture(tmp_path, params):
  weights.write_checkpoint(tmp_path, SHAPE, params)
  return tmp_path


def divide(folder):
  """Divides the tensors among two files; returns the index and the tensors."""
  tensors = numpy_files.load_file(folder / "model.safetensors")
  (folder / "model.safetensors").unlink()
  names = sorted(tensors)
  weight_map = dict.fromkeys(names[::2], FIRST)
  weight_map |= dict.fromkeys(names[1::2], SECOND)
  for name in (FIRST, SECOND):
    part = {key: x for key, x in tensors.items() if weight_map[key] == name}
    numpy_files.save_file(part, folder / name)
  write_index(folder, weight_map)
  return weight_map, tensors


def write_index(folder, weight_map):
  index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
  (folder / INDEX).write_text(json.dumps(index))


def raw(folder, dtype, of):
  """Replaces the file by one of tensors in a type that the library lacks."""
  tensors = numpy_files.load_file(folder / "model.safetensors")
  header = {}
  body = b""
  for name, values in tensors.items():
    part = of(values)
    offsets = [len(body), len(body) + len(part)]
    shape = list(values.shape)
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    body += part
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  content = struct.pack("<Q", len(text)) + text + body
  (folder / "model.safetensors").write_bytes(content)


def read(folder):
  return weights.read_checkpoint(folder)


def assert_same(found, params):
  shape, values = found
  assert shape == SHAPE
  jax.tree.map(np.testing.assert_array_equal, values, params)


def refused(match, function, *arguments):
  with pytest.raises(ValueError, match=match) as error:
    function(*arguments)
  assert "\n" not in str(error.value)


# Which files belong to a checkpoint.


@pytest.mark.parametrize(
  "left", ["model-00003-of-00003.safetensors", "adapter_model.safetensors"]
)
def test_a_file_that_the_index_does_not_name_is_not_read(folder, params, left):
  _, tensors = divide(folder)
  other = {name: x + 1 for name, x in tensors.items()}
  numpy_files.save_file(other, folder / left)
  assert_same(read(folder), params)


def test_without_an_index_the_usual_name_alone_is_read(folder, params):
  tensors = numpy_files.load_file(folder / "model.safetensors")
  other = {name: x + 1 for name, x in tensors.items()}
  numpy_files.save_file(other, folder / SECOND)
  assert_same(read(folder), params)
  (folder / "model.safetensors").rename(folder / FIRST)
  refused("2 .safetensors files and no model.saf", read, folder)
  (folder / SECOND).unlink()
  assert_same(read(folder), params)


def test_a_tensor_is_read_from_the_file_that_the_index_names(folder, params):
  weight_map, tensors = divide(folder)
  everything = {
    name: values if weight_map[name] == SECOND else values + 1
    for name, values in tensors.items()
  }
  numpy_files.save_file(everything, folder / SECOND)
  assert_same(read(folder), params)


def test_a_file_and_an_index_of_two_saves_are_refused(folder, params):
  _, tensors = divide(folder)
  numpy_files.save_file(tensors, folder / "model.safetensors")
  refused("and also model.safetensors.index.json, which", read, folder)
  write_index(folder, dict.fromkeys(tensors, "model.safetensors"))
  assert_same(read(folder), params)


@pytest.mark.parametrize(
  ("change", "said"),
  [
    (lambda m: m | {"more": FIRST}, "has the tensor 'more', but it has not"),
    (lambda m: dict(list(m.items())[1:]), "the checkpoint is no llama: it lac"),
    (lambda m: dict.fromkeys(m, FIRST), "has the tensor .* but it has not"),
    (lambda m: dict.fromkeys(m, "model-3.safetensors"), "No such file"),
    (lambda m: dict.fromkeys(m, "../other.safetensors"), "names no .safetens"),
    (lambda m: dict.fromkeys(m, 5), "5 names no .safetensors file"),
    (lambda m: {}, "has no weight_map"),
    (lambda m: [*m], "has no weight_map"),
  ],
)
def test_an_index_that_does_not_fit_is_one_line(folder, change, said):
  weight_map, _ = divide(folder)
  write_index(folder, change(weight_map))
  refused(said, read, folder)


@pytest.mark.parametrize(
  "left",
  [
    FIRST,
    INDEX,
    "pytorch_model.bin",
    "adapter_config.json",
    "config.json",
    "generation_config.json",
  ],
)
def test_what_another_save_left_is_not_written_beside(tmp_path, params, left):
  (tmp_path / left).write_text("{}")
  lora = Lora(rank=2)
  if left != "config.json":  # It is replaced.
    refused(
      f"has {left} of another checkpoint",
      *(weights.write_checkpoint, tmp_path, SHAPE, params),
    )
  if left != "adapter_config.json":
    refused(
      f"has {left} of another checkpoint",
      *(adapters.export, lora, tmp_path, SHAPE, {}),
    )
  assert [path.name for path in tmp_path.iterdir()] == [left]


def test_settings_of_another_program_are_not_replaced(tmp_path, params):
  """A run's directory has a config.json, too."""
  settings = tmp_path / "config.json"
  for text in ('{"seed": 0}', "[]", "text"):
    settings.write_text(text)
    refused(
      "is not the config of a checkpoint",
      *(weights.write_checkpoint, tmp_path, SHAPE, params),
    )
    assert settings.read_text() == text


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_folder_is_not_written_over(tmp_path, params, name):
  (tmp_path / name).mkdir()
  refused(
    f"{name} is no file",
    *(weights.write_checkpoint, tmp_path, SHAPE, params),
  )
  assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_checkpoint_replaces_the_one_that_was_written_before(folder, params):
  twice = jax.tree.map(lambda x: 2 * x, params)
  weights.write_checkpoint(folder, SHAPE, twice)
  assert_same(read(folder), twice)


def test_a_write_that_is_killed_leaves_no_checkpoint_of_two_models(
  folder, params, monkeypatch
):
  def killed(*arguments):
    raise KeyboardInterrupt

  monkeypatch.setattr(weights, "save_json", killed)
  with pytest.raises(KeyboardInterrupt):
    weights.write_checkpoint(folder, SHAPE, params)
  assert not weights.is_checkpoint(folder)


# Types of values, and damage.


@pytest.mark.parametrize(
  ("dtype", "narrow"),
  [
    ("BF16", ml_dtypes.bfloat16),
    ("F16", np.float16),
    ("F64", np.float64),
    ("F8_E4M3", ml_dtypes.float8_e4m3fn),
    ("F8_E5M2", ml_dtypes.float8_e5m2),
    ("F8_E4M3FNUZ", ml_dtypes.float8_e4m3fnuz),
    ("F8_E5M2FNUZ", ml_dtypes.float8_e5m2fnuz),
  ],
)
def test_floats_of_every_width_are_read(folder, params, dtype, narrow):
  raw(folder, dtype, lambda x: x.astype(narrow).tobytes())
  expected = jax.tree.map(lambda x: x.astype(narrow).astype("f4"), params)
  assert_same(read(folder), expected)


@pytest.mark.parametrize(
  ("dtype", "of", "said"),
  [
    ("I8", lambda x: bytes(x.size), "has the type int8, and not that of a w"),
    ("BOOL", lambda x: bytes(x.size), "has the type bool, and not that of"),
    ("F4", lambda x: bytes(x.size // 2), "has the type F4, which cannot be"),
    ("C64", lambda x: bytes(8 * x.size), "has the type C64, which cannot be"),
    (
      "F64",
      lambda x: (x + np.float64(1e300)).tobytes(),
      "values that are not finite",
    ),
    ("F32", lambda x: (x * np.nan).tobytes(), "values that are not finite"),
    ("F32", lambda x: (x / np.float32(0)).tobytes(), "that are not finite"),
    ("F128", lambda x: bytes(16 * x.size), "is damaged .*unknown variant"),
  ],
)
def test_what_is_no_weight_is_one_line(folder, dtype, of, said):
  with np.errstate(all="ignore"):
    raw(folder, dtype, of)
  refused(said, read, folder)


def test_a_tensor_is_read_in_blocks_of_rows(folder, params, monkeypatch):
  monkeypatch.setattr(tensor_files, "_BLOCK_BYTES", 100)
  tensors = tensor_files.open_tensors(folder)
  embedding = tensors["model.embed_tokens.weight"]
  blocks = list(embedding.blocks(slice(2, 16)))
  assert [rows.stop - rows.start for rows, _ in blocks] == [3, 3, 3, 3, 2]
  values = np.concatenate([values for _, values in blocks])
  np.testing.assert_array_equal(values, params["embed"]["embedding"][2:])
  assert_same(read(folder), params)


# A model that is divided among files.


def test_a_large_model_is_divided_among_files(tmp_path, params):
  limit = 1000
  weights.write_checkpoint(tmp_path, SHAPE, params, max_file_bytes=limit)
  index = json.loads((tmp_path / INDEX).read_text())
  names = sorted(set(index["weight_map"].values()))
  count = len(names)
  assert count > 1
  assert names == [
    f"model-{number:05d}-of-{count:05d}.safetensors"
    for number in range(1, count + 1)
  ]
  written = {path.name for path in tmp_path.iterdir()}
  assert written == {*names, INDEX, "config.json"}
  total = 0
  for name in names:
    tensors = numpy_files.load_file(tmp_path / name)
    num_bytes = sum(values.nbytes for values in tensors.values())
    total += num_bytes
    assert num_bytes <= limit
    assert {index["weight_map"][key] for key in tensors} == {name}
  assert index["metadata"]["total_size"] == total
  assert_same(read(tmp_path), params)


def test_files_of_another_division_are_not_written_beside(folder, params):
  with pytest.raises(ValueError, match="has model.safetensors of another"):
    weights.write_checkpoint(folder, SHAPE, params, max_file_bytes=1000)
  with pytest.raises(ValueError, match="max_file_bytes=0 must be at least 1"):
    weights.write_checkpoint(folder, SHAPE, params, max_file_bytes=0)
  assert_same(read(folder), params)


def test_a_leaf_becomes_an_array_when_it_is_written(tmp_path, params):
  """So memory holds one leaf of a large model at a time."""
  in_memory = []

  class Leaf:
    def __init__(self, values):
      self.values = values

    def __array__(self, dtype=None, copy=None):
      array = np.array(self.values)
      in_memory.append(weakref.ref(array))
      assert sum(ref() is not None for ref in in_memory) <= 2
      return array

  weights.write_checkpoint(tmp_path, SHAPE, jax.tree.map(Leaf, params))
  assert len(in_memory) == len(jax.tree.leaves(params))
  assert_same(read(tmp_path), params)


def test_a_damaged_file_is_one_line_or_read_as_it_was(folder, params):
  file = folder / "model.safetensors"
  content = file.read_bytes()
  for what, damaged in damage.in_bytes(content, flips=100):
    file.write_bytes(damaged)
    found = damage.outcome(what, lambda: read(folder))
    if found:  # Only blanks of the header, and its "format", are not checked.
      assert_same(found, params)


def test_a_flipped_bit_of_a_value_is_noticed(folder):
  file = folder / "model.safetensors"
  content = file.read_bytes()
  file.write_bytes(content[:-2] + bytes([content[-2] ^ 64]) + content[-1:])
  refused("its tensors are not those that were written", read, folder)


def test_a_damaged_config_is_one_line_or_says_what_the_files_have(
  folder, params
):
  file = folder / "config.json"
  config = json.loads(file.read_text())
  cases = [*damage.in_fields(config), ("empty", ""), ("a list", "[]")]
  for what, text in cases:
    file.write_text(text)
    found = damage.outcome(what, lambda: read(folder))
    if found:
      jax.tree.map(np.testing.assert_array_equal, found[1], params)
  for what, content in damage.in_bytes(json.dumps(config).encode()):
    file.write_bytes(content)
    damage.outcome(what, lambda: read(folder))


def test_a_damaged_index_is_one_line_or_read_as_it_was(folder, params):
  divide(folder)
  index = json.loads((folder / INDEX).read_text())
  for what, text in damage.in_fields(index):
    (folder / INDEX).write_text(text)
    if found := damage.outcome(what, lambda: read(folder)):
      assert_same(found, params)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", INDEX])
def test_a_folder_in_place_of_a_file_is_one_line(folder, name):
  (folder / name).unlink(missing_ok=True)
  (folder / name).mkdir()
  refused(name, read, folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", INDEX])
def test_a_fifo_in_place_of_a_file_is_not_waited_for(folder, name):
  (folder / name).unlink(missing_ok=True)
  os.mkfifo(folder / name)
  refused(f"{name} is no file", read, folder)
