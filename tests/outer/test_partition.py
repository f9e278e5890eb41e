import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.outer.partition import Partition, Store
from dilocox_jax.plan.schedule.fragments import ORDERS, SLICED, Fragments

LAYERS = 5
DIVISIONS = [
  (1, "strided"),
  (2, "strided"),
  *((count, order) for count in (3, 5) for order in ORDERS),
]


def tree():
  rng = np.random.default_rng(0)
  shapes = {
    "embed": {"embedding": (7, 2)},
    "blocks": {"w": (LAYERS, 3, 2), "norm": {"scale": (LAYERS,)}},
    "head": (4,),
  }
  return jax.tree.map(
    lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
    shapes,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def index(fragment):
  return jnp.int32(fragment) if fragment else 0


def layers_of(fragments, fragment):
  """Rows of stacked leaves, and names of others, in a fragment, by hand."""
  if fragments.num_fragments == 1:
    return list(range(LAYERS)), ["embed", "head"]
  if fragment == 0:
    return [], ["embed", "head"]
  return list(fragments.layers(fragment)), []


def assert_equal(actual, expected):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize(("count", "order"), DIVISIONS)
def test_taking_a_fragment_and_putting_it_back_changes_nothing(count, order):
  partition = Partition(Fragments(count, LAYERS, order))
  whole = tree()
  for fragment in map(index, range(count)):
    part = partition.take(whole, fragment)
    assert_equal(partition.put(whole, fragment, part), whole)


@pytest.mark.parametrize(
  ("count", "order"), [case for case in DIVISIONS if case[1] not in SLICED]
)
def test_a_put_reaches_its_own_fragment_and_no_other(count, order):
  fragments = Fragments(count, LAYERS, order)
  partition = Partition(fragments)
  whole = tree()
  for fragment in range(count):
    part = partition.take(whole, index(fragment))
    changed = partition.put(
      whole, index(fragment), jax.tree.map(lambda x: x + 1, part)
    )
    rows, names = layers_of(fragments, fragment)
    expected = jax.tree.map(np.array, whole)
    for leaf in jax.tree.leaves(expected["blocks"]):
      leaf[rows] += 1
    for name in names:
      expected[name] = jax.tree.map(lambda x: x + 1, expected[name])
    assert_equal(changed, expected)


@pytest.mark.parametrize("fragment", range(3))
def test_a_number_that_is_known_names_its_own_fragment(fragment):
  partition, whole = Partition(Fragments(3, LAYERS)), tree()
  take = jax.jit(partition.take) if fragment else partition.take
  expected = take(whole, index(fragment))
  store = partition.store(lambda part: part, whole)
  for number in (fragment, jnp.int32(fragment)):
    part = partition.take(whole, number)
    assert_equal(part, expected)
    assert_equal(store.get(number), expected)
    assert_equal(partition.put(whole, number, part), whole)
    assert_equal(store.set(number, part), store)


def test_a_short_fragment_ends_in_zeros():
  partition = Partition(Fragments(3, LAYERS))  # Layers 0, 2, 4 and 1, 3.
  whole = tree()
  part = jax.jit(partition.take)(whole, jnp.int32(2))
  assert set(part) == {"blocks"}
  assert set(part["blocks"]) == {"w", "norm"}
  rows, layers = part["blocks"]["w"], whole["blocks"]["w"]
  np.testing.assert_array_equal(rows[:2], layers[1::2])
  np.testing.assert_array_equal(rows[2], np.zeros([3, 2]))
  longer = partition.take(whole, jnp.int32(1))
  np.testing.assert_array_equal(longer["blocks"]["w"], layers[::2])


def test_the_first_fragment_is_all_but_the_blocks():
  whole = tree()
  part = Partition(Fragments(3, LAYERS)).take(whole, 0)
  assert_equal(part, {"embed": whole["embed"], "head": whole["head"]})
  assert_equal(Partition(Fragments(1, LAYERS)).take(whole, 0), whole)


def test_padding_is_never_written_back():
  partition = Partition(Fragments(3, LAYERS))
  whole = tree()
  part = partition.take(whole, jnp.int32(2))
  part = jax.tree.map(lambda x: x.at[2].set(jnp.nan), part)
  assert_equal(partition.put(whole, jnp.int32(2), part), whole)


@pytest.mark.parametrize(("count", "order"), DIVISIONS)
def test_a_store_holds_a_value_for_every_fragment(count, order):
  partition = Partition(Fragments(count, LAYERS, order))
  whole = tree()

  def double(part):
    return optax.EmptyState(), jax.tree.map(lambda x: 2 * x, part)

  store = partition.store(double, whole)
  for fragment in map(index, range(count)):
    expected = double(partition.take(whole, fragment))
    assert_equal(store.get(fragment), expected)


def test_setting_an_entry_of_a_store_leaves_the_others():
  partition = Partition(Fragments(4, LAYERS))
  optimizer = optax.adam(0.1)
  store = partition.store(optimizer.init, tree())
  for changed in range(4):
    value = jax.tree.map(lambda x: x + 1, store.get(index(changed)))
    after = store.set(index(changed), value)
    for fragment in range(4):
      expected = value if fragment == changed else store.get(index(fragment))
      assert_equal(after.get(index(fragment)), expected)


@pytest.mark.parametrize("order", ["sliced", "interleaved"])
def test_a_store_keeps_all_slices_in_one_array(order):
  partition = Partition(Fragments(3, LAYERS, order))
  store = partition.store(lambda part: part, tree())
  assert store.first is None
  for number in (0, 2, jnp.int32(0), jnp.int32(2)):
    part = partition.take(tree(), number)
    assert_equal(store.get(number), part)
    other = jax.tree.map(jnp.negative, part)
    after = store.set(number, other)
    assert_equal(after.get(number), other)
    assert_equal(after.get(1), store.get(1))


def test_a_store_of_one_fragment_has_no_others():
  store = Partition(Fragments(1, LAYERS)).store(lambda part: part, tree())
  assert_equal(store, Store(tree(), None))
  other = jax.tree.map(jnp.negative, tree())
  assert_equal(store.set(0, other).get(0), other)


BLOCK = jnp.zeros((LAYERS, 3))


@pytest.mark.parametrize(
  ("count", "params", "message"),
  [
    (1, {"a": jnp.zeros(3, bool)}, "leaf 'a' of type bool cannot be trained"),
    (1, {"a": jnp.zeros((0, 3))}, "have no values"),
    (2, [BLOCK], "num_fragments=2 divides 5 layers .* there are none"),
    (2, {"a": BLOCK}, "num_fragments=2 divides 5 layers .* there are none"),
    (2, {"blocks": {"a": jnp.zeros(3)}}, r"'blocks/a' .* is not \[5, ...\]"),
    (2, {"blocks": {"0": {"a": BLOCK}}}, r"'blocks/0/a' .* is not \[5, ...\]"),
    (2, {"blocks": {"a": BLOCK}}, "outside has a value for fragment 0"),
    (
      2,
      {"blocks": {"a": BLOCK[:, :0]}, "b": BLOCK},
      "below has a value for fragment 1",
    ),
  ],
)
def test_a_tree_that_cannot_be_divided_is_refused(count, params, message):
  partition = Partition(Fragments(count, LAYERS))
  partition.check(tree())
  with pytest.raises(ValueError, match=message):
    partition.check(params)
