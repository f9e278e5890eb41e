import pytest

from dilocox_jax.meeting.rules import MailboxRules


@pytest.mark.parametrize(
  "field", ["replicas", "quorum", "grace_s", "snapshot_every", "max_norm_ratio"]
)
def test_no_rule_may_be_zero(field):
  with pytest.raises(ValueError, match=f"meet.{field}=0"):
    MailboxRules(**{field: 0})
