"""Spoiling: bytes, text, JSON, safetensors files, zip archives and images that are almost as they should be."""

from __future__ import annotations

import io
import json
import random
import re
import struct
import zipfile
import zlib
from typing import Any

import numpy as np

NUMBERS = [0, -1, 1, 2, 7, 255, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, 1e308, -0.0, 0.5]
NUMBERS += [float("nan"), float("inf"), True]
WORDS = ["", " ", "..", "../../x", "/", "\0", "a\0b", "\ud800", "Ω≈ç√", "🙂", "[", "*", "[!", "a" * 300, "a/" * 3000]
WORDS += ["%s%n", "{}", "$HOME", "~", "-1", "1e999", "nan", "9" * 5000, "٣:٤", "2:4", "4:2", "0.7", "0.7 erk min=1"]
WORDS += ["null", "true", "\n", "\ufeff", "*=2:4", "=", ",", ":", "::", "[[[[", "con", "module.", "weight"]
TYPES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "U16": 2, "U32": 4,
    "U64": 8, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8, "F4": 0.5, "Q3": 1,
}  # fmt: skip


def spoil_bytes(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """A few flips, insertions, deletions, repetitions, cuts and splices."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice([1, 2, 8, 100]))
        kind = rng.randrange(8)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at:at] = rng.randbytes(rng.choice([1, 4, 50]))
        elif kind == 2:
            del data[at:end]
        elif kind == 3:
            data[at:at] = data[at:end]
        elif kind == 4:
            del data[at:]
        elif kind == 5:
            data[at:] = other[rng.randrange(len(other) + 1) :]
        elif kind == 6:
            data[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31 - 1, 2**40, 2**63, 2**64 - 1]))
        elif rng.random() < 0.1:
            data.clear()
    return bytes(data)


def spoil_text(rng: random.Random, text: str) -> str:
    """As bytes, or with an odd word or number where there was another one."""
    if rng.random() < 0.4:
        return spoil_bytes(rng, text.encode(), text.encode()).decode("utf-8", "surrogateescape")
    places = list(re.finditer(r"[\w.]+", text))
    for _ in range(rng.choice([1, 1, 2])):
        new = rng.choice(WORDS) if rng.random() < 0.5 else str(rng.choice(NUMBERS))
        start, end = rng.choice(places).span() if places else (0, 0)
        text = text[:start] + new + text[end:]
        places = list(re.finditer(r"[\w.]+", text))
    return text


def odd_value(rng: random.Random) -> Any:
    return rng.choice([None, {}, [], [[]], {"a": 1}, *NUMBERS, *WORDS])


def spoil_value(rng: random.Random, value: Any) -> Any:
    """The same JSON with something else somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        kind = rng.randrange(8)
        rest = {k: v for k, v in value.items() if k != key}
        if kind == 0:
            return rest
        if kind == 1:
            return {**rest, rng.choice(WORDS): value[key]}
        return {**value, key: spoil_value(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:at] if rng.random() < 0.5 else [*value, *value]
        return [*value[:at], spoil_value(rng, value[at]), *value[at + 1 :]]
    return odd_value(rng)


def spoil_json(rng: random.Random, text: str) -> bytes:
    if rng.random() < 0.3:
        return spoil_text(rng, text).encode("utf-8", "surrogatepass")
    if rng.random() < 0.02:
        return b'{"schema": ' + b"[" * 5000 + b"]" * 5000 + b"}"  # deeper than a parser goes
    return json.dumps(spoil_value(rng, json.loads(text))).encode("utf-8", "surrogatepass")


def split_safetensors(content: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def join_safetensors(header: bytes, body: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + body


def spoil_safetensors(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """The file as bytes; its header; or a valid file of other names, types, shapes and notes."""
    kind = rng.random()
    if kind < 0.3:
        return spoil_bytes(rng, content, other)
    header, body = split_safetensors(content)
    if kind < 0.5:
        return join_safetensors(spoil_json(rng, json.dumps(header)), body)
    return rebuilt_safetensors(rng, header, body)


def rebuilt_safetensors(rng: random.Random, header: dict[str, Any], body: bytes) -> bytes:
    about = header.pop("__metadata__", {})
    tensors = {name: (e["dtype"], e["shape"], body[slice(*e["data_offsets"])]) for name, e in header.items()}
    for _ in range(rng.choice([0, 1, 1, 2])):
        name = rng.choice(list(tensors))
        kind, shape, raw = tensors[name]
        what = rng.randrange(5)
        if what == 0:
            del tensors[name]
            new = rng.choice([name + "_mask", name + "_orig", "module." + name, name.removesuffix(".weight"), *WORDS])
            tensors[new] = (kind, shape, raw)
        elif what == 1:
            kind = rng.choice(list(TYPES))
            count = int(TYPES[kind] * np.prod(shape, dtype=np.int64))
            tensors[name] = (kind, shape, (raw * (count // max(1, len(raw)) + 1))[:count])
        elif what == 2:
            flat = int(np.prod(shape, dtype=np.int64))
            tensors[name] = (kind, rng.choice([[flat], [1, flat], [flat, 1, 1], shape[::-1]]), raw)
        elif what == 3:
            tensors[name] = (kind, shape, bytes(rng.choice([0, 1, 255]) for _ in raw))
        elif len(tensors) > 1:
            del tensors[name]
    if about and rng.random() < 0.6:
        key = rng.choice(list(about))
        packed = about[key].startswith("{")
        about[key] = spoil_json(rng, about[key] if packed else '"x"').decode("utf-8", "replace")
    entries, at, rest = {}, 0, b""
    for name, (kind, shape, raw) in tensors.items():
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at, rest = at + len(raw), rest + raw
    words = json.dumps({"__metadata__": about, **entries} if about else entries)
    return join_safetensors(words.encode("utf-8", "surrogatepass"), rest)


def spoil_png(rng: random.Random, content: bytes) -> bytes:
    """Another width and height, with a checksum that is right: what a bomb looks like."""
    if content[:4] != b"\x89PNG" or rng.random() < 0.6:
        return spoil_bytes(rng, content, content)
    size = struct.pack(">II", *(rng.choice([0, 1, 20, 9000, 2**16, 2**31 - 1]) for _ in range(2)))
    head = b"IHDR" + size + content[24:29]
    return content[:12] + head + struct.pack(">I", zlib.crc32(head)) + content[33:]


def rezipped(rng: random.Random, content: bytes) -> bytes:
    """A zip archive with right checksums and one damaged, renamed or missing member."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    at = rng.randrange(len(members))
    name, inside = members[at]
    what = rng.randrange(6)
    if what == 0:
        del members[at]
    elif what == 1:
        members[at] = (rng.choice(["../x.npy", "x", "jpeg.npy", "y.npy", "a" * 300]), inside)
    elif what == 2 and b"'shape': (" in inside:
        shape = rng.choice([b"'shape': (2000000000, 9, 9, 9", b"'shape': (-1", b"'shape': (True", b"'shape': (9**9"])
        members[at] = (name, re.sub(rb"'shape': \([\d, ]*", shape, inside))
    else:
        members[at] = (name, spoil_bytes(rng, inside, content))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for key, value in members:
            archive.writestr(key, value)
    return stream.getvalue()
