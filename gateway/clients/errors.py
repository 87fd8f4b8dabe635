"""What can be wrong with a client's settings file. Every message names the file."""

from __future__ import annotations


class ClientFileError(Exception):
    """The file is left alone; the message says why and what can be done."""
