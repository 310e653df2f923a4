"""Plans and writes the zip archive of a torch.save file. All offsets are known before any tensor bytes are written."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fsdp_doctor.checkpoints.pickle_writing import write_pickle
from fsdp_doctor.checkpoints.sums import crc32

# torch aligns tensor data to this many bytes.
_ALIGNMENT = 64
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
_MOST_32, _MOST_16 = (1 << 32) - 1, (1 << 16) - 1
_FIRST_DAY = 0x21


@dataclass(slots=True)
class ArchiveMember:
    """Member of a zip archive.

    ``header`` is the offset of its header in the archive, ``begin`` the offset of its bytes in the file. ``crc`` is set
    by the writer.
    """

    name: bytes
    header: int
    begin: int
    nbytes: int
    data: bytes | None
    padding: int
    crc: int = 0

    @property
    def is_large(self) -> bool:
        return self.nbytes >= _MOST_32

    @property
    def is_far(self) -> bool:
        return self.header >= _MOST_32


@dataclass(slots=True)
class Archive:
    """Archive of torch.save that starts at offset ``begin`` of a file. ``root`` is the name of its top folder."""

    root: str
    begin: int
    members: list[ArchiveMember] = field(default_factory=list)

    @classmethod
    def make(cls, root: str, begin: int, value: Any) -> Archive:
        """Starts an archive with a pickled value. The caller adds the value's tensor bytes as members ``data/KEY``."""
        archive = cls(root, begin)
        for name, data in (("data.pkl", write_pickle(value)), ("byteorder", b"little"), ("version", b"3\n")):
            archive.add(name, len(data), data)
        return archive

    def add(self, name: str, nbytes: int, data: bytes | None = None) -> ArchiveMember:
        path = f"{self.root}/{name}".encode()
        header = self._directory
        first = header + _LOCAL_HEADER.size + len(path) + (20 if nbytes >= _MOST_32 else 0) + 4
        padding = -first % _ALIGNMENT
        crc = crc32(data) if data is not None else 0
        member = ArchiveMember(path, header, self.begin + first + padding, nbytes, data, padding, crc)
        self.members.append(member)
        return member

    @property
    def _directory(self) -> int:
        """Offset in the archive at which the zip directory begins."""
        return self.members[-1].begin + self.members[-1].nbytes - self.begin if self.members else 0

    @property
    def end(self) -> int:
        """Offset in the file of the first byte after the archive."""
        return self.begin + self._directory + len(self._encode_directory())

    def encode(self) -> Iterator[tuple[int, bytes]]:
        """Yields (offset in the file, bytes) for everything except the tensor bytes. The members' checksums must be set
        first.
        """
        for member in self.members:
            nbytes = _MOST_32 if member.is_large else member.nbytes
            extra = struct.pack("<2H2Q", 1, 16, member.nbytes, member.nbytes) if member.is_large else b""
            extra += struct.pack("<2H", 0x4246, member.padding) + bytes(member.padding)
            head = (45 if member.is_large else 20, 0, 0, 0, _FIRST_DAY, member.crc, nbytes, nbytes)
            header = _LOCAL_HEADER.pack(b"PK\3\4", *head, len(member.name), len(extra))
            yield self.begin + member.header, header + member.name + extra + (member.data or b"")
        yield self.begin + self._directory, self._encode_directory()

    def _encode_directory(self) -> bytes:
        parts = []
        for member in self.members:
            large = (member.nbytes, member.nbytes) if member.is_large else ()
            values = (*large, *((member.header,) if member.is_far else ()))
            extra = struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""
            nbytes = _MOST_32 if member.is_large else member.nbytes
            head = (45, 45 if values else 20, 0, 0, 0, _FIRST_DAY, member.crc, nbytes, nbytes)
            place = _MOST_32 if member.is_far else member.header
            parts.append(_ENTRY.pack(b"PK\1\2", *head, len(member.name), len(extra), 0, 0, 0, 0, place))
            parts += [member.name, extra]
        directory = b"".join(parts)
        begin, nbytes, count = self._directory, len(directory), len(self.members)
        if begin >= _MOST_32 or count >= _MOST_16:
            directory += _END_64.pack(b"PK\6\6", _END_64.size - 12, 45, 45, 0, 0, count, count, nbytes, begin)
            directory += _LOCATOR_64.pack(b"PK\6\7", 0, begin + nbytes, 1)
        begin, count = min(begin, _MOST_32), min(count, _MOST_16)
        return directory + _END.pack(b"PK\5\6", 0, 0, count, count, nbytes, begin, 0)
