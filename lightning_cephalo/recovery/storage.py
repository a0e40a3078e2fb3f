"""Kept steps in a storage that outlives all hosts: whatever fsspec opens, such as S3 or a disk.

A step is a folder. Each rank's piece is cut into objects of one call each: object stores show them
whole or not at all. ``COMMIT``, with sizes and checksums, is written when all others are there. A
folder without it is void.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from lightning_cephalo.common.errors import CephaloError, RecoveryError
from lightning_cephalo.common.texts import printable
from lightning_cephalo.recovery.store import Piece, Sizes, age

KEPT = 2
"""Committed steps that stay in the storage: the newest, and one for the case that it is damaged."""

# at the same time, in host memory
_CHUNK_BYTES, _CHUNKS_AT_ONCE = 1 << 24, 4
_COMMIT, _FORMAT = "COMMIT", 1
_NAME = re.compile(r"step-(\d{6,})-(\d{10,})-(\d+)-([0-9a-f]{16})")
# a name there is only a text; making folders would make a bucket
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "memory"}


@dataclass(frozen=True)
class Sent:
    """What lies in the storage of a piece."""

    payload_bytes: int
    meta_bytes: int
    checksum: int
    chunk_bytes: int
    chunk_checksums: tuple[int, ...]

    @property
    def sizes(self) -> Sizes:
        """What a file of the piece holds."""
        return Sizes(self.payload_bytes, self.meta_bytes, self.checksum)

    def lengths(self) -> list[int]:
        """Return the bytes of each object."""
        total = self.payload_bytes + self.meta_bytes
        lengths = [
            min(self.chunk_bytes, total - at) for at in range(0, total, max(1, self.chunk_bytes))
        ]
        if min((total, *lengths)) < 0 or len(lengths) != len(self.chunk_checksums):
            raise ValueError(f"{len(self.chunk_checksums)} objects do not hold {total} bytes")
        return lengths


@dataclass(frozen=True)
class Committed:
    """A step that lies in the storage whole."""

    piece: Piece
    sent: tuple[Sent, ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of all ranks."""
        return tuple(self.piece.of(rank) for rank in range(self.piece.world_size))


class Storage:
    """A folder of a file system that fsspec opens; every rank sends, one commits."""

    def __init__(self, url: str) -> None:
        self.url = url
        with self._named("opening it"):
            from fsspec.core import url_to_fs

            try:
                self._files, root = url_to_fs(url)
            except ImportError as error:
                raise RecoveryError(
                    f"storage={url!r}: {error}. For S3: pip install 'lightning-cephalo[s3]'."
                ) from error
        self._root = root.rstrip("/")
        protocols = self._files.protocol
        protocols = {protocols} if isinstance(protocols, str) else set(protocols)
        self._has_folders = not protocols & _WITHOUT_FOLDERS

    @contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        """Turn whatever a file system raises into an error that names the storage."""
        try:
            yield
        except CephaloError:
            raise
        except Exception as error:
            raise RecoveryError(
                printable(f"storage={self.url!r}: {doing}: {type(error).__name__}: {error}")
            ) from error

    # -- writing ----------------------------------------------------------------------------------

    def check_writable(self) -> None:
        """Write a small object, so that a wrong name or lacking rights are told before training."""
        with self._named("writing to it"):
            self._make_folder(self._root)
            self._files.pipe_file(f"{self._root}/WRITABLE", b"lightning-cephalo\n")

    def send(
        self,
        piece: Piece,
        sizes: Sizes,
        content: Tensor,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Sent | None:
        """Write this rank's piece, then a list of what was written."""
        folder = self._folder(piece)
        checksums = []
        with self._named("writing a step to it"):
            self._make_folder(folder)
            chunks = content.split(_CHUNK_BYTES) if content.numel() else ()
            for at in range(0, len(chunks), _CHUNKS_AT_ONCE):
                if is_cancelled():
                    return None
                batch = [chunk.numpy().tobytes() for chunk in chunks[at : at + _CHUNKS_AT_ONCE]]
                checksums += [zlib.crc32(data) for data in batch]
                names = [_chunk(folder, piece.rank, at + index) for index in range(len(batch))]
                self._files.pipe(dict(zip(names, batch, strict=True)))
            sent = Sent(*sizes, _CHUNK_BYTES, tuple(checksums))
            self._files.pipe_file(f"{folder}/rank{piece.rank}.json", _packed(asdict(sent)))
        return sent

    def commit(self, piece: Piece, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Declare a step whole that all ranks have sent, and remove older ones."""
        folder = self._folder(piece)
        with self._named("committing a step"):
            newer = [other for other in self._steps() if age(other) > age(piece)]
            foreign = [other for other in newer if other.run != piece.run]
            if foreign:
                raise RecoveryError(
                    f"storage={self.url!r}: another training writes to it:"
                    f" {_name(foreign[0])} is not of this one. Give each a place of its own."
                )
            names = [f"{folder}/rank{rank}.json" for rank in range(piece.world_size)]
            sent = tuple(_unpacked_sent(_unpacked(self._files.cat_file(name))) for name in names)
            self._check_sizes(folder, sent)
            if is_cancelled():
                return
            data = {"format": _FORMAT, "pieces": [asdict(one) for one in sent]}
            self._files.pipe_file(f"{folder}/{_COMMIT}", _packed(data))
            self._remove_older(piece)

    def _check_sizes(self, folder: str, sent: Sequence[Sent]) -> None:
        self._files.invalidate_cache()
        found = {
            str(entry["name"]).rpartition("/")[2]: entry["size"]
            for entry in self._files.ls(folder, detail=True)
        }
        for rank, one in enumerate(sent):
            for number, length in enumerate(one.lengths()):
                name = _chunk("", rank, number).lstrip("/")
                if found.get(name) != length:
                    raise RecoveryError(
                        f"storage={self.url!r}: expected {length} bytes in {folder}/{name}, but"
                        f" found {found.get(name, 'no object')}."
                    )

    def _make_folder(self, folder: str) -> None:
        if self._has_folders:
            self._files.makedirs(folder, exist_ok=True)

    # -- reading ----------------------------------------------------------------------------------

    def committed(self) -> list[Committed]:
        """Return the whole steps, newest first; those whose ``COMMIT`` is damaged are left out."""
        found = []
        with self._named("looking for steps in it"):
            for piece in sorted(self._steps(), key=age, reverse=True):
                try:
                    raw = self._files.cat_file(f"{self._folder(piece)}/{_COMMIT}")
                except FileNotFoundError:
                    continue
                with suppress(ValueError, KeyError, TypeError):
                    sent = tuple(map(_unpacked_sent, _unpacked(raw)["pieces"]))
                    if len(sent) == piece.world_size:
                        found.append(Committed(piece, sent))
        return found

    def last_attempt(self) -> int:
        """Return the number of the last start that has sent anything, whole or not; -1 if none."""
        with self._named("looking for steps in it"):
            return max((piece.attempt for piece in self._steps()), default=-1)

    def read(self, step: Committed, rank: int, whole: Tensor) -> None:
        """Read the bytes of one rank's piece, and no others."""
        import torch

        sent, folder = step.sent[rank], self._folder(step.piece)
        lengths, begin = sent.lengths(), 0
        with self._named("reading a step from it"):
            for at in range(0, len(lengths), _CHUNKS_AT_ONCE):
                batch = lengths[at : at + _CHUNKS_AT_ONCE]
                names = [_chunk(folder, rank, at + index) for index in range(len(batch))]
                parts = self._files.cat_ranges(names, [0] * len(batch), batch, on_error="raise")
                for index, (length, data) in enumerate(zip(batch, parts, strict=True)):
                    wanted = sent.chunk_checksums[at + index]
                    if len(data) != length or zlib.crc32(data) != wanted:
                        raise RecoveryError(f"{self.url}: {names[index]} is damaged.")
                    part = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                    whole[begin : begin + length].copy_(part)
                    begin += length

    # -- names ------------------------------------------------------------------------------------

    def _folder(self, piece: Piece) -> str:
        return f"{self._root}/{_name(piece)}"

    def _steps(self) -> list[Piece]:
        """Return rank 0's piece of each step, whole or not."""
        self._files.invalidate_cache()
        try:
            names = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        found = (_NAME.fullmatch(str(name).rstrip("/").rpartition("/")[2]) for name in names)
        return [
            Piece(int(m[2]), int(m[1]), 0, int(m[3]), int(m[4], 16)) for m in found if m is not None
        ]

    # -- removing ---------------------------------------------------------------------------------

    def _remove_older(self, newest: Piece) -> None:
        whole = {step.piece for step in self.committed()[:KEPT]}
        for piece in self._steps():
            if piece not in whole and age(piece) < age(newest):
                self._remove(piece)

    def remove(self) -> None:
        """Remove all steps."""
        with self._named("removing steps from it"):
            for piece in self._steps():
                self._remove(piece)
            with suppress(FileNotFoundError):
                self._files.rm_file(f"{self._root}/WRITABLE")

    def _remove(self, piece: Piece) -> None:
        folder = self._folder(piece)
        with suppress(FileNotFoundError):  # first, so that no step looks whole and is not
            self._files.rm_file(f"{folder}/{_COMMIT}")
        self._files.invalidate_cache()
        with suppress(FileNotFoundError):
            self._files.rm(folder, recursive=True)


def _name(piece: Piece) -> str:
    return f"step-{piece.attempt:06d}-{piece.serial:010d}-{piece.world_size}-{piece.run:016x}"


def _chunk(folder: str, rank: int, number: int) -> str:
    return f"{folder}/rank{rank}.{number:06d}"


def _packed(data: Any) -> bytes:
    text = json.dumps(data)
    return json.dumps({"checksum": zlib.crc32(text.encode()), "text": text}).encode()


def _unpacked(raw: bytes) -> Any:
    """Return what :func:`_packed` has packed."""
    outer = json.loads(raw)
    text = outer["text"]
    if zlib.crc32(text.encode()) != outer["checksum"]:
        raise ValueError("it does not match its checksum")
    return json.loads(text)


def _unpacked_sent(data: Any) -> Sent:
    sent = Sent(**{**data, "chunk_checksums": tuple(data["chunk_checksums"])})
    sent.lengths()
    return sent
