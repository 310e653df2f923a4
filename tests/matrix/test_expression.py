"""The language of -k."""

import itertools

import pytest

from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.expression import compile_expression

STAGED = "fsdp2/policy+param/staged/uneven/get_model_state_dict.full+cpu"
UNSTAGED = "fsdp1-orig/none/unstaged/state_dict"


@pytest.mark.parametrize(
    ("word", "case_id", "found"),
    [
        ("staged", STAGED, True),
        ("staged", UNSTAGED, False),
        ("unstaged", UNSTAGED, True),
        ("state_dict", STAGED, True),
        ("dict", STAGED, True),
        ("tate_dict", STAGED, False),
        ("param", STAGED, True),
        ("aram", STAGED, False),
        ("cpu", STAGED, True),
        ("fsdp1", UNSTAGED, True),
        ("orig", UNSTAGED, True),
        ("sdp2", STAGED, False),
        ("2", STAGED, False),
        ("even", STAGED, False),
        ("policy+param/staged", STAGED, True),
        ("full.cpu", STAGED, False),
        ("f.ll", STAGED, False),
        ("POLICY", STAGED, False),
    ],
)
def test_a_word_is_found_literally_and_only_at_word_beginnings(word, case_id, found):
    assert compile_expression(word)(case_id) is found


@pytest.mark.parametrize(
    "expression",
    [
        "a",
        "not a",
        "not not a",
        "a and b",
        "a or b",
        "a or b and c",
        "a and b or c",
        "not a and b",
        "not a or b",
        "not (a or b)",
        "(a or b) and c",
        "(a) and(not(b or c))",
        "a and not b and c",
        "a or not b or c",
        "not a and not b or c",
        "  ((a))  or(b)",
    ],
)
def test_it_means_what_python_means(expression):
    matches = compile_expression(expression)
    for words in itertools.product((True, False), repeat=3):
        names = dict(zip("abc", words, strict=True))
        case_id = "/".join(name for name, there in names.items() if there)
        assert matches(case_id) is eval(expression, {}, names), case_id


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("", "ends where a word is expected"),
        ("   ", "ends where a word is expected"),
        ("a and", "ends where a word is expected"),
        ("a or", "ends where a word is expected"),
        ("not", "ends where a word is expected"),
        ("(", "ends where a word is expected"),
        ("and a", "'and', but a word is expected"),
        ("a or or b", "'or', but a word is expected"),
        ("a and or b", "'or', but a word is expected"),
        ("()", "')', but a word is expected"),
        (")", "')', but a word is expected"),
        ("a b", "'b' is not expected here"),
        ("a not b", "'not' is not expected here"),
        ("a)", "')' is not expected here"),
        ("a (b)", "'(' is not expected here"),
        ("(a", "not closed"),
        ("(a or (b)", "not closed"),
    ],
)
def test_what_does_not_parse_is_a_usage_error_that_quotes_the_expression(expression, complaint):
    with pytest.raises(UsageError) as caught:
        compile_expression(expression)
    assert complaint in str(caught.value)
    assert repr(expression) in str(caught.value)
