"""Replies of clients in the protocol of secure sums, validated.

Input: a client's reply, of any content, to a message of Flower's SecAgg. Output: the
fields that Flower's workflow reads. `untrusted_replies` validates partial reductions.

Invariants: nothing in a reply decides how much memory is taken. Sharp edges: shares and
masked values are not judged, as any bytes or integers may be right.
"""

from typing import Any

import numpy as np

from drjax._extras import needed
from drjax.engines.flower import untrusted_replies
from drjax.engines.flower.records import npy_header
from drjax.engines.flower.untrusted_replies import BadReply, Message

_LONGEST = 4096  # bytes of a key, or of an encrypted share


def fields_of(reply: Message, now: str, nodes: set[int], length: int) -> dict[str, Any]:
    """Validate the fields of the protocol in a client's reply, a Flower message.

    `now` is the name of the exchange that runs, a method of Flower's workflow, such as
    "unmask_stage": each has fields of its own, and only these are returned, by name.
    `nodes` are the ids of the nodes that take part, `length` the total number of
    elements of all secure sums. A `BadReply` is raised if a field is missing, has
    another type, size or number of items, or names other nodes.
    """
    key = constants().Key
    of = lambda name: untrusted_replies.content_of(reply, configs_key(), name)
    if now == "setup_stage":
        names = key.PUBLIC_KEY_1, key.PUBLIC_KEY_2
        return {name: _short_bytes(name, [of(name)], 1)[0] for name in names}
    if now == "collect_masked_vectors_stage":
        factor, vector = _items(key.MASKED_PARAMETERS, of(key.MASKED_PARAMETERS), 2)
        _check_array(factor, 1)
        _check_array(vector, length)
        return {key.MASKED_PARAMETERS: [factor, vector]}
    shares = now == "share_keys_stage"
    ids, values = (
        (key.DESTINATION_LIST, key.CIPHERTEXT_LIST)
        if shares
        else (key.NODE_ID_LIST, key.SHARE_LIST)
    )
    # For each other client, or of each client, exactly one.
    count = len(nodes) - shares
    sent = _items(ids, of(ids), count)
    if any(type(x) is not int for x in sent) or len({*sent} & nodes) != count:
        raise BadReply(f"its {ids} are not the clients that take part")
    return {ids: sent, values: _short_bytes(values, of(values), count)}


def check_keys(fields: dict[str, Any], seen: set[bytes]) -> None:
    """Raise `BadReply` if public keys cannot be read, or are in `seen`, others' keys.

    They are added to `seen`. A client that gets such a key ends: the server must not
    take it for the one that lies.
    """
    ec = "cryptography.hazmat.primitives.asymmetric.ec"
    curve = needed(ec, "flower", "Flower").SECP384R1
    module = needed("flwr.server.workflow.secure_aggregation.secaggplus_workflow",
                    "flower", "Flower")  # fmt: skip
    for name, data in fields.items():
        try:
            known = isinstance(module.bytes_to_public_key(data).curve, curve)
        except Exception as error:
            raise BadReply(f"its {name} is no public key") from error
        if not known or data in seen:
            raise BadReply(f"its {name} is of another curve, or that of another client")
        seen.add(data)


def _items(name: str, x: object, count: int) -> list[Any]:
    """Copy a field, or raise `BadReply` if it is no list of `count` items."""
    if not isinstance(x, list) or len(x) != count:
        raise BadReply(f"its {name} has not {count} items")
    return [*x]


def _short_bytes(name: str, x: object, count: int) -> list[bytes]:
    """Copy a field, or raise `BadReply` if it is no list of `count` short `bytes`."""
    items = _items(name, x, count)
    if any(type(item) is not bytes or len(item) > _LONGEST for item in items):
        raise BadReply(f"its {name} are not bytes, of {_LONGEST} at most")
    return items


def _check_array(data: object, length: int) -> None:
    """Raise `BadReply` unless `data` is an int64 array `[length]` as a `.npy` file."""
    # Compared as bytes, never parsed: a header decides what memory is taken.
    expected = npy_header(np.dtype(np.int64), (length,))
    if type(data) is not bytes or not data.startswith(expected):
        raise BadReply(f"its masked value is no array of {length} integers")
    if len(data) != len(expected) + 8 * length:
        raise BadReply(f"its masked value has {len(data)} bytes")


def constants() -> Any:
    """Import Flower's module with the names of exchanges, records and fields."""
    module = "flwr.common.secure_aggregation.secaggplus_constants"
    return needed(module, "flower", "Flower")


def configs_key() -> str:
    """Return the name of a Flower message's record that has the protocol's fields."""
    return constants().RECORD_KEY_CONFIGS
