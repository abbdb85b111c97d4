"""The law of JSON schemas: an output fits its schema, or the schema is refused by name."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from looseleaf.engine.json_schema.support import FORMATS, library_schema
from looseleaf.errors import InvalidRequest
from looseleaf.sampling_params import Grammar
from tests.engine.schema_walks import RandomModel, fits

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
INTEGER, NULL = {"type": "integer"}, {"type": "null"}


def an_object(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", **keywords}


A_AND_B = an_object(properties={"a": INTEGER, "b": NULL}, additionalProperties=False)
CHOICE = [an_object(properties={"kind": {"const": kind}}, required=["kind"]) for kind in ("x", "y")]
TREE = an_object(properties={"child": {"$ref": "#"}}, additionalProperties=False)

KEPT: dict[str, Any] = {
    "anything": {},
    "true": True,
    "several types": {"type": ["string", "integer", "null"]},
    "const object": {"const": {"a": [1, {"b": None}], "": ""}},
    "const text": {"const": 'é😀\n"\\/\u2028'},
    "const small number": {"const": 1e-7},
    "const large number": {"const": 1e22},
    "enum of every type": {"enum": [1, "1", None, True, [], {}, 1.5]},
    "enum and type": {"enum": [1, "1", None], "type": "string"},
    "integer bounds": {"type": "integer", "minimum": -3, "exclusiveMaximum": 105},
    "integer between fractions": {"type": "integer", "minimum": -2.5, "maximum": 0.5},
    "integer above 2^53": {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 100},
    "integer of 64 bits": {"type": "integer", "maximum": 2**63 - 1, "minimum": 2**62},
    "unsigned integer": {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
    "number bounds": {"type": "number", "minimum": -3.25, "exclusiveMaximum": 10.5},
    "multiple": {"type": "integer", "multipleOf": 3},
    "fraction of a multiple": {"type": "number", "multipleOf": 0.25, "maximum": 9},
    "two multiples": {"allOf": [{"multipleOf": 6}, {"multipleOf": 4}, INTEGER]},
    "exclusive flag apart": {
        **{"$schema": DRAFT_4, "type": "integer", "maximum": 5},
        **{"exclusiveMinimum": True, "allOf": [{}], "minimum": 3},
    },
    "lengths": {"type": "string", "minLength": 2, "maxLength": 3},
    "lengths as fractions": {"type": "string", "minLength": 2.0, "maxLength": 3.0},
    "pattern": {"type": "string", "pattern": r"^\d[a-c]\w$"},
    "pattern and length": {"type": "string", "pattern": "^a*$", "minLength": 2, "maxLength": 3},
    "bracket in a class": {"type": "string", "pattern": "^[[a]]$"},
    "operators in a class": {"type": "string", "pattern": "^[a&&b~~][+--]$"},
    "named class": {"type": "string", "pattern": "^[[:alpha:]]$"},
    "items": {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 3},
    "prefix": {"type": "array", "prefixItems": [INTEGER, NULL], "items": False},
    "old prefix": {
        **{"$schema": DRAFT_7, "type": "array"},
        **{"additionalItems": False, "allOf": [{}], "items": [INTEGER]},
    },
    "idle additional items": {
        **{"type": "array", "prefixItems": [INTEGER], "minItems": 1},
        **{"items": NULL, "additionalItems": {"type": "string"}},
    },
    "idle unique items": {"type": "array", "items": INTEGER, "uniqueItems": False},
    "idle then": {"type": "integer", "then": {"multipleOf": 3}},
    "library option": {"x-guidance": {"item_separator": ";"}, "type": "array", "minItems": 2},
    "closed": {**A_AND_B, "required": ["b"]},
    "one property at least": {**A_AND_B, "minProperties": 1},
    "one property at most": {**A_AND_B, "maxProperties": 1},
    "map": an_object(additionalProperties=NULL, minProperties=1, maxProperties=2),
    "required by name": an_object(required=["a", "b"], minProperties=3, maxProperties=3),
    "patterns": an_object(patternProperties={"^a": INTEGER}, additionalProperties=NULL),
    "pattern for a declared name": an_object(
        **{"properties": {"b": {"minimum": 3}}, "required": ["b"]},
        **{"patternProperties": {"^b$": INTEGER}, "additionalProperties": False},
    ),
    "any of": an_object(
        properties={"a": INTEGER}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]
    ),
    "one of": {"oneOf": CHOICE},
    "one of constants": {"oneOf": [{"const": 1, "title": "x"}, {"const": True}, {"enum": ["1"]}]},
    "one of references": {
        "oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}],
        "$defs": {"x": CHOICE[0], "y": {"$ref": "#/$defs/z"}, "z": CHOICE[1]},
    },
    "one of types": {"oneOf": [{"$ref": "#/$defs/x"}, NULL], "$defs": {"x": INTEGER}},
    "all of": {"allOf": [an_object(properties={"a": INTEGER}), an_object(required=["a"])]},
    "tree": TREE,
    "anchor": {"$ref": "#x", "$defs": {"y": {"$anchor": "x", **INTEGER}}},
    "base": {
        **{"$id": "http://x.invalid/root", "$ref": "part", "$defs": {"number": INTEGER}},
        "$defs": {"part": {"$id": "part", "$ref": "#/$defs/n", "$defs": {"n": INTEGER}}},
    },
    "old reference": {
        **{"$schema": DRAFT_7, "definitions": {"n": INTEGER}},
        "oneOf": [{"$ref": "#/definitions/n", "type": "string"}, {"type": "string"}],
    },
    "dialect without a name": {"type": "integer", "nullable": True, "x-order": 3},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    return RandomModel(tmp_path_factory.mktemp("model") / "tokenizer")


def outputs(model: RandomModel, schema: Any, num: int = 8, strict: bool = False) -> list[Any]:
    """Values of outputs that have an end and only numbers that a double can hold."""
    grammar = Grammar.json_schema(schema, strict)
    texts = [model.draw(grammar, seed) for seed in range(num)]
    values = [json.loads(text) for text in texts if text is not None]
    return [value for value in values if "Infinity" not in json.dumps(value)]


@pytest.mark.parametrize("name", KEPT)
def test_every_output_fits_its_schema(model: RandomModel, name: str) -> None:
    values = outputs(model, KEPT[name])
    assert values
    for value in values:
        assert fits(KEPT[name], value), value


REFUSED: dict[str, tuple[Any, str]] = {
    "false": (False, "schema"),
    "repeated keys of a pattern": (
        an_object(patternProperties={"^[ab]$": INTEGER}, additionalProperties=False)
        | {"minProperties": 2, "maxProperties": 2},
        "minProperties 2",
    ),
    "repeated keys of a map": (an_object(additionalProperties=NULL, minProperties=2), "repeated"),
    "const beyond doubles": ({"const": 2**53 + 1}, "const 9007199254740993"),
    "enum beyond doubles": ({"enum": [[{"a": 2**64 - 1}]]}, "enum 18446744073709551615"),
    "const beyond every double": (json.loads('{"const": 1e999}'), "JSON"),
    "const of a control character": ({"const": "\x01"}, "control character"),
    "minimum beyond 64 bits": ({"type": "integer", "minimum": 2**64, "maximum": 2**65}, "64 bits"),
    "multiples beyond 32 bits": (
        {"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}], "type": "integer"},
        "multipleOf 65537, 65539",
    ),
    "endless reference": ({"$ref": "#"}, "'#' needs itself"),
    "endless child": (an_object(properties={"a": {"$ref": "#"}}, required=["a"]), "needs itself"),
    "endless choice": (
        an_object(properties={"a": {"anyOf": [{"$ref": "#/$defs/b"}, NULL]}})
        | {"$defs": {"b": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/b"}}}},
        "'#/\\$defs/b' needs itself",
    ),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "library option": ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "uniqueItems"),
    "contains": ({"type": "array", "contains": {"const": 1}}, "contains"),
    "dependentRequired": (an_object(dependentRequired={"a": ["b"]}), "dependentRequired"),
    "dependentSchemas": (an_object(dependentSchemas={"a": {}}), "dependentSchemas"),
    "dependencies": (an_object(dependencies={"a": ["b"]}), "dependencies"),
    "if": ({"if": {"minimum": 5}, "then": {"multipleOf": 3}}, "if"),
    "not": ({"not": INTEGER}, "not"),
    "propertyNames": (an_object(propertyNames={"pattern": "^a"}), "propertyNames"),
    "unevaluatedProperties": (an_object(unevaluatedProperties=False), "unevaluatedProperties"),
    "unevaluatedItems": ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems"),
    "$dynamicRef": ({"$dynamicRef": "#"}, "dynamicRef"),
    "lookahead": ({"type": "string", "pattern": "^(?=a)a"}, "look"),
    "back reference": ({"type": "string", "pattern": r"^(a)\1$"}, "regex"),
    "oneOf that may overlap": ({"oneOf": [INTEGER, {"type": "number"}]}, "oneOf"),
    "oneOf of equal values": ({"oneOf": [{"const": 1}, {"enum": [2, 1.0]}]}, "oneOf"),
    "oneOf with an optional kind": (
        {"oneOf": [CHOICE[0], {**CHOICE[1], "required": []}, an_object()]},
        "oneOf",
    ),
    "patterns that overlap": (
        an_object(patternProperties={"^a": INTEGER, "b$": NULL}),
        "not disjoint",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_would_not_be_kept_is_refused_by_name(model: RandomModel, name: str) -> None:
    schema, reason = REFUSED[name]
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        model.compiler.compile(Grammar("json_schema", json.dumps(schema)), "")
    assert str(refusal.value).count("JSON schema") == 1


def test_a_free_key_is_never_a_declared_name_in_another_spelling(model: RandomModel) -> None:
    schema = an_object(properties={"a": INTEGER}, additionalProperties={"type": "boolean"})
    state = model.compiler.start(Grammar.json_schema(schema), "")
    tokenizer = model.compiler._tokenizer
    for token in tokenizer.encode('{"\\'):
        state.push(token)
    (u,) = tokenizer.encode("u")
    assert not state.allowed()[u]


@pytest.mark.parametrize("name", ["password", "binary", "byte", "int32", "", "Date"])
def test_an_unknown_format_has_no_effect(model: RandomModel, name: str) -> None:
    schema = {"type": ["string", "null"], "maxLength": 3}
    assert outputs(model, {**schema, "format": name}) == outputs(model, schema)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_known_format_is_kept(model: RandomModel, name: str) -> None:
    model.compiler.compile(Grammar.json_schema({"type": "string", "format": name}), "")
    assert json.loads(library_schema(json.dumps({"format": name}))) == {"format": name}


CLOSED = {"additionalProperties": False}


def closed(schema: Any) -> Any:
    """``schema`` as strict leaves it."""
    return json.loads(library_schema(json.dumps(schema), strict=True))


def test_strict_closes_each_object_that_names_properties() -> None:
    inner = an_object(properties={"b": NULL})
    schema = an_object(
        properties={"a": inner, "list": {"type": "array", "items": inner}, "any": an_object()},
        required=["a", "more"],
    )
    shut = {**inner, **CLOSED}
    assert closed(schema) == {
        **schema,
        **CLOSED,
        "properties": {
            **{"a": shut, "list": {"type": "array", "items": shut}},
            **{"any": an_object(), "more": True},
        },
    }


@pytest.mark.parametrize("decided", [True, {"type": "integer"}, False])
def test_strict_leaves_what_a_schema_decides(decided: Any) -> None:
    schema = an_object(properties={"a": INTEGER}, additionalProperties=decided)
    assert closed(schema) == schema


def test_strict_closes_objects_of_a_choice_each() -> None:
    optional = {"anyOf": [{"$ref": "#/$defs/x"}, NULL], "$defs": {"x": CHOICE[0]}}
    assert closed(optional)["$defs"]["x"] == {**CHOICE[0], **CLOSED}
    assert closed({"anyOf": CHOICE}) == {"anyOf": [{**choice, **CLOSED} for choice in CHOICE]}


BASE = an_object(properties={"a": INTEGER}, required=["a"])
JOINED: dict[str, Any] = {
    "allOf": {"allOf": [BASE, an_object(properties={"b": NULL}, required=["b"])]},
    "a reference and properties": {
        **{"$ref": "#/$defs/base", "$defs": {"base": BASE}},
        **an_object(properties={"b": NULL}, required=["b"]),
    },
    "a reference that is joined elsewhere": an_object(
        properties={"one": {"$ref": "#/$defs/base"}, "two": {"allOf": [{"$ref": "#/$defs/base"}]}},
        allOf=[{"properties": {"three": {"$ref": "#/$defs/base", "required": ["a"]}}}],
        required=["one", "two", "three"],
    )
    | {"$defs": {"base": BASE}},
    "anyOf and properties": an_object(
        properties={"b": NULL}, anyOf=[{"required": ["b"]}, {"properties": {"a": INTEGER}}]
    ),
}


def keys(value: Any) -> set[str]:
    """All names of properties in ``value``."""
    if isinstance(value, dict):
        return {*value}.union(*map(keys, value.values()))
    return set()


@pytest.mark.parametrize("name", JOINED)
def test_strict_closes_an_object_of_several_schemas_as_a_whole(
    model: RandomModel, name: str
) -> None:
    values = outputs(model, JOINED[name], strict=True)
    assert values
    for value in values:
        assert fits(JOINED[name], value)
        assert keys(value) <= {"a", "b", "one", "two", "three"}


def test_strict_ends_what_an_open_object_leaves_to_chance(model: RandomModel) -> None:
    schema = an_object(properties={"a": INTEGER, "b": NULL}, required=["a", "b"])
    for value in outputs(model, schema, num=20, strict=True):
        assert {*value} == {"a", "b"}


CHAIN = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}", "required": ["a"]} for n in range(350)}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("last", [{"multipleOf": 2}, {"oneOf": [{"$ref": "#/$defs/d0"}] * 350}])
def test_references_that_lead_far_have_a_limit(strict: bool, last: Any) -> None:
    schema = {"$defs": {**CHAIN, "d350": last}, "multipleOf": 3}
    with pytest.raises(InvalidRequest, match="refer to each other"):
        library_schema(json.dumps(schema), strict)


def test_a_large_schema_without_joints_has_no_such_limit() -> None:
    properties = {f"p{n}": {"$ref": f"#/$defs/p{n}"} for n in range(300)}
    schema = an_object(properties=properties) | {"$defs": dict.fromkeys(properties, INTEGER)}
    assert len(closed(schema)["properties"]) == 300


NAMES = st.sampled_from(["a", "b", "ab"])
LEAVES = st.sampled_from(
    [
        *(True, False, INTEGER, NULL, {"const": 1}, {"enum": [1, "a", None]}),
        *({"type": "string", "maxLength": 2}, {"$ref": "#/$defs/x"}, {"$ref": "#"}),
    ]
)


def _larger(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(schemas, min_size=1, max_size=3)
    count, bound = st.integers(0, 3), st.sampled_from([-10, -1.5, 0, 0.25, 2, 3, 10.5])
    kinds = ["object", "array", "integer", "number", "string", ["object", "null"]]
    keywords = {
        "type": st.sampled_from(kinds),
        "properties": st.dictionaries(NAMES, schemas, min_size=1),
        "patternProperties": st.dictionaries(
            st.sampled_from(["^a", "^b$", "^[ab]$"]), schemas, min_size=1, max_size=2
        ),
        **dict.fromkeys(("additionalProperties", "items", "additionalItems"), schemas),
        "required": st.lists(NAMES, unique=True, max_size=2),
        **dict.fromkeys(("minProperties", "maxProperties", "minItems", "maxItems"), count),
        **dict.fromkeys(("minLength", "maxLength"), count),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), bound),
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), some),
        "multipleOf": st.sampled_from([1, 2, 3, 7]),
        "pattern": st.sampled_from(["^a", "b$", "^[ab]{1,2}$", "^(a|b)$", ".", r"^\d", "^$"]),
        "enum": st.lists(st.sampled_from([1, 2.5, "a", False, [1], {"a": 1}, {}]), min_size=1),
    }
    # in an order of their own, which the library minds
    names = st.lists(st.sampled_from([*keywords]), min_size=1, max_size=4, unique=True)
    return names.flatmap(
        lambda chosen: st.tuples(*(keywords[name] for name in chosen)).map(
            lambda values: dict(zip(chosen, values, strict=True))
        )
    )


SCHEMAS = st.recursive(LEAVES, _larger, max_leaves=6).filter(
    lambda schema: isinstance(schema, dict)
)


@settings(max_examples=150)
@example(schema={"oneOf": [{"type": "number", "$ref": "#/$defs/x"}]}, shared=INTEGER)
@given(schema=SCHEMAS, shared=SCHEMAS)
def test_drawn_schemas_are_kept_or_refused(model: RandomModel, schema: Any, shared: Any) -> None:
    schema = {**schema, "$defs": {"x": shared}}
    try:
        values = outputs(model, schema, num=4)
    except InvalidRequest:
        return
    for value in values:
        assert fits(schema, value), value
