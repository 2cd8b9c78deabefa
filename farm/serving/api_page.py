"""The API's page for readers: routes, fields and examples out of its OpenAPI document. Start reading at `api_page`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from conf.reports.blocks import Block, Code, Fold, Heading, Lead, Page, Preformatted, Section, linked, table

_LONGEST_CHOICE = 12  # values of a field that are listed


def api_page(document: Mapping[str, Any]) -> Page:
    """Return the page of an OpenAPI document: a section for each tag, with its routes."""
    schemas = document.get("components", {}).get("schemas", {})
    by_tag: dict[str, list[Block]] = {}
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            tag = route.get("tags", ["other"])[0]
            by_tag.setdefault(tag, []).extend(_route(method.upper(), path, route, schemas))
    sections = {tag: Section(tag.replace(" ", "-"), tag, tuple(blocks)) for tag, blocks in by_tag.items()}
    about = f"{document['info'].get('summary', '')}. {document['info'].get('description', '')} "
    described = Lead(f"{about}A program reads the same at ", Code("/openapi.json"), ".")
    return Page(title=f"{document['info']['title']}: API", head=(described,), sections=linked(sections))


def _route(method: str, path: str, route: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[Block]:
    yield Heading(f"{method} {path}")
    if text := route.get("description"):
        yield Lead(text)
    for parameter in route.get("parameters", ()):
        yield Lead(Code(parameter["name"]), f" ({parameter['in']}): {parameter.get('description') or 'text'}")
    body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        schema = _resolved(body, schemas)
        yield from _fields("Fields of the body", schema, schemas)
        if examples := _examples(schema):
            shown = "\n".join(f"curl -X {method} .../{path.lstrip('/')} --json '{json.dumps(one)}'" for one in examples)
            yield Fold("Examples", (Preformatted(shown),))
    rows = []
    for status, answer in route["responses"].items():
        contents = [content.get("schema", {}) for content in answer.get("content", {}).values()]
        rows.append((status, _type(contents[0], schemas) if contents else "none", answer.get("description", "")))
    yield Fold("Answers", (table(("status", "body", "*meaning"), rows, words=2),))


def _fields(title: str, schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[Block]:
    """Yield a table of a schema's fields, and one of each object's that they hold."""
    properties = schema.get("properties")
    if not properties:
        return
    required = set(schema.get("required", ()))
    rows = []
    for name, field in properties.items():
        default = "" if field.get("default") in (None, [], {}) else f"; default {json.dumps(field['default'])}"
        words = f"{field.get('description', '')}{default}".removeprefix("; ")
        rows.append((Code(name), _type(field, schemas), "yes" if name in required else "", words))
    yield Fold(title, (table(("field", "type", "required", "*meaning"), rows, words=3),), is_open=True)
    for name in dict.fromkeys(_references(properties)):
        yield from _fields(f"Fields of {name}", schemas[name], schemas)


def _resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    return schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _references(value: Any) -> Iterator[str]:
    """Yield the names of the schemas that a value refers to."""
    if isinstance(value, Mapping):
        if isinstance(reference := value.get("$ref"), str):
            yield reference.rpartition("/")[2]
        for part in value.values():
            yield from _references(part)
    elif isinstance(value, list):
        for part in value:
            yield from _references(part)


def _type(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """Return a schema's type in words: `integer 1 to 16384`, `list of text`, `one of full, fast`."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if choices := schema.get("enum"):
        more = ", ..." if len(choices) > _LONGEST_CHOICE else ""
        return f"one of {', '.join(map(str, choices[:_LONGEST_CHOICE]))}{more}"
    if options := schema.get("anyOf"):
        return " or ".join(dict.fromkeys(_type(one, schemas) for one in options))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}), schemas)}"
    if kind == "string":
        return "text"
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    bounds = f" {low:g} to {high:g}" if None not in (low, high) else f" from {low:g}" if low is not None else ""
    return f"{kind}{bounds}"


def _examples(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return bodies of a request out of the fields' examples: one for each way to give a job."""
    examples = {
        name: field["examples"][0] for name, field in schema.get("properties", {}).items() if field.get("examples")
    }
    bodies: list[dict[str, Any]] = []
    if "config" in examples:
        bodies.append({"config": examples["config"]})
    if "model" in examples:
        bodies.append({"model": examples["model"], "inputs": examples.get("inputs")})
    return bodies
