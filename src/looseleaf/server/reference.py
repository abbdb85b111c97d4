"""``/docs``: the OpenAPI document as one HTML page without scripts, which works offline."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color-scheme:light dark}code{font-size:.9em}h2{margin-top:2.5rem}table{border-collapse:"
    "collapse;width:100%}td,th{border-bottom:1px solid #8885;padding:.3rem .6rem .3rem 0;"
    "text-align:left;vertical-align:top}nav a{margin-right:1rem}"
)


def reference_page(api: Mapping[str, Any]) -> str:
    """HTML of an OpenAPI document: its paths, then its schemas."""
    info = api["info"]
    schemas = api["components"]["schemas"]
    body = "".join([*_operations(api["paths"]), "<h1>Schemas</h1>", *_schemas(schemas)])
    text = escape(info["description"]).replace("\n\n", "</p><p>").replace("`", "")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(info['title'])} API"
        f"</title><meta name=viewport content='width=device-width'><style>{_STYLE}</style>"
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{text}</p>"
        f"<p>For machines: <a href=openapi.json>openapi.json</a></p>{body}</html>"
    )


def _operations(paths: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in paths.items():
        for method, operation in methods.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
            yield f"<p>{escape(operation.get('description', ''))}</p>"
            content = operation.get("requestBody", {}).get("content", {})
            for kind in content.values():
                yield f"<p>Body: {_type(kind['schema'])}</p>"
            answers = [
                f"{status} {_type(kind.get('schema', {}))}"
                for status, response in operation["responses"].items()
                if status.startswith("2")
                for kind in response.get("content", {}).values()
            ]
            yield f"<p>Answer: {', '.join(answers)}</p>"


def _schemas(schemas: Mapping[str, Any]) -> Iterator[str]:
    for name, schema in schemas.items():
        yield f"<h2 id='{escape(name)}'>{escape(name)}</h2>"
        yield f"<p>{escape(schema.get('description', ''))}</p><table>"
        required = schema.get("required", ())
        for field, shape in schema.get("properties", {}).items():
            note = "required" if field in required else _default(shape)
            yield (
                f"<tr><th><code>{escape(field)}</code><td>{_type(shape)}<td>{note}"
                f"<td>{escape(shape.get('description', ''))}"
            )
        yield "</table>"


def _default(shape: Mapping[str, Any]) -> str:
    value = shape.get("default")
    return "" if value is None else f"default {escape(str(value))}"


def _type(shape: Mapping[str, Any]) -> str:
    if "$ref" in shape:
        name = escape(shape["$ref"].rpartition("/")[2])
        return f"<a href='#{name}'>{name}</a>"
    choices = shape.get("anyOf") or shape.get("oneOf")
    if choices:
        return " or ".join(dict.fromkeys(map(_type, choices)))
    if "enum" in shape or "const" in shape:
        return " or ".join(
            f"<code>{escape(repr(v))}</code>" for v in shape.get("enum", [shape.get("const")])
        )
    if shape.get("type") == "array":
        return f"list of {_type(shape.get('items', {}))}"
    bounds = [
        f"{sign} {shape[name]}"
        for name, sign in (
            ("exclusiveMinimum", "&gt;"),
            ("minimum", "≥"),
            ("maximum", "≤"),
        )
        if name in shape
    ]
    return " ".join([escape(str(shape.get("type", "any"))), *bounds])
