"""A path of the user's own is found by ``module:function``, or refused with the part that is wrong."""

from __future__ import annotations

import pytest

from fsdp_doctor.case.paths.lookup import load_user_path
from fsdp_doctor.errors import UsageError


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("no_such_module:function", "cannot import no_such_module: ModuleNotFoundError"),
        ("faults.values:no_such_function", "no_such_function in faults.values does not exist"),
        ("faults.values:not_a_function", "is a str, not a function"),
    ],
)
def test_what_is_no_path_of_the_users_is_a_usage_error(path: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as refusal:
        load_user_path(path)
    assert "\n" not in str(refusal.value)
