"""Sentinels, payloads, publishing: what was made, from what, and where it lies."""
