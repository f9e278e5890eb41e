"""The inner step of one replica, also if several devices compute it."""
