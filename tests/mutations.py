"""Breaks the code on purpose, one line at a time, and runs the tests.

  python -m tests.mutations [--only=WORD] [--jobs=2]

Every mutation is applied to a copy of its own. The tests that claim to guard
the line run there and must fail. What they do not notice is printed as a
survivor, and the exit code is 1. Without a change (--unchanged) they must pass.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
COPIED = ("dilocox_jax", "experiments", "tests")
TESTS_FAILED = 1  # Pytest's exit code; 2 and more mean that none ran.


@dataclasses.dataclass(frozen=True)
class Mutation:
  """One change of one line.

  Attributes:
    name: What is broken.
    path: File, relative to the package.
    old: Text that is there once.
    new: What takes its place.
    tests: Arguments of pytest, paths below `tests/` and expressions for -k.
  """

  name: str
  path: str
  old: str
  new: str
  tests: str


def _all(*rows: tuple[str, str, str, str, str]) -> tuple[Mutation, ...]:
  return tuple(Mutation(*row) for row in rows)


MUTATIONS = (
  *_all(
    # When something is sent and applied.
    (
      "tau is one step longer",
      "plan/schedule/sync_schedule.py",
      '("apply", self.overlap_steps)',
      '("apply", self.overlap_steps + 1)',
      "plan/schedule/test_sync_schedule.py",
    ),
    (
      "all fragments have one phase",
      "plan/schedule/sync_schedule.py",
      "return fragment * self.sync_interval // self.num_fragments",
      "return 0 * fragment * self.sync_interval // self.num_fragments",
      "plan/schedule/test_sync_schedule.py",
    ),
    (
      "what was just sent is not in flight",
      "plan/schedule/sync_schedule.py",
      'if event.kind == "apply" and event.send_step <= step',
      'if event.kind == "apply" and event.send_step < step',
      "plan/schedule/test_sync_schedule.py",
    ),
    (
      "the flush sends after what is pending",
      "plan/schedule/sync_schedule.py",
      "sends_first = overlap >= self.sync_interval",
      "sends_first = overlap > self.sync_interval",
      "reference/test_flush.py plan/schedule/test_sync_schedule.py",
    ),
    (
      "the last segment is not cut",
      "plan/schedule/run_plan.py",
      "count = min(interval, self.total_steps - step)",
      "count = interval",
      "plan/schedule/test_run_plan.py",
    ),
    # What a replica measures, and where it goes on.
    (
      "the pseudo-gradient has the wrong sign",
      "outer/rules.py",
      "return jax.tree.map(jnp.subtract, outer, inner)",
      "return jax.tree.map(jnp.subtract, inner, outer)",
      "outer/test_rules.py",
    ),
    (
      "what is in flight is counted twice",
      "outer/rules.py",
      "reached = jax.tree.map(jnp.subtract, outer, unapplied)",
      "reached = jax.tree.map(jnp.add, outer, unapplied)",
      "outer/test_rules.py",
    ),
    (
      "a replica that continues loses its part twice",
      "outer/rules.py",
      "lambda w, a, b, d: w + (b - a) + d, inner",
      "lambda w, a, b, d: w + (b - a) - d, inner",
      "outer/test_rules.py",
    ),
    (
      "mixing weighs the outer value by alpha",
      "outer/rules.py",
      "alpha * w + (1 - alpha) * b",
      "(1 - alpha) * w + alpha * b",
      "outer/test_rules.py",
    ),
    (
      "eager keeps its stale part",
      "outer/rules.py",
      "mean + (new - old) / num_replicas",
      "mean + (old - new) / num_replicas",
      "outer/test_rules.py",
    ),
    (
      "what was not sent is lost twice",
      "outer/outer_step.py",
      "inner = jax.tree.map(jnp.subtract, inner, result.unsent)",
      "inner = jax.tree.map(jnp.add, inner, result.unsent)",
      "outer/test_outer_step.py -k not_sent",
    ),
    (
      "what was sent last is applied first",
      "outer/rounds.py",
      "due, *left = state.in_flight",
      "*left, due = state.in_flight",
      "outer/test_against_oracles.py -k over_a_round",
    ),
    (
      "what is applied counts as nothing in the next measurement",
      "outer/window.py",
      "if due is None else (due, *state.in_flight)",
      "if due is None else state.in_flight",
      "outer/test_against_oracles.py -k dilocox_continue",
    ),
    (
      "the outer optimizer forgets its state",
      "outer/outer_step.py",
      "state._replace(params=new, optimizer=optimizer)",
      "state._replace(params=new)",
      "outer/test_against_oracles.py -k 'rounds_equal and diloco'",
    ),
    # The mean, and what is lost on the way.
    (
      "the mean counts one too many",
      "aggregators/transport.py",
      "return total / jnp.maximum(count, 1)",
      "return total / (jnp.maximum(count, 1) + 1)",
      "aggregators/test_mean.py",
    ),
    (
      "values that are not finite reach the others",
      "aggregators/mean.py",
      "lambda leaf: jnp.where(is_finite, leaf, jnp.zeros_like(leaf)), values",
      "lambda leaf: leaf, values",
      "aggregators/test_mean.py",
    ),
    (
      "a replica that is left out thins the mean",
      "aggregators/transport.py",
      "flag = participates.astype(",
      "flag = jnp.ones_like(participates).astype(",
      "aggregators/test_mean.py",
    ),
    (
      "the residual has the wrong sign",
      "aggregators/feedback.py",
      "rest = self.decay * (want - got.astype(want.dtype))",
      "rest = self.decay * (got.astype(want.dtype) - want)",
      "aggregators/test_feedback.py",
    ),
    (
      "the residual does not decay",
      "aggregators/feedback.py",
      "rest = self.decay * (want",
      "rest = 1.0 * (want",
      "aggregators/test_feedback.py",
    ),
    (
      "the residual is never added",
      "aggregators/feedback.py",
      "return jax.tree.map(jnp.add, wanted, old)",
      "return jax.tree.map(lambda v, r: v + 0 * r, wanted, old)",
      "aggregators/test_feedback.py",
    ),
    (
      "the first replica of a gather counts twice",
      "aggregators/transport.py",
      "array[replica] for array in arrived.arrays",
      "array[0 * replica] for array in arrived.arrays",
      "aggregators/test_transport.py",
    ),
    (
      "the owners' slices are put together in another order",
      "aggregators/transport.py",
      "[array[:, 0] for array in gathered]",
      "[array[::-1, 0] for array in gathered]",
      "aggregators/test_transport.py",
    ),
    (
      "what rounding the mean lost is owed once, not once a replica",
      "aggregators/transport.py",
      "lost = count * (exact_mean",
      "lost = 1.0 * (exact_mean",
      "aggregators/test_feedback.py",
    ),
    (
      "the owner's own values are rounded too",
      "aggregators/transport.py",
      "arrived = arrived.at[replica].set(values[number][replica])",
      "arrived = arrived.at[replica].add(0.0)",
      "aggregators/test_feedback.py",
    ),
    (
      "one seed serves all exchanges",
      "aggregators/compressed.py",
      "jax.random.fold_in(jax.random.key(self.seed), state.count)",
      "jax.random.fold_in(jax.random.key(self.seed), 0)",
      "aggregators/test_compressed.py",
    ),
    (
      "all replicas round by one seed",
      "aggregators/compressed.py",
      "key = jax.random.fold_in(key, number)",
      "key = jax.random.fold_in(key, 0)",
      "aggregators/test_compressed.py -k chances",
    ),
    (
      "codes are rounded down",
      "codecs/quantize.py",
      "steps = jnp.round(_ratio(values, scales))",
      "steps = jnp.floor(_ratio(values, scales))",
      "codecs/test_quantize.py",
    ),
    (
      "the largest value is clipped by a scale that was rounded down",
      "codecs/quantize.py",
      "_largest(values) * ((1 + 2**-7) / reach)",
      "_largest(values) * (1 / reach)",
      "codecs/test_quantize.py",
    ),
    (
      "one scale serves all rows",
      "codecs/quantize.py",
      "largest = jnp.max(jnp.abs(values), axis=-1, keepdims=True)",
      "largest = jnp.max(jnp.abs(values), keepdims=True)",
      "codecs/test_quantize.py",
    ),
    (
      "the old factor is forgotten",
      "codecs/low_rank.py",
      "kept[number] = Factors(right[number])",
      "kept[number] = old",
      "codecs/test_low_rank.py aggregators/test_compressed.py "
      "-k 'factor or warm'",
    ),
    # Bytes.
    (
      "an all-reduce is counted once",
      "plan/collective.py",
      'twice = 2 if self.kind == "all_reduce" else 1',
      'twice = 1 if self.kind == "all_reduce" else 1',
      "aggregators/test_collectives.py",
    ),
    (
      "a gather is counted for one receiver",
      "plan/collective.py",
      "return others * self.operand_bytes",
      "return self.operand_bytes",
      "aggregators/test_collectives.py",
    ),
    (
      "the flag of a message costs nothing",
      "aggregators/collectives.py",
      'FLAG_BYTES if way == "all_gather"',
      '0 if way == "all_gather"',
      "aggregators/test_collectives.py contracts/test_bytes.py",
    ),
    # The inner step, the model and the data.
    (
      "accumulated gradients are not divided",
      "inner/step.py",
      "lambda x: x / accumulate_steps, total",
      "lambda x: x / 1, total",
      "inner/test_step.py",
    ),
    (
      "Muon's steps have another size than AdamW's",
      "optimizers.py",
      '"consistent_rms": _MUON_UPDATE_RMS,',
      '"consistent_rms": None,',
      "test_inner_optimizer.py",
    ),
    (
      "a cosine ends late",
      "optimizers.py",
      "rest = total_steps - warmup_steps",
      "rest = total_steps",
      "test_inner_optimizer.py",
    ),
    (
      "tokens predict themselves",
      "models/loss.py",
      "token_loss(logits_TxV, tokens_BxS[:, 1:].reshape(-1), z_loss)",
      "token_loss(logits_TxV, tokens_BxS[:, :-1].reshape(-1), z_loss)",
      "models/test_loss.py",
    ),
    (
      "the z-loss is a sum",
      "models/loss.py",
      "z_loss * jnp.mean(jnp.square(",
      "z_loss * jnp.sum(jnp.square(",
      "models/test_loss.py",
    ),
    (
      "activations go up the pipeline",
      "inner/pipeline.py",
      "jax.lax.ppermute(state.activations_sent, STAGE_AXIS, down)",
      "jax.lax.ppermute(state.activations_sent, STAGE_AXIS, up)",
      "inner/test_pipeline.py",
    ),
    (
      "each data shard has a largest logit of its own",
      "inner/vocabulary.py",
      "highest_U = jax.lax.pmax(highest_U, DATA_AXIS)",
      "highest_U = highest_U + 0",
      "inner/test_vocabulary.py",
    ),
    (
      "Gram matrices of all layers reach the host",
      "codecs/low_rank.py",
      "  if num_layers <= most:",
      "  if num_layers <= max(most, num_layers):",
      "aggregators/test_compressed.py",
    ),
    (
      "all replicas read one part of the text",
      "data/streams.py",
      "readers.index(replica), None, len(readers)",
      "0, None, len(readers)",
      "data/test_streams.py",
    ),
    (
      "one seed orders all replicas' text",
      "data/streams.py",
      'name = f"{seed}/{replica}"',
      'name = f"{seed}"',
      "data/test_streams.py",
    ),
    (
      "an average forgets nothing",
      "outer/average.py",
      "share = (power + 1) / (count.astype(old.dtype) + power)",
      "share = 1 / count.astype(old.dtype)",
      "outer/test_average.py -k weigh_more",
    ),
    (
      "rounds keep the newest parameters in place of the average",
      "outer/round_states.py",
      "[parameters_to_keep(f.optimizer, f.params) for f in fragments]",
      "[f.params for f in fragments]",
      "outer/test_average.py -k sliced",
    ),
    (
      "AllReduce hands on the newest parameters in place of the average",
      "training/evaluation.py",
      "return parameters_to_keep(state.optimizer, state.params)",
      "return state.params",
      "test_averaged_runs.py -k 'changes and allreduce'",
    ),
    (
      "the average takes no memory",
      "api/device_memory.py",
      "outer = 1 + average +",
      "outer = 1 +",
      "api/test_device_memory.py",
    ),
    # What joins the parts.
    (
      "the outer momentum is not Nesterov's",
      "training/build.py",
      "nesterov=outer.nesterov and bool(outer.momentum),",
      "nesterov=False,",
      "test_wiring_exchange.py -k outer_steps",
    ),
    (
      "weights do not decay",
      "training/build.py",
      "weight_decay=inner.weight_decay,",
      "weight_decay=0.0,",
      "test_wiring_inner.py",
    ),
    (
      "gradients are not clipped",
      "training/build.py",
      "clip_norm=inner.clip_norm,",
      "clip_norm=0.0,",
      "test_wiring_inner.py",
    ),
    (
      "b2 is b1",
      "training/build.py",
      "b2=inner.b2,",
      "b2=inner.b1,",
      "test_wiring_inner.py",
    ),
    (
      "codecs ignore the run's seed",
      "training/build.py",
      "seed=config.seed,\n    follows_rank",
      "seed=0,\n    follows_rank",
      "test_wiring_exchange.py -k seed",
    ),
    (
      "a run is judged on its training text",
      "training/run_text.py",
      "return _batches_of(config, text.validation)",
      "return _batches_of(config, text.train)",
      "test_wiring.py -k judged",
    ),
    (
      "copies that differ are saved",
      "training/trainer.py",
      "if not replica_consistency.copies_are_equal(state):",
      "if False:",
      "test_wiring.py -k copies",
    ),
    (
      "the learning rate is recorded a step late",
      "training/metrics_reader.py",
      "self._schedule(progress.step - 1)",
      "self._schedule(progress.step)",
      "training/test_metrics_reader.py training/test_trainer.py "
      "-k 'learning_rate or row'",
    ),
    (
      "the drift takes M for M squared",
      "outer/drift.py",
      "dot_products = num_replicas**2 * squared_mean_norm",
      "dot_products = num_replicas * squared_mean_norm",
      "outer/test_drift.py",
    ),
    # What a run goes on with.
    (
      "a resumed run forgets what is in flight",
      "training/trainer.py",
      "      state, record = resumed\n",
      "      state, record = resumed\n"
      "      state = state._replace(fragments=tuple(f._replace(in_flight="
      "jax.tree.map(jax.numpy.zeros_like, f.in_flight)) "
      "for f in state.fragments))\n",
      "training/test_trainer.py -k stopped_and_continued",
    ),
    (
      "a resumed run reads its text from the start",
      "training/run_text.py",
      'streams.set_state(record["streams"])',
      "pass",
      "training/test_trainer.py -k stopped_and_continued",
    ),
    (
      "a resumed run forgets what it has measured",
      "training/trainer.py",
      'self.controller.set_state(record["controller"])',
      "pass",
      "test_wiring.py -k goes_on",
    ),
    (
      "a damaged checkpoint is taken for a whole one",
      "training/digests.py",
      "if digests.get(path) != expected[path]]",
      "if path not in expected]",
      "training/test_digests.py",
    ),
    # Replicas that come and go.
    (
      "steps do not weigh in the mean",
      "plan/schedule/membership.py",
      "shares = self._done(self.schedule.sync_interval, stays)",
      "shares = 1 * stays",
      "plan/schedule/test_membership.py",
    ),
    (
      "what was sent before an absence is counted",
      "plan/schedule/membership.py",
      "range(sent_round, round_index + 1)",
      "range(round_index, round_index + 1)",
      "plan/schedule/test_membership.py",
    ),
    (
      "a replica comes back with its own residual",
      "outer/round_states.py",
      "return jnp.where(mask, new, old)",
      "return jnp.where(mask, old, old)",
      "outer/test_membership.py -k 'rounds_equal and diloco'",
    ),
    (
      "replica 0 is always the donor",
      "outer/round_states.py",
      "jax.tree.map(lambda leaf: leaf[donor],",
      "jax.tree.map(lambda leaf: leaf[0 * donor],",
      "outer/test_membership.py -k 'rounds_equal and diloco'",
    ),
    (
      "a slow replica's learning rate lags",
      "optimizers.py",
      "count=node.count + num_steps",
      "count=node.count + 0 * num_steps",
      "outer/test_membership.py -k 'rounds_equal and diloco'",
    ),
    (
      "an exchange weighs all replicas as the first",
      "outer/rounds.py",
      "self.replicas.place(np.array(share.weights), 0)",
      "self.replicas.place(np.full(len(share.weights), share.weights[0]), 0)",
      "outer/test_membership.py -k 'rounds_equal and diloco'",
    ),
    (
      "a replica more was always there",
      "training/resume.py",
      "return kept + [[m, 0, last_round] for m in new]",
      "return kept",
      "training/test_resume.py -k join",
    ),
    (
      "tokens of absent replicas are counted",
      "plan/schedule/run_plan.py",
      "return sum(self.attendance.num_steps)",
      "return self.num_steps * num_replicas",
      "test_membership_runs.py -k 'counted and diloco'",
    ),
    (
      "own save: who lost his directory is waited for",
      "training/save_choice.py",
      "expected = present.intersection(parts[0].members)",
      "expected = parts[0].members",
      "training/test_save_choice.py",
    ),
    (
      "own save: a part that is missing is no matter",
      "training/save_choice.py",
      "return len(parts) == len(expected), key[0]",
      "return len(parts) >= 1, key[0]",
      "training/test_save_choice.py",
    ),
    (
      "own save: new replicas come first",
      "training/save_choice.py",
      "(origins[n] is None, origins[n] or 0)",
      "(origins[n] is not None, origins[n] or 0)",
      "training/test_save_choice.py",
    ),
    (
      "own save: any type will do",
      "training/local_arrays.py",
      "found.shape != like.shape or not is_same",
      "found.shape != like.shape",
      "training/test_local_arrays.py",
    ),
    (
      "own save: who is new is the source",
      "training/own_checkpoints.py",
      "is_source = self._replica == source",
      "is_source = self._replica != source",
      "training/test_own_checkpoints.py -k two_processes",
    ),
    (
      "own save: a step that others lack stays",
      "training/own_checkpoints.py",
      "if other > step or (",
      "if other > step + 99 or (",
      "training/test_own_checkpoints.py -k two_processes",
    ),
    (
      "own save: replicas follow the processes' numbers",
      "training/own_checkpoints.py",
      "for n in order_of_processes(origins)]",
      "for n in range(len(origins))]",
      "training/test_own_checkpoints.py -k two_processes",
    ),
    (
      "own save: damaged everywhere is begun anew",
      "training/own_checkpoints.py",
      "if chosen is None and any(all_damages):",
      "if chosen is None and not all_damages:",
      "training/test_own_checkpoints.py -k two_processes",
    ),
    # Real links.
    (
      "all that a node sends waits in one queue",
      "../experiments/runtime/fair_queues.py",
      " match ip dst {receiver}",
      "",
      "experiments/runtime/test_throttled_network.py -k small_message",
    ),
    (
      "an open link costs its bytes alone",
      "../experiments/tools/real_links/bandwidths.py",
      "config, OPEN_BIT_PER_S, open_transport",
      "config, OPEN_BIT_PER_S, transport",
      "experiments/tools/test_links.py",
    ),
  ),
)


def is_applicable(mutation: Mutation, root: pathlib.Path = ROOT) -> bool:
  """Whether the text to change is there once."""
  text = (root / "dilocox_jax" / mutation.path).read_text()
  return text.count(mutation.old) == 1 and mutation.old != mutation.new


def outcome(mutation: Mutation) -> str:
  """Returns "caught", "survived", or why the tests could not run."""
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(folder)
    for name in COPIED:
      shutil.copytree(ROOT / name, root / name)
    shutil.copy(ROOT / "pyproject.toml", root)
    path = root / "dilocox_jax" / mutation.path
    path.write_text(path.read_text().replace(mutation.old, mutation.new))
    *names, last = mutation.tests.partition(" -k ")[0].split(" ")
    command = [
      sys.executable,
      "-m",
      "pytest",
      "-xq",
      "-m",
      "",
      "-p",
      "no:xdist",
    ]
    command += [f"tests/{name}" for name in (*names, last)]
    if chosen := mutation.tests.partition(" -k ")[2]:
      command += ["-k", chosen.strip("'")]
    done = subprocess.run(
      command,
      cwd=root,
      env=os.environ | {"PYTHONPATH": str(root)},
      capture_output=True,
      text=True,
      check=False,
    )
  if done.returncode in (0, TESTS_FAILED):
    return "caught" if done.returncode else "survived"
  lines = (done.stdout + done.stderr).strip().splitlines()
  return f"not run: {lines[-1] if lines else done.returncode}"


def main() -> int:
  """Tries the mutations and prints those that nobody noticed."""
  parser = argparse.ArgumentParser(description="Breaks the code line by line.")
  parser.add_argument("--only", default="", help="part of a name or a path")
  parser.add_argument("--jobs", type=int, default=2)
  unchanged = "run the same tests on unchanged copies: all must survive"
  parser.add_argument("--unchanged", action="store_true", help=unchanged)
  args = parser.parse_args()
  chosen = [m for m in MUTATIONS if args.only in f"{m.path} {m.name}"]
  stale = [m.name for m in chosen if not is_applicable(m)]
  if stale or not chosen:
    print(f"error: no line fits: {', '.join(stale) or args.only}")
    return 2
  wanted = "survived" if args.unchanged else "caught"
  if args.unchanged:
    chosen = [dataclasses.replace(m, new=m.old) for m in chosen]
  with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
    outcomes = []
    for mutation, found in zip(chosen, pool.map(outcome, chosen), strict=True):
      print(f"{found:10} {mutation.path}: {mutation.name}", flush=True)
      outcomes.append(found)
  count = outcomes.count(wanted)
  print(f"{count} of {len(chosen)} mutations {wanted}")
  return int(count < len(chosen))


if __name__ == "__main__":
  sys.exit(main())
