"""Helpers that several tests share: a gateway as a process, tiny models."""
