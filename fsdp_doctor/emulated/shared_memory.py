"""Memory that the ranks of one process group share if they are on one host."""

from __future__ import annotations

import contextlib
import os
import secrets

import torch.distributed as dist

_TOKEN_BYTES = 16


def open_for_group(store: dist.Store, rank: int, size: int, nbytes: int) -> int:
    """Returns a descriptor of a file of ``nbytes`` zeros that all ranks have open; -1 on all ranks if any rank cannot
    open it.

    All ranks must call it. Rank 0 creates the file without a name in a file system, so that a killed rank leaves
    nothing behind. The other ranks open the file through /proc. A token at the file's end distinguishes it from a file
    of another host.
    """
    file = _create(store, nbytes) if rank == 0 else _open(store, nbytes)
    store.set(f"memory/{rank}", "yes" if file >= 0 else "no")
    all_opened = all(store.get(f"memory/{other}") == b"yes" for other in range(size))
    if not all_opened and file >= 0:
        os.close(file)
    return file if all_opened else -1


def _create(store: dist.Store, nbytes: int) -> int:
    token = secrets.token_bytes(_TOKEN_BYTES)
    file = os.memfd_create("fsdp-doctor")
    os.ftruncate(file, nbytes)
    os.pwrite(file, token, nbytes)
    store.set("memory", f"/proc/{os.getpid()}/fd/{file} {token.hex()}")
    return file


def _open(store: dist.Store, nbytes: int) -> int:
    path, token = store.get("memory").decode().split()
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDWR)
        if os.pread(file, _TOKEN_BYTES, nbytes).hex() == token:
            return file
        os.close(file)
    return -1
