"""Codecs: they encode values as the bytes that are sent, and decode them."""
