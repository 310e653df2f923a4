"""Language of ``-k``: words joined by and, or, not and parentheses, matched against case ids.

A word of the expression matches an id if a word of the id begins with it: ``state_dict`` matches
``get_model_state_dict``, but ``staged`` does not match ``unstaged``. ``not`` binds most tightly, then ``and``, then
``or``, as in Python and in pytest's own ``-k``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from fsdp_doctor.errors import UsageError

Predicate = Callable[[str], bool]

_TOKEN = re.compile(r"[()]|[^\s()]+")


def compile_expression(text: str) -> Predicate:
    """Returns a predicate over case ids. Raises UsageError if the text cannot be parsed."""
    tokens = _TOKEN.findall(text)
    try:
        predicate, rest = _parse_disjunction(tokens, text)
    except RecursionError:
        raise UsageError("-k has too many parentheses") from None
    if rest:
        raise UsageError(f"-k {text!r}: {rest[0]!r} is not expected here; join words with and, or, not")
    return predicate


def find_unmatched_words(text: str, case_ids: Collection[str]) -> list[str]:
    """Returns the words of an expression that match none of the ids."""
    words = [word for word in _TOKEN.findall(text) if word not in ("and", "or", "not", "(", ")")]
    return [word for word in dict.fromkeys(words) if not any(map(_compile_word(word).search, case_ids))]


def _compile_word(word: str) -> re.Pattern[str]:
    return re.compile(r"(?<![A-Za-z0-9])" + re.escape(word))


def _parse_disjunction(tokens: list[str], text: str) -> tuple[Predicate, list[str]]:
    left, tokens = _parse_conjunction(tokens, text)
    while tokens[:1] == ["or"]:
        right, tokens = _parse_conjunction(tokens[1:], text)
        left = _make_disjunction(left, right)
    return left, tokens


def _parse_conjunction(tokens: list[str], text: str) -> tuple[Predicate, list[str]]:
    left, tokens = _parse_term(tokens, text)
    while tokens[:1] == ["and"]:
        right, tokens = _parse_term(tokens[1:], text)
        left = _make_conjunction(left, right)
    return left, tokens


def _parse_term(tokens: list[str], text: str) -> tuple[Predicate, list[str]]:
    match tokens:
        case ["not", *rest]:
            inner, rest = _parse_term(rest, text)
            return (lambda case_id: not inner(case_id)), rest
        case ["(", *rest]:
            inner, rest = _parse_disjunction(rest, text)
            if rest[:1] != [")"]:
                raise UsageError(f"-k {text!r} has a parenthesis that is not closed")
            return inner, rest[1:]
        case [")" | "and" | "or" as token, *_]:
            raise UsageError(f"-k {text!r} has {token!r}, but a word is expected")
        case [word, *rest]:
            found = _compile_word(word)
            return (lambda case_id: found.search(case_id) is not None), rest
        case _:
            raise UsageError(f"-k {text!r} ends where a word is expected")


def _make_disjunction(left: Predicate, right: Predicate) -> Predicate:
    return lambda case_id: left(case_id) or right(case_id)


def _make_conjunction(left: Predicate, right: Predicate) -> Predicate:
    return lambda case_id: left(case_id) and right(case_id)
