"""What `simulate` says of a plan, beside numbers that are computed by hand."""

import dataclasses
import json
import shlex

import numpy as np
import pytest

from dilocox_jax.api.method_plans import NARROW_ALLREDUCE, plan_run
from dilocox_jax.api.simulation_setup import Options
from dilocox_jax.config import from_mapping
from dilocox_jax.config.device_memory import DeviceMemory
from dilocox_jax.gap.expected import expected_gap
from dilocox_jax.simulate import transfer
from dilocox_jax.simulate.analytic import Outcome
from dilocox_jax.simulate.steps import SteadyState
from experiments import simulation_page

# Two replicas, each with 4 x 128 tokens a step.
CONFIG = {
  "total_steps": 7200,
  "sync": {"method": "diloco", "sync_interval": 10},
  "exchange": {"codec": "float32"},
  "data": {"batch_size": 4, "sequence_length": 128},
}
ROUNDS = SteadyState(
  step_s=0.5,
  compute_s=0.4,
  exposed_s=0.1,
  exchange_s=0.05,
  slowest_s=0.4,
  sent_bytes=1_000.0,
  replica_steps=2.0,
)
WHOLE = Outcome(
  busy_until_s=np.array([3700.0, 3700.0]),
  end_s=np.array([7200.0, 3600.0]),
  compute_s=np.array([1800.0, 3600.0]),
  codec_s=np.array([10.0, 20.0]),
  exposed_s=np.array([30.0, 50.0]),
  exchange_s=np.array([60.0, 100.0]),
  num_steps=7200,
  sent_bytes=36_000_000,
)


def plan_on(tmp_path, rate="1 Gbit/s", **changes):
  """A plan with costs that are known, on a link with 40 ms."""
  cluster = tmp_path / "ours.json"
  site = {"num_devices": 1, "up": rate, "down": rate, "rtt": "40 ms"}
  sites = [{"name": "Rome"}, {"name": "Oslo"}]
  text = {"name": "ours", "every_site": site, "sites": sites}
  cluster.write_text(json.dumps(text))
  config = from_mapping(CONFIG | changes)
  plan = plan_run(config, str(cluster), Options(step_s=0.4))
  memory = dataclasses.replace(
    plan.memory, frozen=0, state=300_000_000, step=100_000_000
  )
  assert memory.total == 400_000_000
  return dataclasses.replace(
    plan,
    rounds=ROUNDS,
    memory=memory,
    device_bytes=1e9,
    allreduce_tokens_per_s=256.0,
  )


@pytest.mark.parametrize("name", ["diloco", NARROW_ALLREDUCE])
def test_configs_of_an_earlier_simulation_are_removed(tmp_path, name):
  plan = dataclasses.replace(plan_on(tmp_path), name=name)
  workdir = tmp_path / "pages"
  workdir.mkdir()
  simulation_page._write_config(plan, workdir)
  assert len(list(workdir.iterdir())) == 1
  simulation_page._remove_earlier(workdir)
  assert not list(workdir.iterdir())


def values(rows):
  return {name: value for name, value, _ in rows}


def test_the_answer_has_speeds_bytes_and_memory(tmp_path):
  plan = plan_on(tmp_path)
  # 2 x 512 tokens in half a second; 1,000 bytes a step of half a second.
  assert values(simulation_page._answer(plan)) == {
    "speed-up over AllReduce": "8 times (AllReduce: 256)",
    "tokens a second": "2,048, 2 replicas together",
    "time in inner steps": "80.0 %",
    "sent by a replica": "10.0 kB every 10 steps, 173 MB a day",
    "memory of a device": "fits: 400 MB of 1.00 GB",
  }
  small = dataclasses.replace(plan, device_bytes=3e8)
  shown = values(simulation_page._answer(small))["memory of a device"]
  assert shown == "does not fit: 400 MB of 300 MB"
  fast = dataclasses.replace(plan, allreduce_tokens_per_s=0.5)
  shown = values(simulation_page._answer(fast))["speed-up over AllReduce"]
  assert shown == "4,096 times (AllReduce: 0.5)"
  unknown = dataclasses.replace(plan, device_bytes=float("inf"))
  shown = values(simulation_page._answer(unknown))["memory of a device"]
  assert shown == "400 MB"


def test_the_details_are_sums_of_a_round_and_means_over_replicas(tmp_path):
  rows = simulation_page._details(plan_on(tmp_path), WHOLE)
  found = values(rows)
  # Ten steps of 0.05 s on the line take as long as 1.25 steps of 0.4 s.
  assert found["least H whose steps take as long"] == "2"
  assert found["seconds a step"] == "0.5"
  assert found["time of exchanges of a round"] == "0.5 s"
  assert found["time of the whole run"] == "2 h"
  assert found["time of its inner steps"] == "45 min"
  assert found["time of its codec"] == "15 s"
  assert found["time of its waiting for exchanges"] == "40 s"
  assert found["time of its exchanges behind steps"] == "40 s"
  assert found["steps of the whole run"] == "7,200"
  assert found["bytes of the whole run"] == "36.0 MB"
  assert found["idle share of a pipeline"] == "0.0 %"


def test_a_row_of_all_methods_has_the_same_numbers(tmp_path):
  assert simulation_page._row(plan_on(tmp_path)) == {
    "method": "diloco",
    "expected gap": "not known",
    "equal time": "",
    "at worst": "",
    "H": "10",
    "tokens a\N{NO-BREAK SPACE}second": "2,048",
    "speed up": "8x",
    "sent a\N{NO-BREAK SPACE}day": "173 MB",
    "memory spare": "60.0 %",
    "memory": "400 MB",
    "measured gap": "not measured",
    "in steps": "80.0 %",
    "devices": "1/1",
    "settings": ("P=1, tau=0, float32, inner adamw, outer rate 0.7, stages 1"),
  }


@pytest.mark.parametrize(
  ("speed", "text"),
  [
    (9.018, "9.02"),
    (999.4, "999"),
    (999.6, "1,000"),
    (1000, "1,000"),
    (3724.4, "3,724"),
    (2_774_000, "2.77 M"),
    (1e6, "1 M"),
    (4_321e6, "4,321 M"),
  ],
)
def test_a_speed_has_three_or_four_digits(speed, text):
  assert simulation_page._speed(speed) == text


@pytest.mark.parametrize(
  ("rate", "buffer_bytes"),
  [
    # 1 Gbit/s carries 956 Mbit/s of payload; in 20 ms that is 2.4 MB, and a
    # third more is 3.2 MB, for which 4 MiB are enough.
    ("1 Gbit/s", None),
    # 3.83 MB, and a third more is 5.1 MB.
    ("1.6 Gbit/s", "5,242,880"),
    # 31.9 MB are 30.4 MiB.
    ("10 Gbit/s", "32,505,856"),
  ],
)
def test_buffers_of_nccl_must_hold_what_is_under_way(
  tmp_path, rate, buffer_bytes
):
  notes = " ".join(simulation_page._notes(plan_on(tmp_path, rate)))
  assert ("NCCL_BUFFSIZE" in notes) == bool(buffer_bytes)
  assert not buffer_bytes or f"NCCL_BUFFSIZE to {buffer_bytes} or" in notes
  assert "Round trips between sites take 40 to 40 ms" in notes
  assert "an inner step 0.4 to 0.4 s" in notes
  plan = plan_on(tmp_path, rate)
  costs = dataclasses.replace(plan.setup.link_costs, transport=transfer.TPU)
  setup = dataclasses.replace(plan.setup, link_costs=costs)
  of_tpus = dataclasses.replace(plan, setup=setup)
  assert "NCCL" not in " ".join(simulation_page._notes(of_tpus))


@pytest.mark.filterwarnings("error")
def test_a_single_replica_needs_no_buffers(tmp_path):
  cluster = tmp_path / "ours.json"
  site = {"name": "Rome", "up": "1 Gbit/s", "down": "1 Gbit/s"}
  cluster.write_text(json.dumps({"sites": [site]}))
  config = from_mapping(CONFIG | {"mesh": {"num_replicas": 1}})
  plan = plan_run(config, str(cluster), Options(step_s=0.4))
  assert "NCCL_BUFFSIZE" not in " ".join(simulation_page._notes(plan))
  speed = values(simulation_page._answer(plan))["tokens a second"]
  assert speed == "1,280, 1 replica"


@pytest.mark.parametrize(
  ("model", "optimizer", "rate"),
  [
    # 6e-4 for 125 million parameters, and by the third root less for more.
    ("llama_1_1b", "adamw", 2.9e-4),
    ("qwen_107b", "adamw", 6.3e-5),
    ("llama_1_1b", "muon", None),
  ],
)
def test_a_larger_model_gets_a_lower_learning_rate(
  tmp_path, model, optimizer, rate
):
  given = {"model": {"preset": model}, "inner": {"optimizer": optimizer}}
  config = from_mapping(CONFIG | given)
  plan = dataclasses.replace(plan_on(tmp_path), config=config)
  named = simulation_page._write_config(plan, tmp_path)
  assert named == f"experiments/configs/default.py:{tmp_path / 'diloco.json'}"
  written = json.loads((tmp_path / "diloco.json").read_text())
  expected = config.inner.learning_rate if rate is None else rate
  assert written["inner"]["learning_rate"] == expected


def test_a_learning_rate_that_was_chosen_is_kept(tmp_path):
  plan = plan_on(tmp_path, inner={"learning_rate": 0.0123})
  simulation_page._write_config(plan, tmp_path)
  written = json.loads((tmp_path / "diloco.json").read_text())
  assert written["inner"]["learning_rate"] == 0.0123


def test_the_command_to_train_says_how_long_and_where(tmp_path):
  text = " ".join(simulation_page._start(plan_on(tmp_path), "x").split())
  assert text.startswith(
    "diloco, 7,200 steps (--tokens) in 1 h: N is 0 at Rome"
  )
  assert "1 at Oslo, HOST a machine at Rome" in text
  assert "every process sees 1 devices" in text
  assert "--config=x" in text and "--num_processes=2 --process_id=N" in text


def test_the_command_to_train_is_one_command_if_a_path_has_spaces(tmp_path):
  text = simulation_page._start(plan_on(tmp_path), "my runs/diloco.json")
  _, command = text.rstrip().split("\n\n")
  assert "--config=my runs/diloco.json" in shlex.split(command)


def test_plans_that_do_not_fit_are_named_and_not_written(tmp_path, capsys):
  first = plan_on(tmp_path)
  alike = dataclasses.replace(
    first,
    name="eager",
    config=from_mapping(CONFIG | {"sync": {"method": "eager"}}),
  )
  slow = dataclasses.replace(
    first,
    name="dilocox",
    config=from_mapping(CONFIG | {"sync": {"method": "dilocox"}}),
    rounds=dataclasses.replace(ROUNDS, step_s=0.6),
  )
  no_room = dataclasses.replace(
    first,
    name="muloco",
    config=from_mapping(CONFIG | {"sync": {"method": "muloco"}}),
    memory=DeviceMemory(state=2_000_000_000, step=100_000_000),
  )
  plans = [first, alike, slow, no_room]
  simulation_page.report_methods(plans, {"delayed": "no tau"}, tmp_path)
  shown = capsys.readouterr().out
  assert "not recommended: delayed: no tau" in shown
  assert "muloco: a device needs 2.10 GB and has 1.00 GB" in shown
  assert "Recommended: diloco with H = 10." in shown
  written = {path.name for path in tmp_path.glob("*.json")}
  assert written == {"ours.json", "diloco.json", "eager.json", "dilocox.json"}


def test_a_plan_that_would_be_better_but_is_less_certain_is_named(tmp_path):
  first = dataclasses.replace(
    plan_on(tmp_path),
    fastest_tokens_per_s=2048.0,
    expected=expected_gap(num_replicas=2, gain=0.01),
  )
  assert first.expected is not None
  other = dataclasses.replace(
    first,
    name="muloco",
    config=from_mapping(CONFIG | {"sync": {"method": "muloco"}}),
    expected=dataclasses.replace(first.expected, gap=-0.01, high=0.2),
  )
  advice = simulation_page._advice([first, other])
  assert advice.startswith("Recommended: diloco with H = 10. Its expected gap")
  assert "waits for each exchange. muloco with H = 30 has a" in advice
  gap = f"{100 * first.gap_at_equal_time:+.1f} %"
  worst = f"{100 * first.worst_gap_at_equal_time:+.1f} %"
  assert f"(-1.0 % instead of {gap})" in advice
  assert f"(+20.0 % at worst instead of {worst})" in advice
  assert "muloco" not in simulation_page._advice([first])
  assert "diloco" not in simulation_page._advice([other, first])
