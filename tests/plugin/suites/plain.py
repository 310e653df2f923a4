"""Nothing here is marked."""


def test_plain() -> None: ...
