"""A certificate that nobody has signed, for localhost, 127.0.0.1 and ::1, and both sides' contexts with it.

The key is as public as this file and of no use anywhere else.
"""

from __future__ import annotations

import ssl
import tempfile
from pathlib import Path

_CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBXzCCAQSgAwIBAgIBATAKBggqhkjOPQQDAjAWMRQwEgYDVQQDDAtrdmdhdGUg
dGVzdDAgFw0yMDAxMDEwMDAwMDBaGA8yMTIwMDEwMTAwMDAwMFowFjEUMBIGA1UE
AwwLa3ZnYXRlIHRlc3QwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAATIr8aCBczn
YNhf1z3eNlc/jReMfw+d8gvMfW/AAXurOy3HUj207iUiMUpeecmRET1c0daePQlZ
D+KVK+0UciCMo0EwPzAsBgNVHREEJTAjgglsb2NhbGhvc3SHBH8AAAGHEAAAAAAA
AAAAAAAAAAAAAAEwDwYDVR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNJADBGAiEA
i5LXi+jCYggCBYRWahM3EsvTuL0XQbIiRhZ2pY0SX+8CIQCll3njsbm7+l9vBh7V
56IvetZkESKKWwv+8fYJXkgz8g==
-----END CERTIFICATE-----
"""
_KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg9soxahab1UHovqcR
SQhy92R+uGuDkC+rJrs+mUjuYjqhRANCAATIr8aCBcznYNhf1z3eNlc/jReMfw+d
8gvMfW/AAXurOy3HUj207iUiMUpeecmRET1c0daePQlZD+KVK+0UciCM
-----END PRIVATE KEY-----
"""


def server_context() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with tempfile.TemporaryDirectory() as folder:  # a context loads its own from files only
        path = Path(folder, "both.pem")
        path.write_text(_CERTIFICATE + _KEY)
        context.load_cert_chain(path)
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


def trusting_context() -> ssl.SSLContext:
    """For a client that trusts this certificate."""
    context = ssl.create_default_context(cadata=_CERTIFICATE)
    context.set_alpn_protocols(["http/1.1"])
    return context
