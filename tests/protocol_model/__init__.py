"""A model of the mailbox's protocol, which Spin searches completely."""
