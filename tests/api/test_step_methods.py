"""Every method by name, one step at a time, is what the trainer runs."""

import pathlib
import re
import runpy
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import dilocox_jax as dx
from dilocox_jax.config import from_mapping
from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.plan.schedule.methods import METHODS, diloco
from dilocox_jax.trees import leaves_by_path
from tests import runs
from tests.oracles.least_squares import make_problem
from tests.outer.problem import assert_close, loss, nesterov
from tests.tiers import slow

GUIDE = pathlib.Path(__file__).parents[2] / "docs/guides/own_training_loop.py"
EXACT = 1e-12  # float64
COUNT = "sync_interval"
NUM_REPLICAS = 3
NUM_LAYERS = 4
WIDTH = 4
INNER = optax.sgd(0.05)

THREE = {"sync_interval": 6, "num_fragments": 3}
# What each name is given beside its own defaults.
SETTINGS = {
  **dict.fromkeys(METHODS, {"sync_interval": 4}),
  **dict.fromkeys(("allreduce", "cocktail_sgd"), {}),
  "streaming_diloco": THREE | {"overlap_steps": 2},
  "delayed": THREE | {"overlap_steps": 5},
  "overlap_loco": THREE,
}


def config_of(name, settings):
  return from_mapping(
    {
      "total_steps": 200,
      "model": {"preset": "nano", "num_layers": NUM_LAYERS},
      "sync": {"method": name, **settings},
      "adaptive": {"mode": "off"},
      "mesh": {"num_replicas": NUM_REPLICAS},
    }
  )


def by_steps(tx, problem):
  """Parameters of all replicas after one jitted step at a time."""

  def step(params, state, batch):
    gradients = jax.grad(loss)(params, batch)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  program = jax.jit(jax.vmap(step, axis_name="replica"), donate_argnums=(0, 1))
  params = jax.tree.map(
    lambda leaf: jnp.stack([jnp.asarray(leaf)] * NUM_REPLICAS), problem[0]
  )
  state = jax.vmap(tx.init)(params)
  for number in range(problem[1].shape[1]):
    batch = problem[1][:, number], problem[2][:, number]
    params, state = program(params, state, batch)
  assert program._cache_size() == 1  # pyright: ignore
  return params


FAST = ("allreduce", "diloco", "dilocox")


@pytest.mark.parametrize(
  "name", [*FAST, *slow(*sorted(SETTINGS.keys() - FAST))]
)
def test_a_method_by_name_has_the_parts_of_the_trainer(name, x64):
  """tests/outer holds transforms of given parts, and rounds, to the twins."""
  config = config_of(name, SETTINGS[name])
  parts = runs.outer_step(config)
  interval = SETTINGS[name].get(COUNT, 1)
  problem = make_problem(0, NUM_REPLICAS, 5 * interval, NUM_LAYERS, WIDTH, 3)
  is_divided = parts.method.exchanged == "pseudo_gradient"
  fragments = config.fragments if is_divided else None
  found = getattr(dx, name)(INNER, fragments=fragments, **SETTINGS[name])
  expected = dx.step_transform(
    parts.method,
    INNER,
    parts.optimizer,
    exchange=parts.aggregator,
    fragments=fragments,
  )
  assert_close(by_steps(found, problem), by_steps(expected, problem), EXACT)


def unsent(make):
  """Traces a step whose exchange leaves with the replica what it lost."""

  def step():
    tx = make(INNER, exchange=dx.exchange("int", keep_unsent=True))
    params = {"w": jnp.zeros((2, 8, 4))}

    def of_replica(params):
      state = tx.init(params)
      return tx.update(params, state, params)

    jax.eval_shape(jax.vmap(of_replica, axis_name="replica"), params)

  return step


REFUSED = {
  "needs an outer optimizer": lambda: dx.step_transform(diloco(4), INNER),
  "inner=0.1 must be": lambda: dx.diloco(0.1),  # pyright: ignore
  "codec={'bits': 4} must be a codec, or names such as": lambda: dx.diloco(
    INNER,
    codec={"bits": 4},  # pyright: ignore
  ),
  "codec and exchange both say what is sent": lambda: dx.diloco(
    INNER, codec="int", exchange=dx.exchange()
  ),
  "take feedback=1.0": unsent(dx.eager),
  "feedback=1.0": unsent(dx.cocktail_sgd),
  "sync_interval=2.5 must be a whole number": lambda: dx.diloco(
    INNER,
    sync_interval=2.5,  # pyright: ignore
  ),
  "first_interval=2.0 must be a whole number": lambda: dx.diloco(
    INNER,
    first_interval=2.0,  # pyright: ignore
    steps_per_doubling=4,
  ),
  "trainable='w' must be a function": lambda: dx.diloco(
    INNER,
    trainable="w",  # pyright: ignore
  ),
  "fragments would be ignored": lambda: dx.allreduce(INNER, fragments=len),
  "'strided' divides the layers .* leave it out, take one": lambda: dx.delayed(
    INNER, fragment_order="strided"
  ),
  "fragment_order='stridden' must be one of": lambda: dx.delayed(
    INNER, fragment_order="stridden"
  ),
  "exchange=3 must be a dilocox_jax.Aggregator, such": lambda: dx.diloco(
    INNER,
    exchange=3,  # pyright: ignore
  ),
  "has no 'dilocoo'; it has: Aggregator": lambda: dx.dilocoo,  # pyright: ignore
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_said_in_one_line(message):
  errors = TypeError, ValueError, AttributeError
  with pytest.raises(errors, match=message) as error:
    REFUSED[message]()
  assert "\n" not in str(error.value)


def test_a_count_that_is_none_is_left_to_the_method():
  tx = dx.overlap_loco(INNER, sync_interval=4, num_fragments=None)
  state: Any = tx.init({"w": jnp.zeros(8)})
  assert state.view.count == 4


def test_every_name_of_the_front_door_is_there():
  assert set(METHODS) < set(dir(dx))
  assert set(dir(dx)) == {*dx.__all__, "__version__"}
  for name in dx.__all__:
    assert callable(getattr(dx, name))
  # A folder that is loaded would take the place of a function of its name.
  folders = {path.name for path in pathlib.Path(dx.__path__[0]).iterdir()}
  assert not folders & set(dir(dx))


def test_fragments_are_divided_by_bytes_or_by_path():
  params = {"a": jnp.zeros(6), "b": jnp.zeros(5), "c": jnp.zeros(4)}

  def divided(fragments):
    tx = dx.delayed(
      INNER,
      nesterov(),
      sync_interval=4,
      num_fragments=2,
      overlap_steps=1,
      fragments=fragments,
    )
    state: Any = tx.init(params)
    return [set(leaves_by_path(part.params)) for part in state.fragments]

  assert divided(None) == [{"a"}, {"b", "c"}]
  assert divided(lambda path: int(path == "c")) == [{"a", "b"}, {"c"}]
  with pytest.raises(ValueError, match="3 of them, but num_fragments=2"):
    divided(Fragments(3, 4))
  with pytest.raises(ValueError, match="fragments must be a function"):
    divided([["a", "b"], ["c"]])
  for number in ("1", None, 0.5):
    with pytest.raises(ValueError, match="'a' is given .* no whole number"):
      divided(lambda path, number=number: number)


def one_step(tx):
  def step(params, state):
    return tx.update(params, state, params)

  return step


@pytest.mark.parametrize("name", ["diloco", "allreduce"])
def test_a_step_that_nobody_maps_is_refused_in_one_line(name):
  outer = None if name == "allreduce" else nesterov()
  tx = getattr(dx, name)(INNER, outer)
  params = {"a": jnp.zeros((2, 3))}
  message = "no axis is called 'replica' here: map the step with jax.vmap"
  with pytest.raises(ValueError, match=message):
    jax.vmap(one_step(tx))(params, jax.vmap(tx.init)(params))


def test_a_state_of_all_replicas_in_the_code_of_one_is_refused():
  tx = dx.diloco(INNER, nesterov())
  params = {"a": jnp.zeros((2, 3))}
  with pytest.raises(ValueError, match="the state has a replica axis"):
    tx.update(params, jax.vmap(tx.init)(params), params)


@pytest.mark.slow
def test_the_guides_script_trains_alike_on_one_device_and_on_four(
  capsys, tmp_path
):
  # The devices of this process are there already, so the script asks for none.
  script = tmp_path / "script.py"
  lines = GUIDE.read_text().splitlines(keepends=True)
  asked = [line for line in lines if "jax_num_cpu_devices" not in line]
  assert len(asked) == len(lines) - 1
  script.write_text("".join(asked))
  with jax.numpy_dtype_promotion("standard"):
    targets = runpy.run_path(str(script))["targets"]
  stacked, spread = capsys.readouterr().out.splitlines()
  stacked, spread = (
    [float(number) for number in re.findall(r"[\d.]+", line.split("[")[1])]
    for line in (stacked, spread)
  )
  assert len(stacked) == 4 and sum(stacked) < 4 * 0.5 * targets.var()
  assert stacked == pytest.approx(spread, abs=1e-5)


@pytest.mark.parametrize(
  ("given", "hint"),
  [
    ({"H": 8}, "did you mean 'sync_interval'?"),
    ({"sync_intervall": 8}, "did you mean 'sync_interval'?"),
    ({"codecs": "int"}, "did you mean 'codec'?"),
  ],
)
def test_an_argument_that_a_method_lacks_is_named_with_those_it_has(
  given, hint
):
  with pytest.raises(TypeError, match=r"^dilocox_jax.diloco has no argu") as e:
    dx.diloco(optax.sgd(0.1), **given)
  message = str(e.value)
  assert hint in message
  assert "(it has: sync_interval, first_interval, " in message
