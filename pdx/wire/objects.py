"""Verbs and their answers as JSON, for HTTP: objects whose fields are those of the structs, which are arrays elsewhere.

A verb's `Selection` is written as a `Prompt`, its hints as an envelope; bytes are base64.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Mapping
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from pdx.errors import ProtocolError
from pdx.wire.hints import Hints
from pdx.wire.prompt import Prompt
from pdx.wire.verbs import AnyAnswer, Selection

_SAID: dict[Any, Any] = {Selection: Prompt, Hints: msgspec.Raw}


class Failure(msgspec.Struct, frozen=True):
    """Why a node, or the proxy, did not carry out a request: `type` is a class in `pdx.errors`."""

    type: str
    message: str


@functools.cache
def form_of(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The struct with the same fields that is a JSON object. The field that selects chunks may be left out."""
    hints = get_type_hints(kind, include_extras=True)
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        of = _form(hints[field.name])
        if of is Prompt:
            fields.append((field.name, Prompt | None, None))
        elif field.required:
            fields.append((field.name, of))
        elif field.default is not msgspec.NODEFAULT:
            fields.append((field.name, of, field.default))
        else:
            fields.append((field.name, of, msgspec.field(default_factory=field.default_factory)))
    config = kind.__struct_config__
    return msgspec.defstruct(
        kind.__name__, sorted(fields, key=len), tag=config.tag, frozen=True, kw_only=True, forbid_unknown_fields=True
    )


def _form(kind: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _SAID:
        return _SAID[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return form_of(kind)
    if origin is Annotated:
        return Annotated[(_form(arguments[0]), *arguments[1:])]
    if origin in (Union, types.UnionType):
        return functools.reduce(operator.or_, map(_form, arguments))
    if origin in (list, dict):
        return origin[tuple(map(_form, arguments))]
    return kind


_FORMS = {form_of(answer): answer for answer in get_args(AnyAnswer)}
_FORM: Any = functools.reduce(operator.or_, _FORMS)
_Answers = msgspec.defstruct("_Answers", [("nodes", dict[str, _FORM]), ("errors", dict[str, Failure], {})], frozen=True)
_decoder = msgspec.json.Decoder(_Answers)


def encode_answers(nodes: Mapping[str, AnyAnswer], errors: Mapping[str, Failure]) -> bytes:
    """Encode what each node has answered, and why the others have not."""
    forms = {
        name: msgspec.convert(answer, form_of(type(answer)), from_attributes=True) for name, answer in nodes.items()
    }
    return msgspec.json.encode({"nodes": forms, "errors": errors})


def decode_answers(body: bytes) -> tuple[dict[str, AnyAnswer], dict[str, Failure]]:
    """:raises ProtocolError: `encode_answers` did not make this."""
    try:
        told: Any = _decoder.decode(body)
        nodes = {
            name: msgspec.convert(form, _FORMS[type(form)], from_attributes=True) for name, form in told.nodes.items()
        }
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"these are no answers of nodes: {error}") from error
    return nodes, told.errors
