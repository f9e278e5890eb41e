"""Measures what an exchange by mailbox costs, and how fast messages are signed.

  python -m experiments.tools.bench_mailbox simulate --num_replicas=64
  python -m experiments.tools.bench_mailbox simulate --num_absent=64
  python -m experiments.tools.bench_mailbox simulate --shares=on --bits=1
  python -m experiments.tools.bench_mailbox processes --num_replicas=8
  python -m experiments.tools.bench_mailbox sign --megabytes=256
  python -m experiments.tools.bench_mailbox loss --num_replicas=4 --bits=1

A mailbox is a store through which replicas exchange. An *event* is one exchange
of all replicas. `simulate` runs all replicas in one process, with a store whose
requests take simulated time. `processes` runs each replica as a process, with a
folder as the store, whose requests are delayed. Both print the time and the
requests of an event. They also print the bytes that a replica reads and writes
in an event, divided by the bytes of a message.

`sign` prints how many GB are signed in one CPU second, and of how many GB the
signatures are checked. `loss` trains a small model twice for each seed, and
prints both losses: once each replica computes the whole mean of an exchange,
and once only a share of it.
"""

from collections.abc import Sequence

from absl import app, flags

from dilocox_jax.plan.collectives import MAILBOX_SHARES
from experiments.runtime import command_line

BENCHES = ("simulate", "processes", "sign", "loss")

_NUM_REPLICAS = flags.DEFINE_integer(
  "num_replicas", 8, "Number of replicas, M.", lower_bound=1
)
_NUM_ABSENT = flags.DEFINE_integer(
  "num_absent",
  0,
  "Further replicas of `simulate`, which end after two events.",
  lower_bound=0,
)
_NUM_EVENTS = flags.DEFINE_integer(
  "num_events",
  12,
  "Number of events. The first half is not measured.",
  lower_bound=6,
)
_LATENCY_MS = flags.DEFINE_float(
  "latency_ms", 50.0, "Time of a request (milliseconds).", lower_bound=0.0
)
_MESSAGE_BYTES = flags.DEFINE_integer(
  "message_bytes", 4096, "Bytes of a message.", lower_bound=4
)
_SHARES = flags.DEFINE_enum(
  "shares",
  "off",
  MAILBOX_SHARES,
  "When replicas make their mean in shares (mailbox.shares).",
)
_BITS = flags.DEFINE_enum(
  "bits", "32", ("32", "8", "4", "2", "1"), "Bits of a value."
)
_NUM_SEEDS = flags.DEFINE_integer(
  "num_seeds", 3, "Number of seeds of `loss`.", lower_bound=1
)
_MEGABYTES = flags.DEFINE_integer(
  "megabytes", 256, "Size of the message to sign (MB).", lower_bound=1
)


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Runs the bench that the command line names, and prints its results."""
  bench = command_line.chosen_argument("bench", argv, BENCHES)
  from experiments.tools import mailbox_events

  if bench == "loss":
    _print_losses()
    return
  if bench == "sign":
    signed_gb, checked_gb = mailbox_events.signing_rates(
      _MEGABYTES.value * 10**6
    )
    print(f"signed: {signed_gb:.2f} GB a CPU second")
    print(f"checked: {checked_gb:.2f} GB a CPU second")
    return
  exchanges = mailbox_events.Exchanges(
    num_replicas=_NUM_REPLICAS.value,
    num_absent=_NUM_ABSENT.value if bench == "simulate" else 0,
    num_events=_NUM_EVENTS.value,
    latency_s=_LATENCY_MS.value / 1000,
    message_bytes=_MESSAGE_BYTES.value,
    shares=_SHARES.value,
    bits=int(_BITS.value),
  )
  if bench == "simulate":
    cost = mailbox_events.simulated_cost(exchanges)
    entry = "requests of a replica that enters last"
  else:
    cost = mailbox_events.processes_cost(exchanges)
    entry = "most requests with which a replica enters"
  print(f"time of an event: {1000 * cost.event_s:.0f} ms")
  print(f"requests of a replica in an event: {cost.requests:.1f}")
  print(f"most requests of a replica in an event: {cost.most_requests}")
  print(f"messages down in an event: {cost.messages_down:.2f}")
  print(f"messages up in an event: {cost.messages_up:.2f}")
  print(f"{entry}: {cost.entry_requests}")
  if cost.cpu_s:
    print(f"CPU time of a replica in an event: {1000 * cost.cpu_s:.1f} ms")


def _print_losses() -> None:
  """Prints held-out losses of training with and without shares, for each seed.

  With shares, each replica computes a part of the mean of all messages.
  """
  from experiments.tools.mailbox_losses import LossRun

  differences = []
  for seed in range(_NUM_SEEDS.value):
    whole, in_shares = (
      LossRun(
        num_replicas=_NUM_REPLICAS.value,
        shares=shares,
        bits=int(_BITS.value),
        seed=seed,
        num_events=_NUM_EVENTS.value,
      ).train()
      for shares in ("off", "on")
    )
    differences.append(in_shares - whole)
    print(
      f"seed {seed}: loss {whole:.4f} without shares, {in_shares:.4f} with",
      flush=True,
    )
  mean = sum(differences) / len(differences)
  print(f"mean difference: {mean:+.4f}")


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse_flags)
