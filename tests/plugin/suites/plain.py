"""A suite without marks."""


def test_plain() -> None: ...
