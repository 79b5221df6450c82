"""Waiting pieces as text, for the state of a data order: by their places, or by document and token if the context changed.

A separate file, because the bytes of checkpoints must stay readable, whatever else of the data order changes.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping

from trainer.contract.data.document_stream import DocumentPiece


def encode_pending_pieces(pending: list[DocumentPiece], stream_places: Mapping[str, int]) -> str:
    """Base64 of two varints for each piece, newest first: the number of its stream, and its distance before the stream's next waiting piece
    (or before the stream's position)."""
    names = {name: number for number, name in enumerate(sorted(stream_places))}
    at = dict(stream_places)
    found = bytearray()
    for piece in reversed(pending):
        found += _varint(names[piece.stream]) + _varint(at[piece.stream] - piece.place - 1)
        at[piece.stream] = piece.place
    return base64.b64encode(found).decode()


def decode_pending_pieces(text: str, stream_places: Mapping[str, int]) -> list[tuple[str, int]]:
    """(stream, place) of each piece, oldest first."""
    names, at = sorted(stream_places), dict(stream_places)
    numbers = _varints(base64.b64decode(text))
    found = []
    for number in numbers:
        name = names[number]
        at[name] -= next(numbers) + 1
        found.append((name, at[name]))
    return found[::-1]


def encode_pieces(pieces: list[DocumentPiece], streams: list[str]) -> str:
    """Base64 of five varints for each piece: the number of its stream, its place (doubled, and one more for a ``~place``), its document, its first
    position and the number of its positions."""
    names = {name: number for number, name in enumerate(sorted(streams))}
    found = bytearray()
    for piece in pieces:
        place = 2 * piece.place if piece.place >= 0 else 2 * ~piece.place + 1
        for number in (names[piece.stream], place, piece.document, piece.start, piece.positions):
            found += _varint(number)
    return base64.b64encode(found).decode()


def decode_pieces(text: str, streams: list[str]) -> list[tuple[str, int, int, int, int]]:
    """(stream, place, document, first position, positions) of each piece."""
    names, numbers = sorted(streams), _varints(base64.b64decode(text))
    found = []
    for name, place, document, start, positions in zip(*[numbers] * 5, strict=True):
        found.append((names[name], ~(place >> 1) if place & 1 else place >> 1, document, start, positions))
    return found


def _varint(number: int) -> bytes:
    """A number in LEB128: seven bits a byte, lowest first; the top bit means that more follow."""
    assert number >= 0
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _varints(encoded: bytes) -> Iterator[int]:
    number = shift = 0
    for byte in encoded:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield number
            number = shift = 0
