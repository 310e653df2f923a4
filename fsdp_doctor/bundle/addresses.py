"""Addresses and names of hosts in free text, told from versions, times and names of modules, which look alike."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable

from fsdp_doctor.bundle.private_text import PUBLIC_HOSTS

Replace = Callable[[str], str]

_QUAD = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)")
_BESIDE = 40
# What a version stands after, or before.
_VERSION_BEFORE = re.compile(
    r"(?:[=<>~!]=?|\bv|[A-Za-z][\w.]*[-_]|\b(?:[\w-]*(?:versions?|torch\w*|cuda|cudnn|nccl|driver|python|release|build|lib\w*"
    r"|cu\d\d|nvidia[\w-]*|transformers|accelerate|peft|verl|glibc|gcc|kernel|rocm|triton|numpy))[\"')\]]*[\s:=,(\[\"']{1,30}v?)$",
    re.IGNORECASE,
)
_VERSION_AFTER = re.compile(r"\+\w|\.?(?:dev|post|rc|a|b)\d|-py\d|-cp\d")
_ADDRESS_BEFORE = re.compile(
    r"(?:@|://|(?:\b|_)(?:ip|ips|host|addr|address|addresses|inet|from|to|peer|client|server|endpoint|node|on|at|bind|listen|connect"
    r"|connection|remote|local|via|dns|gateway|MASTER_ADDR|--master[_-]addr)[\"']?[\s:=(\[/\"']{1,4})$",
    re.IGNORECASE,
)
_PORT_AFTER = re.compile(r":\d{2,5}\b|/\d{1,2}\b|\]:\d|[<>|]\d")
_LARGEST_OF_VERSIONS = 30
_SIX = re.compile(r"(?<![\w:.])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?:%\w+)?(?![\w:])", re.IGNORECASE)
_SIX_BEGINS = re.compile(r"(?:fe[89ab][0-9a-f]|f[cd][0-9a-f]{2}|[23][0-9a-f]{3}):", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=://)(?P<credentials>[^\s/@'\"<>]{0,400}@)?(?P<host>[A-Za-z0-9][\w-]*(?:\.[\w-]+)*)")
_DOTTED = re.compile(
    r"(?<![\w./@-])(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})\.){1,8}[A-Za-z]{2,12}(?![\w(-]|\.\w|/[\w-]+\.py)"
)
# No module ends so; a file or an attribute can end as the others do, so those need a digit or a hyphen.
_SURE = frozenset({"com", "edu", "gov", "mil"})
_OFTEN = re.compile(
    r"org|net|io|ai|dev|cloud|local|internal|lan|corp|intra|intranet|private|localdomain|svc|cluster|int|home"
    r"|de|fr|uk|cn|jp|ch|nl|eu|kr|ru|se|au|ca|tw|hk|sg|at"
)
_NUMBER = re.compile(r"[\d-]")


def without_addresses(text: str, replace: Replace) -> str:
    """``text`` with every IP address of some host replaced; loopback and wildcards say nothing and stay."""

    def quad(match: re.Match[str]) -> str:
        return replace(match[0]) if _is_address(match, text) else match[0]

    def six(match: re.Match[str]) -> str:
        return replace(match[0]) if _is_six(match[0]) else match[0]

    return _SIX.sub(six, _QUAD.sub(quad, text))


def without_hosts(text: str, replace: Replace) -> str:
    """``text`` with the hosts of URLs and whole domain names replaced, but for those that everybody knows."""

    def in_url(match: re.Match[str]) -> str:
        host = match["host"]
        if PUBLIC_HOSTS.fullmatch(host) or _QUAD.fullmatch(host):
            return match[0]
        return f"{match['credentials'] or ''}{replace(host)}"

    def dotted(match: re.Match[str]) -> str:
        return replace(match[0]) if _is_host(match[0]) else match[0]

    return _DOTTED.sub(dotted, _IN_URL.sub(in_url, text))


def _is_address(match: re.Match[str], text: str) -> bool:
    parts = [int(part) for part in match[0].split(".")]
    if max(parts) > 255 or parts[0] in (0, 127, 255):
        return False
    before = text[max(0, match.start() - _BESIDE) : match.start()]
    after = text[match.end() : match.end() + 8]
    if _ADDRESS_BEFORE.search(before) or _PORT_AFTER.match(after):
        return True
    if _VERSION_BEFORE.search(before) or _VERSION_AFTER.match(after):
        return False
    return ipaddress.IPv4Address(".".join(map(str, parts))).is_private or max(parts) > _LARGEST_OF_VERSIONS


def _is_six(text: str) -> bool:
    try:
        address = ipaddress.IPv6Address(text.partition("%")[0])
    except ValueError:
        return False
    if address.is_loopback or address.is_unspecified:
        return False
    return _SIX_BEGINS.match(text) is not None or text.count(":") == 7


def _is_host(name: str) -> bool:
    if PUBLIC_HOSTS.fullmatch(name):
        return False
    *labels, last = name.split(".")
    if last.lower() in _SURE:
        return True
    numbered = any(_NUMBER.search(label) for label in labels)
    return _OFTEN.fullmatch(last.lower()) is not None and len(labels) > 1 and numbered
