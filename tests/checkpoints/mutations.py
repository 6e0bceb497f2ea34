"""Broken copies of a checkpoint's files: values, keys, bytes and lines are changed with their structure in mind."""

import copy
import json
import random
import struct

EXTREMES = [
    None, True, False, 0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**9, 10**12, 10**40, 10**400,
    -(10**18), 0.5, -0.5, 1.0, 1e-320, 1e308, -1e308, float("inf"), float("-inf"), float("nan"),
    "", "1", "true", "llama", "F32", "\x00", "\ud800", "../../etc/passwd", "/etc/passwd", "x" * 3000,
    [], [[]], [1], [-1], [2**62, 2**62], [1.5], ["a"], [None] * 3, [0] * 100, [[[[[[{}]]]]]],
    {}, {"a": 1}, {"pattern": "Causal()"}, {"kind": "Rotary"}, {"rope_type": "yarn"},
]  # fmt: skip
IMPOSTORS = (
    b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", b"<!DOCTYPE html><html></html>",
    b"\x80\x02}q\x00.", b"PK\x03\x04", b"null", b"\x00" * 64,
)  # fmt: skip


def nodes(value):
    """Yields every place in a JSON value as (holder, key)."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from nodes(inner)


def mutate_json(value, r: random.Random, keys=()):
    """Returns the value with one to three places changed; `keys` are further keys that its object could have."""
    value = copy.deepcopy(value)
    for _ in range(r.choice((1, 1, 1, 2, 3))):
        places = list(nodes(value))
        if not places:
            return value
        holder, key = r.choice(places)
        kind = r.randrange(8 if keys else 7)
        if kind <= 2:
            holder[key] = copy.deepcopy(r.choice(EXTREMES))
        elif kind == 3 and isinstance(holder, dict):
            name = r.choice((key + "x", key[:-1], key.upper(), r.choice(places)[1], "\x1b[31m", "\ud83d"))
            holder[str(name)] = holder.pop(key)
        elif kind == 4:
            del holder[key]
        elif kind == 5:
            source, source_key = r.choice(places)
            holder[key] = copy.deepcopy(source[source_key])
        elif kind == 7:
            value[r.choice(keys)] = copy.deepcopy(r.choice(EXTREMES))
        elif isinstance(holder[key], int | float) and abs(holder[key]) < 1e300:
            holder[key] = holder[key] * r.choice((-1, 2, 3, 1000, 10**9)) + r.choice((0, 1, 0.5))
        else:
            holder[key] = [holder[key]]
    return value


def mutate_bytes(raw: bytes, r: random.Random) -> bytes:
    """Returns the bytes with bits flipped, or a part cut, doubled, inserted or moved."""
    data = bytearray(raw)
    kind = r.randrange(6)
    reach = len(data) if r.random() < 0.5 else min(len(data), 64)
    if not data or kind == 0:
        return bytes(data[: r.randrange(len(data) + 1)])
    if kind == 1:
        for _ in range(r.choice((1, 1, 3, 20))):
            data[r.randrange(reach)] ^= 1 << r.randrange(8)
        return bytes(data)
    a, b = sorted(r.randrange(len(data) + 1) for _ in range(2))
    if kind == 2:
        return bytes(data[:a] + data[b:])
    if kind == 3:
        return bytes(data[:b] + data[a:b] + data[b:])
    if kind == 4:
        extra = (b"\xff", b"\x00" * 9, b'"', b"{", b"[" * 5000, b" " * 70000, b"\xef\xbb\xbf", b"9" * 5000)
        return bytes(data[:a] + r.choice(extra) + data[a:])
    return bytes(data[a:] + data[:a])


def mutate_lines(raw: bytes, r: random.Random) -> bytes:
    """Returns the lines with one dropped, doubled, moved or replaced."""
    lines = raw.split(b"\n")
    first, second = r.randrange(len(lines)), r.randrange(len(lines))
    kind = r.randrange(4)
    if kind == 0:
        del lines[first]
    elif kind == 1:
        lines.insert(second, lines[first])
    elif kind == 2:
        lines[first], lines[second] = lines[second], lines[first]
    else:
        lines[first] = r.choice(
            (b"", b" ", b"\xff\xfe", b"\x00", b"a b c", b"\xf0\x9f\x99\x82", b"x" * 70_000, b"\r")
        )
    return b"\n".join(lines)


def mutate_tensors(raw: bytes, r: random.Random) -> bytes:
    """Returns a safetensors file with another header, another header length, or other bytes."""
    length = struct.unpack("<Q", raw[:8])[0]
    kind = r.randrange(4)
    if kind == 0:
        return mutate_bytes(raw, r)
    if kind == 1:
        claimed = r.choice(
            (0, 1, length - 1, length + 1, 2**63, 2**64 - 1, 10**10, 2**31, len(raw), len(raw) - 8)
        )
        return struct.pack("<Q", claimed) + raw[8:]
    if kind == 2:
        text = mutate_bytes(raw[8 : 8 + length], r)
    else:
        text = json.dumps(mutate_json(json.loads(raw[8 : 8 + length]), r)).encode()
    return struct.pack("<Q", len(text)) + text + raw[8 + length :]


def mutate_file(name: str, raw: bytes, r: random.Random, keys=()) -> bytes:
    """Returns a file of a model folder, broken in a way that suits its kind."""
    kind = r.random()
    if kind < 0.03:
        return r.choice(IMPOSTORS)
    if name.endswith(".safetensors"):
        return mutate_tensors(raw, r)
    if not name.endswith(".json"):
        return mutate_lines(raw, r) if name.endswith(".txt") and kind < 0.6 else mutate_bytes(raw, r)
    if kind < 0.25:
        return mutate_bytes(raw, r)
    return json.dumps(mutate_json(json.loads(raw), r, keys)).encode()
