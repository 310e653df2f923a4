"""How a private name is asked for, and on which versions of torch all of them were checked."""

from __future__ import annotations

from typing import Any

import torch

# On CPU ranks; 2.11.0 on two H200s.
CHECKED = ("2.6.0", "2.7.0", "2.11.0", "2.13.0", "2.15.0")


class PrivateApiGone(RuntimeError):
    """A private name of torch that the doctor relies on does not exist in this version."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"torch {torch.__version__} has no {name}; fsdp-doctor was checked on torch {', '.join(CHECKED)}"
        )


def get(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise PrivateApiGone(f"{type(owner).__name__}.{name}") from None
