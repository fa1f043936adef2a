"""A processor's chat template: replaces it, and checks that it reads the options and tools that it is given."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

SET_BY_RENDER = frozenset({"messages", "add_generation_prompt"})
FUNCTIONS_OF_TRANSFORMERS = frozenset({"raise_exception", "strftime_now"})  # which it gives to every template


def set_chat_template(processor: Any, file: str | Path) -> None:
    """Replaces the chat template of a processor and of its tokenizer, with which it is saved.

    Raises:
        ValueError: no such file, or one that is no Jinja template.
    """
    try:
        template = Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template: expected a Jinja file, got {str(file)!r}: {error}") from error
    with template_errors():
        _variables(template)
    processor.chat_template = getattr(processor, "tokenizer", processor).chat_template = template


def check_template_options(processor: Any, options: Mapping[str, Any], *, with_tools: bool | None = None) -> None:
    """Raise a ValueError for options that the chat template does not read: it would ignore them without a word.

    Args:
        with_tools: whether the chat has tools; by default unknown, and an option of either template will do.
    """
    if not options:
        return
    cases = [False, True] if with_tools is None else [with_tools]
    known = frozenset[str]().union(*(_options_of_template(processor, with_tools=case) for case in cases))
    if wrong := [name for name in options if name not in known]:
        names = ", ".join(sorted(known)) or "none"
        raise ValueError(
            f"chat_template_kwargs: expected options of the model's chat template ({names}), got {wrong[0]!r}"
        )


def check_template_shows_tools(processor: Any) -> None:
    """Raise a ValueError if the chat template does not read the tools."""
    if "tools" not in _options_of_template(processor, with_tools=True):
        tokenizer = getattr(processor, "tokenizer", processor)
        raise ValueError(
            f"tools: expected a chat template that shows them, got that of {tokenizer.name_or_path!r}, which does not; "
            "take a model whose template has tools, or describe them in a system message and remove the column"
        )


def _options_of_template(processor: Any, *, with_tools: bool) -> frozenset[str]:
    """Names that the chat template reads and that rlkit does not set; none without a template.

    Of several templates, transformers renders "tool_use" for a tokenizer with tools, and otherwise "default".
    """
    template = getattr(processor, "chat_template", None)
    if isinstance(template, Mapping):
        is_tokenizer = not hasattr(processor, "tokenizer")
        tool_template = template.get("tool_use") if with_tools and is_tokenizer else None
        template = tool_template or template.get("default")
    with template_errors():
        return _variables(template or "") - SET_BY_RENDER


@cache
def _variables(template: str) -> frozenset[str]:
    """Variables that a chat template can be given.

    A name that the template assigns is one only if it does so where the name is not defined, or as its default.
    """
    from jinja2 import nodes
    from jinja2.meta import find_undeclared_variables
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    without_marks = re.sub(r"{%[-+]?\s*(end)?generation\s*[-+]?%}", "", template)  # a statement of transformers' own
    parsed = environment.parse(without_marks)
    assigned = {name.name for name in parsed.find_all(nodes.Name) if name.ctx == "store"}
    optional = set()
    deciding = [(node, node.test) for node in parsed.find_all(nodes.If)]
    for node, expression in [*deciding, *((node, node.node) for node in parsed.find_all(nodes.Assign))]:
        set_here = {name.name for name in node.find_all(nodes.Name) if name.ctx == "store"}
        optional |= _names_tested(expression) & set_here
    return frozenset(find_undeclared_variables(parsed) - FUNCTIONS_OF_TRANSFORMERS - (assigned - optional))


def _names_tested(expression: Any) -> set[str]:
    """Names of which an expression of a template tests whether they are defined, or for which it has a default."""
    from jinja2 import nodes

    root = nodes.Output([expression])  # `find_all` leaves out the node itself
    tests = [*root.find_all(nodes.Test), *root.find_all(nodes.Filter)]
    tested = [found.node for found in tests if found.name in ("defined", "undefined", "default", "d")]
    return {node.name for node in tested if isinstance(node, nodes.Name)}


@contextmanager
def template_errors() -> Iterator[None]:
    """What a template can fail with, as a ValueError."""
    from jinja2 import TemplateError

    try:
        yield
    except (TemplateError, ArithmeticError, LookupError, MemoryError, RecursionError, TypeError) as error:
        raise ValueError(f"chat template: {str(error) or type(error).__name__}") from error
