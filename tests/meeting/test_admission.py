import pytest

from dilocox_jax.meeting.admission import (
  DiffersError,
  admitted,
  code_digest,
  run_terms,
)
from dilocox_jax.meeting.paths import RUN
from dilocox_jax.meeting.store import Store

CONFIG = {"inner": {"learning_rate": 0.008, "betas": (0.9, 0.95)}, "seed": 1}


@pytest.fixture(name="store")
def store_fixture():
  return Store("memory:///")


def terms(**changes):
  return run_terms(CONFIG, "t" * 64, {"grace_s": 5.0}) | changes


def enter(store, new=None, secret=b"secret", **options):
  new = terms() if new is None else new
  return admitted(store, secret, new, where="s3://bucket/run", **options)


def test_the_first_begins_the_run_and_its_like_are_let_in(store):
  assert enter(store) == enter(store)
  assert enter(store) != enter(Store("memory:///"))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"config": {**CONFIG, "inner": {"learning_rate": 0.5}}},
      r"config.inner.learning_rate is 0.5 here and 0.008 in the run at"
      r" s3://bucket/run: take the run's value",
    ),
    ({"config": {**CONFIG, "new": 1}}, "config.new is 1 here and None"),
    ({"config": {**CONFIG, "id": 1}}, "config.id is 1 here and None"),
    ({"rules": {"grace_s": 6.0}}, "rules.grace_s is 6.0 here"),
    ({"text": "u" * 64}, r"text is uuuuuuuu\.\.\. here and tttttttt\.\.\. in"),
    ({"code": "x"}, "code is 'x' here and .*: install the same, or accept"),
    ({"versions": {"jax": "9"}}, "versions.jax is '9' here and"),
  ],
)
def test_who_differs_is_refused_in_one_line_that_names_the_field(
  store, changes, message
):
  enter(store)
  before = store.get(RUN, 10**6)
  with pytest.raises(DiffersError, match=message) as error:
    enter(store, terms(**changes))
  assert "\n" not in str(error.value)
  assert store.get(RUN, 10**6) == before


def test_other_code_and_versions_can_be_accepted_and_nothing_else(store):
  enter(store)
  enter(store, terms(code="x", versions={}), accept_version=True)
  with pytest.raises(DiffersError, match="text"):
    enter(store, terms(code="x", text="y"), accept_version=True)


def test_who_has_another_secret_is_refused(store):
  enter(store)
  with pytest.raises(DiffersError, match="not sealed with this secret"):
    enter(store, secret=b"another")


def test_the_digest_of_code_sees_texts_and_names(tmp_path):
  (tmp_path / "a.py").write_text("x = 1\n")
  first = code_digest(tmp_path)
  (tmp_path / "notes.txt").write_text("not code")
  assert code_digest(tmp_path) == first
  (tmp_path / "a.py").write_text("x = 2\n")
  second = code_digest(tmp_path)
  (tmp_path / "a.py").rename(tmp_path / "b.py")
  assert len({first, second, code_digest(tmp_path)}) == 3
