"""JSON schemas made from the types that are written as JSON.

Names, types and closed sets of values come from the dataclasses and literals, descriptions from their docstrings, in
which a field is told as ``name: what it is``.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints, is_typeddict

from fsdp_doctor.matrix.axes import OFFLOADS, Offload

JsonSchema: TypeAlias = "dict[str, Any]"

DRAFT = "https://json-schema.org/draft/2020-12/schema"
# Every whole number that is written counts something, or is an index, a rank or an exit code.
PLAIN: dict[Any, JsonSchema] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer", "minimum": 0},
    float: {"type": "number"},
    type(None): {"type": "null"},
}


@dataclass(frozen=True, kw_only=True)
class TypeSchemas:
    """Writes the schemas of types.

    definitions: the types that are described once, by the name under ``$defs``. optional: the keys that may be missing.
    """

    definitions: Mapping[Any, str]
    optional: frozenset[str] = frozenset()

    def of_object(self, kind: Any, without: tuple[str, ...] = ()) -> JsonSchema:
        """A dataclass, all of whose fields are written; or a typed dictionary, with those that are there."""
        hints = get_type_hints(kind)
        about, meanings = _described(kind.__doc__ or "", hints)
        return {
            "description": about,
            "type": "object",
            "properties": {
                name: self.of_type(hint) | ({"description": meanings[name]} if name in meanings else {})
                for name, hint in hints.items()
                if name not in without
            },
            "required": []
            if is_typeddict(kind)
            else self.always_there(field.name for field in dataclasses.fields(kind) if field.name not in without),
            "additionalProperties": False,
        }

    def always_there(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name not in self.optional]

    def of_type(self, hint: Any) -> JsonSchema:
        """Raises TypeError for a type that JSON has no word for."""
        if hint in self.definitions:
            return {"$ref": f"#/$defs/{self.definitions[hint]}"}
        if hint in PLAIN:
            return dict(PLAIN[hint])
        if isinstance(hint, type) and issubclass(hint, Enum):
            return {"enum": [member.value for member in hint]}
        if hint is Offload:
            return {"enum": [str(offload) for offload in OFFLOADS]}
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is Literal:
            return of_literal(hint)
        if origin in (Union, types.UnionType):
            return {"anyOf": [self.of_type(argument) for argument in arguments]}
        if origin in (list, tuple):
            return {"type": "array", "items": self.of_type(arguments[0])}
        if origin is dict:
            return {"type": "object", "additionalProperties": self.of_type(arguments[1])}
        raise TypeError(f"JSON has no {hint}")


def of_literal(hint: Any) -> JsonSchema:
    return {"enum": list(get_args(hint))}


def _described(docstring: str, names: Iterable[str]) -> tuple[str, dict[str, str]]:
    """What a docstring says of the whole, and of each field: ``name: text`` on a line or after a full stop."""
    one = "(?:" + "|".join(names) + ")"
    about, *rest = re.split(rf"(?:\n\s*|\.\s+)({one}(?:, {one})*): ", docstring.replace("``", ""))
    meanings = {
        name: _prose(meaning)
        for spoken_of, meaning in zip(rest[::2], rest[1::2], strict=True)
        for name in spoken_of.split(", ")
    }
    return _prose(about), meanings


def _prose(text: str) -> str:
    return " ".join(text.split()).rstrip(".")
