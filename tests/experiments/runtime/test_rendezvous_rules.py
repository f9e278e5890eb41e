"""What agents are told when replicas come, leave, hang and end."""

import pytest

from experiments.runtime.rendezvous_rules import DRAIN_S, Rendezvous

ABORTED, LOST_ANOTHER, STOPPED = -6, 75, 143


@pytest.fixture(name="rules")
def rules_fixture():
  return Rendezvous(num_replicas=3, min_replicas=2, settle_s=10)


def told(rules, now_s):
  return {member: order.kind for member, order in rules.orders(now_s)}


def group(rules, now_s):
  orders = dict(rules.orders(now_s))
  assert {order.kind for order in orders.values()} <= {"start"}
  assert all(order.count == len(orders) for order in orders.values())
  ranks = {member: order.rank for member, order in orders.items()}
  first = next((m for m, rank in ranks.items() if rank == 0), None)
  assert all(order.coordinator == first for order in orders.values())
  return ranks


def started(rules, members="abc"):
  for member in members:
    rules.wait(member, member, None, now_s=0)
  assert group(rules, now_s=0 if len(members) == 3 else 10)


def test_all_replicas_start_at_once_and_ranks_are_their_order(rules):
  for member in "cab":
    assert not group(rules, now_s=0)
    rules.wait(member, member, None, now_s=0)
  assert group(rules, now_s=0) == {"c": 0, "a": 1, "b": 2}
  assert not told(rules, now_s=100)  # Orders come once.


def test_fewer_start_when_nobody_came_for_a_while(rules):
  rules.wait("a", "a", None, now_s=0)
  assert not group(rules, now_s=50)  # One is too few.
  rules.wait("b", "b", None, now_s=50)
  assert not group(rules, now_s=59)
  assert group(rules, now_s=60) == {"a": 0, "b": 1}


def test_connections_of_strangers_postpone_no_start(rules):
  for member in "ab":
    rules.wait(member, member, None, now_s=0)
  rules.lost("a port check", now_s=9)
  assert group(rules, now_s=10) == {"a": 0, "b": 1}


def test_the_others_go_on_without_a_lost_replica_and_take_it_back(rules):
  started(rules)
  rules.lost("b", now_s=100)
  assert not told(rules, now_s=100)
  rules.wait("a", "a", LOST_ANOTHER, now_s=101)
  assert not told(rules, now_s=130)  # c has not ended yet.
  rules.wait("c", "c", ABORTED, now_s=131)
  assert group(rules, now_s=141) == {"a": 0, "c": 1}

  rules.wait("b", "b", None, now_s=200)
  assert told(rules, now_s=200) == {"a": "stop", "c": "stop"}
  assert not told(rules, now_s=201)
  rules.wait("a", "a", STOPPED, now_s=202)
  assert not told(rules, now_s=202)
  rules.wait("c", "c", STOPPED, now_s=203)
  assert group(rules, now_s=203) == {"b": 0, "a": 1, "c": 2}


def test_a_spare_waits_until_there_is_a_place(rules):
  started(rules)
  rules.wait("d", "d", None, now_s=1)
  assert not told(rules, now_s=1)
  rules.lost("a", now_s=2)
  for member in "bc":
    rules.wait(member, member, LOST_ANOTHER, now_s=3)
  assert set(group(rules, now_s=3)) == set("bcd")


def test_a_group_that_falls_apart_by_itself_starts_again_after_a_pause(rules):
  started(rules)
  for member in "abc":
    rules.wait(member, member, LOST_ANOTHER, now_s=1)
  assert not group(rules, now_s=10)
  assert set(group(rules, now_s=11)) == set("abc")
  rules.lost("c", now_s=12)
  rules.wait("c", "c", None, now_s=13)
  for member in "ab":
    rules.wait(member, member, LOST_ANOTHER, now_s=13)
  assert set(group(rules, now_s=13)) == set("abc")  # Here c was the reason.


def test_a_process_that_hangs_is_killed(rules):
  started(rules)
  rules.lost("a", now_s=100)
  rules.wait("b", "b", LOST_ANOTHER, now_s=130)
  assert not told(rules, now_s=100 + DRAIN_S)
  assert told(rules, now_s=101 + DRAIN_S) == {"c": "kill"}
  rules.wait("c", "c", -9, now_s=102 + DRAIN_S)
  assert set(group(rules, now_s=112 + DRAIN_S)) == {"b", "c"}


def test_a_replica_that_comes_while_a_group_falls_apart_stops_nobody(rules):
  started(rules, "ab")
  rules.lost("a", now_s=100)
  rules.wait("c", "c", None, now_s=101)
  assert not told(rules, now_s=101)


@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_run_ends_with_the_first_process_that_ends_by_itself(rules, code):
  started(rules)
  rules.wait("a", "a", code, now_s=1)
  orders = dict(rules.orders(now_s=1))
  assert {o.kind for o in orders.values()} == {"end"}
  assert set(orders) == set("abc")
  assert rules.code == code == orders["b"].code
  rules.wait("b", "b", 1 - bool(code), now_s=2)
  assert rules.code == code
  assert told(rules, now_s=2) == {"b": "end"}


def test_a_stop_of_the_run_reaches_those_who_wait_too(rules):
  started(rules, "ab")
  rules.wait("d", "d", None, now_s=11)
  rules.stop(15)
  assert set(told(rules, now_s=11).values()) == {"end"}
  assert rules.code == STOPPED


@pytest.mark.parametrize("least", [0, 4])
def test_impossible_sizes_are_refused(least):
  with pytest.raises(ValueError, match=f"min_replicas={least} must lie"):
    Rendezvous(3, least, settle_s=1)
