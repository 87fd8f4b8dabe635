"""What has to change in a body that passes through, and nothing else: values that stay are the client's own bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from gateway.service.call import Body


def rewrite(body: Body, *, remove: Collection[str], replace: Mapping[str, Any], add: Mapping[str, Any]) -> bytes:
    """The body's bytes with some fields removed, replaced or added.

    Added fields are spliced in front, so a long prompt is neither decoded nor encoded.
    """
    added = {name: value for name, value in add.items() if name not in body.fields or name in remove}
    if replace or any(name in body.fields for name in remove):
        fields: dict[str, Any] = {name: raw for name, raw in body.fields.items() if name not in remove}
        fields.update(replace)
        return msgspec.json.encode(fields | added)
    if not added:
        return body.data
    return _splice(body.data, added, has_fields=bool(body.fields))


def _splice(data: bytes, added: Mapping[str, Any], *, has_fields: bool) -> bytes:
    brace = data.index(b"{")
    head = msgspec.json.encode(added)[:-1]
    return data[:brace] + head + (b"," if has_fields else b"") + data[brace + 1 :]
