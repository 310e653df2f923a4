"""The facts of a report: an allow-list."""

import json
import socket

import pytest

from fsdp_doctor.machine.environment import (
    PACKAGES,
    VARIABLES,
    collect_without_torch,
    format_lines,
    write_home_as_tilde,
)


def test_each_variable_that_changes_torch_or_nccl_is_a_fact(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "a value")
    assert collect_without_torch()["variables"] == dict.fromkeys(VARIABLES, "a value")
    assert {"NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} <= set(VARIABLES)


@pytest.mark.parametrize(
    "name", ["SECRET_TOKEN", "HF_TOKEN", "USER", "HOSTNAME", "MY_NCCL_DEBUG", "nccl_debug", "NCCL", "PATH"]
)
def test_no_other_variable_is_a_fact(monkeypatch, name):
    monkeypatch.setenv(name, "a value that must stay here")
    assert "a value that must stay here" not in json.dumps(collect_without_torch(host_name=True))
    assert name not in collect_without_torch()["variables"]


def test_the_facts_are_those_of_the_list_and_no_others():
    facts = collect_without_torch()
    assert set(facts) == {"python", "platform", "cpus", "packages", "variables"}
    assert set(facts["packages"]) <= set(PACKAGES)


def test_the_host_name_is_told_only_where_it_was_asked_for():
    assert "host" not in collect_without_torch()
    assert socket.gethostname() not in collect_without_torch()["platform"].split()
    assert collect_without_torch(host_name=True)["host"] == socket.gethostname()


def test_the_home_directory_is_written_as_a_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "/home/someone/topo.xml:/home/someone/more.xml")
    facts = collect_without_torch()
    assert facts["variables"]["PYTORCH_ALLOC_CONF"] == "~/topo.xml:~/more.xml"
    assert "someone" not in json.dumps(facts["variables"])


@pytest.mark.parametrize(
    ("home", "text", "expected"),
    [
        ("/home/someone", "cd /home/someone; ls", "cd ~; ls"),
        ("/home/someone", "/home/else", "/home/else"),
        ("/", "/tmp/x", "/tmp/x"),
    ],
)
def test_only_the_home_directory_becomes_a_tilde(monkeypatch, home, text, expected):
    monkeypatch.setenv("HOME", home)
    assert write_home_as_tilde(text) == expected


def test_each_fact_is_a_line():
    facts = {"cpus": 4, "packages": {"torch": "2.9", "numpy": "2"}, "accelerators": ["A", "B"]}
    assert format_lines(facts) == [
        "GPU models and configuration: A, B",
        "CPU(s): 4",
        "Versions of relevant libraries:",
        "[pip3] torch==2.9",
        "[pip3] numpy==2",
    ]
    assert format_lines({"accelerators": []}) == ["GPU models and configuration: No devices found."]
