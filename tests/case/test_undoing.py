"""Tests that what a method left in the process is put back, and that what cannot be is named."""

import contextlib
import os
import threading

import pytest
import torch

from fsdp_doctor.case.side_effects import SideEffects


@pytest.fixture
def side_effects():
    found = SideEffects(torch.device("cpu"))
    found.look_before()
    return found


def test_a_method_that_leaves_nothing_gives_no_reason_to_retire(side_effects):
    assert side_effects.undo() == ""


def test_a_case_that_never_reached_its_method_has_nothing_to_undo():
    assert SideEffects(torch.device("cpu")).undo() == ""


def test_what_is_put_back_is_no_reason_to_retire(side_effects):
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    assert side_effects.undo() == ""
    assert torch.is_grad_enabled()
    assert torch.zeros(1).device.type == "cpu"


def test_inference_mode_cannot_be_left_for_another(side_effects):
    with torch.inference_mode():
        assert side_effects.undo() == "inference mode"


def test_a_thread_that_ends_by_itself_is_waited_for(side_effects):
    going_on = threading.Event()
    thread = threading.Thread(target=going_on.wait)
    thread.start()
    threading.Timer(0.05, going_on.set).start()
    assert side_effects.undo() == ""
    assert not thread.is_alive()


def test_a_thread_that_goes_on_is_named(side_effects):
    going_on = threading.Event()
    thread = threading.Thread(target=going_on.wait, name="the-methods-own")
    thread.start()
    assert side_effects.undo() == "the thread the-methods-own"
    going_on.set()
    thread.join()


@pytest.mark.parametrize(("cases", "reason"), [(6, ""), (7, "70 open descriptors")])
def test_descriptors_are_counted_over_all_cases_of_a_process(cases, reason):
    """A few open descriptors are nothing to worry about: libraries keep some."""
    found = SideEffects(torch.device("cpu"))
    with contextlib.ExitStack() as opened:
        for _ in range(cases):
            found.look_before()
            for _ in range(10):
                opened.callback(os.close, os.open("/dev/null", os.O_RDONLY))
            last = found.undo()
    assert last == reason
