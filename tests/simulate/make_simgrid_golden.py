"""Asks SimGrid when flows over shared links end, and keeps its answers.

  /usr/bin/python3 tests/simulate/make_simgrid_golden.py

Run from the root of the checkout, on Debian 12 with the package
python3-simgrid (3.32); nothing else is needed, and nothing else needs it. It
writes tests/simulate/golden/simgrid.json, from which the test rebuilds every
case: links in bytes per second, and flows with the links they cross, their
bytes, the numbers of earlier flows they wait for, the time before which they
do not start, and a limit of their own (null: none).

SimGrid's model of TCP is switched off as far as it departs from max-min
shares: see CONFIGURATION. Goodput is in the capacities instead (1448 of 1514
bytes of an Ethernet frame are payload).
"""

import importlib
import json
import pathlib
import re
import subprocess
import sys

COMMAND = "/usr/bin/python3 tests/simulate/make_simgrid_golden.py"
CONFIGURATION = (
  "network/model:LV08",
  "network/bandwidth-factor:1",
  "network/latency-factor:1",
  "network/crosstraffic:0",
  "network/weight-S:0",
  "network/TCP-gamma:1e9",
)
GOLDEN = pathlib.Path(__file__).parent / "golden" / "simgrid.json"
GIGABIT = 125e6 * 1448 / 1514  # bytes per second
SIZE_BYTES = 16 * 2**20


def flow(links, size_bytes, after=(), start_s=0.0, limit=None):
  return {
    "links": list(links),
    "size_bytes": size_bytes,
    "after": list(after),
    "start_s": start_s,
    "limit_bytes_per_s": limit,
  }


def ring_flows(paths, size_bytes=SIZE_BYTES, first=0):
  """Flows of a ring all-reduce; a rank passes on what it was just sent.

  Args:
    paths: Links from each rank to the next.
    size_bytes: What is reduced, divisible by the number of ranks.
    first: Number of the first flow.
  """
  num = len(paths)
  flows = []
  for step in range(2 * (num - 1)):
    for rank, path in enumerate(paths):
      before = first + num * (step - 1)
      after = {before + rank, before + (rank - 1) % num} if step else ()
      flows.append(flow(path, size_bytes // num, sorted(after)))
  return flows


def ring(rates):
  """Ranks with one port each: what goes out does not slow what comes in."""
  num = len(rates)
  links = {f"up{rank}": rate for rank, rate in enumerate(rates)}
  links |= {f"down{rank}": rate for rank, rate in enumerate(rates)}
  paths = [(f"up{rank}", f"down{(rank + 1) % num}") for rank in range(num)]
  return {"links": links, "flows": ring_flows(paths)}


def two_sites(order):
  """Four ranks in two sites; each site has one way out and one way in."""
  links = {f"{way}{rank}": GIGABIT for rank in range(4) for way in ("up", "dn")}
  links |= {"wan_ab": GIGABIT, "wan_ba": GIGABIT}
  paths = []
  for rank in range(4):
    following = (rank + 1) % 4
    here, there = order[rank], order[following]
    wan = () if here == there else (f"wan_{here}{there}",)
    paths.append((f"up{rank}", *wan, f"dn{following}"))
  return {"links": links, "flows": ring_flows(paths)}


def three_flows():
  links = {"shared": 125e6, "slow": 25e6}
  paths = (("slow", "shared"), ("shared",), ("shared",))
  return {"links": links, "flows": [flow(path, 10**8) for path in paths]}


def asymmetric_star():
  """Consumers' lines: a fraction of the download rate for uploads."""
  lines = {"a": (12.5e6, 125e6), "b": (5e6, 62.5e6), "c": (6.25e6, 25e6)}
  lines["d"] = (125e6, 125e6)
  links = {f"up_{site}": up for site, (up, _) in lines.items()}
  links |= {f"dn_{site}": down for site, (_, down) in lines.items()}
  sent = (
    ("a", "c", 80, 0.0),
    ("d", "c", 200, 0.5),
    ("b", "c", 20, 1.25),
    ("d", "b", 300, 2.0),
    ("a", "d", 60, 3.5),
    ("c", "b", 40, 3.5),
  )
  flows = [
    flow((f"up_{here}", f"dn_{there}"), megabytes * 10**6, (), start_s)
    for here, there, megabytes, start_s in sent
  ]
  return {"links": links, "flows": flows}


def triangle():
  """A ring of three sites; others use its links, some by way of a third."""
  links = {"ab": 100e6, "bc": 60e6, "ca": 80e6, "ba": 40e6}
  flows = [
    flow(("ab", "bc"), 150 * 10**6),
    flow(("bc", "ca"), 90 * 10**6, (), 0.75),
    flow(("ca",), 400 * 10**6, (), 0.0, 22e6),
    flow(("ab",), 70 * 10**6, (0,), 0.0),
    flow(("ba",), 30 * 10**6, (1,), 6.0, 35e6),
  ]
  paths = (("ab",), ("bc",), ("ca",))
  flows += ring_flows(paths, 120 * 10**6, first=len(flows))
  return {"links": links, "flows": flows}


def cases():
  return {
    "ring of 2": ring([GIGABIT] * 2),
    "ring of 4": ring([GIGABIT] * 4),
    "ring of 8": ring([GIGABIT] * 8),
    "ring of 4 with one slow node": ring(
      [GIGABIT, GIGABIT, GIGABIT / 10, GIGABIT]
    ),
    "two sites, good order": two_sites("aabb"),
    "two sites, bad order": two_sites("abab"),
    "three flows": three_flows(),
    "asymmetric star": asymmetric_star(),
    "triangle": triangle(),
  }


def answer(case):
  """Runs one case; SimGrid allows one engine a process.

  Every flow has two hosts of its own, joined by exactly its links, and an
  actor that waits, sends, and tells those who wait for it. A flow's limit is
  one more link, which nobody shares.
  """
  sg = importlib.import_module("simgrid")
  engine = sg.Engine([sys.argv[0], *(f"--cfg={c}" for c in CONFIGURATION)])
  zone = sg.NetZone.create_full_zone("zone")
  flows = case["flows"]
  told = [sg.Semaphore(0) for _ in flows]
  end_s = [0.0] * len(flows)

  def link(name, rate):
    return zone.create_link(name, rate).set_latency(0).seal()

  def act(number, source, target):
    for _ in flows[number]["after"]:
      told[number].acquire()
    sg.this_actor.sleep_until(flows[number]["start_s"])
    sg.Comm.sendto(source, target, flows[number]["size_bytes"])
    end_s[number] = sg.Engine.get_clock()
    for follower, each in enumerate(flows):
      if number in each["after"]:
        told[follower].release()

  links = {name: link(name, rate) for name, rate in case["links"].items()}
  pairs = []
  for number, each in enumerate(flows):
    route = [links[name] for name in each["links"]]
    if each["limit_bytes_per_s"]:
      route.append(link(f"limit{number}", each["limit_bytes_per_s"]))
    pair = [zone.create_host(f"{end}{number}", 1e9) for end in ("from", "to")]
    points = [host.netpoint for host in pair]
    crossed = [sg.LinkInRoute(each) for each in route]
    zone.add_route(*points, None, None, crossed, False)
    pairs.append(pair)
  zone.seal()
  for number, pair in enumerate(pairs):
    sg.Actor.create(f"flow{number}", pair[0], act, number, *pair)
  engine.run()
  return {"simgrid": sg.simgrid_version, "end_s": end_s}


def asked(case):
  """What SimGrid answers, from a process of its own."""
  done = subprocess.run(
    [sys.executable, __file__, "--answer"],
    input=json.dumps(case),
    capture_output=True,
    text=True,
    check=True,
  )
  return json.loads(done.stdout.splitlines()[-1])


def main():
  if sys.argv[1:] == ["--answer"]:
    print(json.dumps(answer(json.load(sys.stdin))))
    return
  record = {"command": COMMAND, "configuration": CONFIGURATION, "cases": {}}
  for name, case in cases().items():
    reply = asked(case)
    record["simgrid"] = reply["simgrid"]
    record["cases"][name] = {**case, "end_s": reply["end_s"]}
    print(f"{name}: {max(reply['end_s'])} s")
  text = json.dumps(record, indent=1)
  # A flow reads best on one line.
  text = re.sub(r",\n {5,}", ", ", text)
  text = re.sub(r"\n {5,}|\n {4}(?=[}\]])", "", text)
  GOLDEN.parent.mkdir(exist_ok=True)
  GOLDEN.write_text(text + "\n")


if __name__ == "__main__":
  main()
