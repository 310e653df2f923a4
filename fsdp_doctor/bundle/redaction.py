"""Replaces private text by placeholders that are the same in all files of a bundle."""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import math
import os
import pathlib
import re
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Rule:
    """A rule that finds private text of one kind. The group ``x`` of ``pattern`` is replaced.

    entropy: the least entropy of private text, in bits per character. detect-secrets uses the same limits.
    """

    kind: str
    pattern: re.Pattern[str]
    entropy: float = 0

    def find(self, text: str) -> Iterator[str]:
        """Finds each private text in ``text``."""
        return filter(self.is_random, _matches([self.pattern], text))

    def is_random(self, value: str) -> bool:
        """Returns whether ``value`` has at least the entropy that this rule requires."""
        shares = [count / len(value) for count in Counter(value).values()]
        return -sum(share * math.log2(share) for share in shares) >= self.entropy


_DATA = tomllib.loads(pathlib.Path(__file__).with_name("private_text.toml").read_text(encoding="utf-8"))


def _compile(pattern: str) -> re.Pattern[str]:
    while "{{" in pattern:
        pattern = re.sub(r"\{\{(\w+)\}\}", lambda match: _DATA["fragments"][match[1]], pattern)
    return re.compile(pattern)


_BEGIN = _DATA["fragments"]["begin"]
_RULES = tuple(
    Rule(rule["kind"], _compile(rule.get("pattern") or f"{_BEGIN}(?P<x>{rule['form']})"), rule.get("entropy", 0))
    for rule in _DATA["rules"]
)
_HOSTS, _USERS = (tuple(map(_compile, _DATA[name])) for name in ("hosts", "users"))
_NOBODY, _NOT_SECRET, _PUBLIC_HOSTS = (_compile(_DATA[name]) for name in ("nobody", "not_secret", "public_hosts"))
_PERSONAL = frozenset(_DATA["personal"])
# Maps kinds to placeholders. A number follows, which is the same for the same text in all files of a bundle.
PLACEHOLDER: dict[str, str] = {
    kind: re.sub(r"[^A-Z0-9]+", "_", kind.replace("'s", "").upper())
    for kind in (*dict.fromkeys(rule.kind for rule in _RULES), "IPv4 address", "IPv6 address", "host")
}
IS_PLACEHOLDER = re.compile(rf"(?:{'|'.join(PLACEHOLDER.values())})_\d+")

Replace = Callable[[str], str]

_QUAD = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)")
_BESIDE = 40
# Match the text before and after a version.
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
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?:%\w+)?(?![\w:])", re.IGNORECASE)
_IPV6_BEGINS = re.compile(r"(?:fe[89ab][0-9a-f]|f[cd][0-9a-f]{2}|[23][0-9a-f]{3}):", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=://)(?P<credentials>[^\s/@'\"<>]{0,400}@)?(?P<host>[A-Za-z0-9][\w-]*(?:\.[\w-]+)*)")
_DOTTED = re.compile(
    r"(?<![\w./@-])(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})\.){1,8}[A-Za-z]{2,12}(?![\w(-]|\.\w|/[\w-]+\.py)"
)
# No Python module ends in these. The other top-level domains can also end a file or an attribute, so a host with one of
# them must contain a digit or a hyphen.
_SURE = frozenset({"com", "edu", "gov", "mil"})
_OFTEN = re.compile(
    r"org|net|io|ai|dev|cloud|local|internal|lan|corp|intra|intranet|private|localdomain|svc|cluster|int|home"
    r"|de|fr|uk|cn|jp|ch|nl|eu|kr|ru|se|au|ca|tw|hk|sg|at"
)
_NUMBER = re.compile(r"[\d-]")


def replace_addresses(text: str, replace: Replace) -> str:
    """Replaces IP addresses, except loopback addresses and wildcards, which identify nobody."""

    def replace_ipv4(match: re.Match[str]) -> str:
        return replace(match[0]) if _is_ipv4(match, text) else match[0]

    def replace_ipv6(match: re.Match[str]) -> str:
        return replace(match[0]) if _is_ipv6(match[0]) else match[0]

    return _IPV6.sub(replace_ipv6, _QUAD.sub(replace_ipv4, text))


def replace_hosts(text: str, replace: Replace) -> str:
    """Replaces hosts in URLs and full domain names elsewhere, except public hosts such as github.com."""

    def replace_in_url(match: re.Match[str]) -> str:
        host = match["host"]
        if _PUBLIC_HOSTS.fullmatch(host) or _QUAD.fullmatch(host):
            return match[0]
        return f"{match['credentials'] or ''}{replace(host)}"

    def replace_dotted(match: re.Match[str]) -> str:
        return replace(match[0]) if _is_host(match[0]) else match[0]

    return _DOTTED.sub(replace_dotted, _IN_URL.sub(replace_in_url, text))


def _is_ipv4(match: re.Match[str], text: str) -> bool:
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


def _is_ipv6(text: str) -> bool:
    try:
        address = ipaddress.IPv6Address(text.partition("%")[0])
    except ValueError:
        return False
    if address.is_loopback or address.is_unspecified:
        return False
    return _IPV6_BEGINS.match(text) is not None or text.count(":") == 7


def _is_host(name: str) -> bool:
    if _PUBLIC_HOSTS.fullmatch(name):
        return False
    *labels, last = name.split(".")
    if last.lower() in _SURE:
        return True
    numbered = any(_NUMBER.search(label) for label in labels)
    return _OFTEN.fullmatch(last.lower()) is not None and len(labels) > 1 and numbered


_SHORTEST_NAME = 3
# A secret that a text names is replaced in other places, too, if it is too long and too random to be a word.
_SHORTEST_SECRET = 8


class Redactor:
    """Replaces private text by placeholders. Call ``learn`` with all texts before the first call of ``clean``.

    homes, hosts, users: names that are private in any text.
    counts: the number of replacements for each kind of private text.
    """

    def __init__(self, homes: Iterable[str] = (), hosts: Iterable[str] = (), users: Iterable[str] = ()) -> None:
        self.counts: Counter[str] = Counter()
        self._placeholders: dict[str, str] = {}
        # A private text keeps the kind with which it was first found.
        self._kinds: dict[str, str] = {}
        self._of_kind: Counter[str] = Counter()
        self._homes = {home for home in homes if len(home) > 1}
        self._names = {"host": set(filter(_is_name, hosts)), "user name": set(filter(_is_name, users)), "bucket": set()}
        self._secrets: set[str] = set()
        self._cleaned: dict[str, str] = {}

    @classmethod
    def for_this_machine(cls) -> Redactor:
        """Makes a redactor that knows the names of this host and user."""
        host = socket.gethostname()
        users = [os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")]
        with contextlib.suppress(OSError, KeyError, ImportError):
            users.append(getpass.getuser())
        redactor = cls(homes=[os.path.expanduser("~")], users=users)
        for name in (host, os.environ.get("HOSTNAME", "")):
            redactor.learn_host(name)
        return redactor

    def learn(self, text: str) -> None:
        """Remembers secrets and names of hosts, users and buckets that can be recognized by the words around them."""
        hosts = filter(_is_name, _matches(_HOSTS, text))
        self._names["host"] |= {name for name in hosts if not _PUBLIC_HOSTS.fullmatch(name)}
        self._names["user name"] |= set(filter(_is_name, _matches(_USERS, text)))
        for rule in _RULES:
            if rule.kind in self._names:
                self._names[rule.kind] |= set(filter(_is_name, rule.find(text)))
            elif rule.kind not in _PERSONAL:
                for value in filter(_is_remarkable, rule.find(text)):
                    self._secrets.add(value)
                    self._kinds.setdefault(value, rule.kind)

    def learn_host(self, name: str) -> None:
        """Remembers the name of a host."""
        self._names["host"] |= {part for part in (name, name.split(".")[0]) if _is_name(part)}

    def learn_values(self, value: Any) -> None:
        """Remembers secrets and private names in the strings of a JSON value, as ``learn`` does for a text."""
        self.learn("\n".join(dict.fromkeys(_walk_strings(value))))

    def clean(self, text: str) -> str:
        """Replaces all private text in ``text``."""
        for home in sorted(self._homes, key=len, reverse=True):
            whole = re.compile(rf"(?<![\w/.-]){re.escape(home)}(?![\w.-])")
            text = whole.sub(lambda match: self._choose_placeholder("home directory", match[0]), text)
        for rule in _RULES:
            text = rule.pattern.sub(self._make_group_replacement(rule), text)
        text = self._replace_names(text, "named key or secret", self._secrets, re.RegexFlag(0))
        text = replace_hosts(text, lambda host: self._choose_placeholder("host", host))
        text = replace_addresses(
            text,
            lambda address: self._choose_placeholder("IPv6 address" if ":" in address else "IPv4 address", address),
        )
        for kind, names in self._names.items():
            text = self._replace_names(text, kind, names, re.IGNORECASE)
        return text

    def clean_values(self, value: Any) -> Any:
        """Replaces private text in all strings of a JSON value, but not in its keys."""
        match value:
            case str():
                # Each text is cleaned once, because a report has the same traceback in hundreds of cases.
                if value not in self._cleaned:
                    self._cleaned[value] = self.clean(value)
                return self._cleaned[value]
            case list():
                return [self.clean_values(item) for item in value]
            case dict():
                return {key: self.clean_values(item) for key, item in value.items()}
            case _:
                return value

    def _replace_names(self, text: str, kind: str, names: Iterable[str], flags: re.RegexFlag) -> str:
        lower = text.lower()
        present = {name.lower() if flags else name: name for name in names if name.lower() in lower}
        if not present:
            return text
        longest_first = sorted(present.values(), key=len, reverse=True)
        pattern = re.compile(rf"{_BEGIN}(?:{'|'.join(map(re.escape, longest_first))})(?![A-Za-z0-9])", flags)
        return pattern.sub(
            lambda match: self._choose_placeholder(kind, present[match[0].lower() if flags else match[0]]), text
        )

    def _make_group_replacement(self, rule: Rule) -> Callable[[re.Match[str]], str]:
        def replace_group(match: re.Match[str]) -> str:
            value = match["x"]
            begin, end = (at - match.start() for at in match.span("x"))
            # In code, the value can be the name itself: password=password.
            is_harmless = rule.kind not in _PERSONAL and (_NOT_SECRET.fullmatch(value) or value in match[0][:begin])
            if is_harmless or not rule.is_random(value) or IS_PLACEHOLDER.match(value):
                return match[0]
            return match[0][:begin] + self._choose_placeholder(rule.kind, value) + match[0][end:]

        return replace_group

    def _choose_placeholder(self, kind: str, value: str) -> str:
        if IS_PLACEHOLDER.match(value):
            return value
        kind = self._kinds.setdefault(value, kind)
        self.counts[kind] += 1
        if value not in self._placeholders:
            self._of_kind[kind] += 1
            self._placeholders[value] = f"{PLACEHOLDER[kind]}_{self._of_kind[kind]}"
        return self._placeholders[value]


def _walk_strings(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list():
            for item in value:
                yield from _walk_strings(item)
        case dict():
            for item in value.values():
                yield from _walk_strings(item)


def _matches(patterns: Iterable[re.Pattern[str]], text: str) -> set[str]:
    return {match["x"].rstrip(".") for pattern in patterns for match in pattern.finditer(text)}


def _is_name(name: str) -> bool:
    plain = len(name) >= _SHORTEST_NAME and _NOBODY.fullmatch(name) is None
    return plain and not name.isdigit() and IS_PLACEHOLDER.match(name) is None


def _is_remarkable(value: str) -> bool:
    mixed = any(letter.isdigit() for letter in value) and any(letter.isalpha() for letter in value)
    return mixed and len(value) >= _SHORTEST_SECRET and not _NOT_SECRET.fullmatch(value)
