"""Runs chat templates so that they can neither reach the host nor keep it busy.

It does not know what a message is.

A template is code that came with a model. Jinja's immutable sandbox keeps it from the host's objects; this module
also bounds what one rendering may do. Each bound is far above what real templates need:

- ``MAX_STEPS``: passes through loop bodies and items of what is looped over, all together; a call counts ten;
- ``MAX_CHARS``: length of any one text, the result too, in characters (an item of a list counts eight);
- ``MAX_WORK_CHARS``: characters of all texts and lists that the template builds, together.

So a template that loops for ever, doubles a string or asks for a huge padding ends with ``TemplateLimitError``
after a second or so. Filters whose results are hard to bound and that chat templates do not use are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from types import CodeType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format, do_indent, do_round, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000
MAX_CHARS = 2**26
MAX_WORK_CHARS = 2**30

_STEPS_OF_CALL = 10
_CHARS_OF_ITEM = 8
_MAX_INT_BITS = 4096
_MAX_PLACES = 64
_WIDE_PERCENT = re.compile(r"%[^%a-zA-Z]*(\*|\d{5,})")
_WIDE_BRACES = re.compile(r"\{[^}]*:[^}]*(\{|\d{5,})")
_LEFT_OUT_FILTERS = (
    *("batch", "center", "filesizeformat", "pprint", "random", "slice"),
    *("striptags", "urlize", "wordwrap", "xmlattr"),
)
# Filters under names that no template can write: calls of these are cheap and cannot be redefined.
_COUNT_STEP, _COUNT_ITEMS, _CONCAT = "#step", "#items", "#concat"
_PADDING_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill"})


class TemplateLimitError(Exception):
    """A template did more than one rendering may."""


class TemplateRefusalError(Exception):
    """A template called ``raise_exception``."""


class SandboxEnvironment(ImmutableSandboxedEnvironment):
    """An environment for one rendering: it counts what the template does."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        self._steps_left = MAX_STEPS
        self._chars_left = MAX_WORK_CHARS
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
        for name in _LEFT_OUT_FILTERS:
            del self.filters[name]
        self.filters |= {
            _COUNT_STEP: self._count_step,
            _COUNT_ITEMS: self._count_items,
            _CONCAT: self._concat_operands,
            "format": self._format,
            "indent": self._indent,
            "join": self._join,
            "replace": self._replace,
            "round": _round,
            "tojson": self._to_json,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = self.read(source)
        _Instrument().visit(tree)
        return tree

    def read(self, source: str) -> nodes.Template:
        """A template's syntax tree, as it is written."""
        return Parser(self, source).parse()

    def load_code(self, code: CodeType) -> jinja2.Template:
        """A template on this environment, from what ``compile`` gave on any."""
        return self.template_class.from_code(self, code, self.make_globals(None))

    # --- counting -----------------------------------------------------------------------------------

    # Marked to want the context, so that the compiler does not call them ahead of time.

    @jinja2.pass_context
    def _count_step(self, _context: Context, steps: int) -> None:
        self._count_steps(steps)

    @jinja2.pass_context
    def _count_items(self, _context: Context, items: Any) -> Any:
        if hasattr(items, "__next__"):
            items = list(items)
        if hasattr(items, "__len__"):
            self._count_steps(len(items))
        return items

    def _count_steps(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise TemplateLimitError(f"it takes more than {MAX_STEPS} steps")

    def concat(self, pieces: Iterable[str]) -> str:
        """Join what a block, a macro or the template gave."""
        collected: list[str] = []
        for piece in pieces:
            self._charge(len(piece))
            collected.append(piece)
        return self._checked("".join(collected))

    @jinja2.pass_context
    def _concat_operands(self, _context: Context, *operands: Any) -> str:
        return self.concat(str(operand) for operand in operands)

    def _charge(self, chars: int) -> None:
        if chars > MAX_CHARS:
            raise TemplateLimitError(f"it makes a text or list longer than {MAX_CHARS}")
        self._chars_left -= chars
        if self._chars_left < 0:
            raise TemplateLimitError(f"it builds more than {MAX_WORK_CHARS} characters of text")

    def _checked(self, text: str) -> str:
        self._charge(len(text))
        return text

    # --- operators and calls ------------------------------------------------------------------------

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An arithmetic operator; the size of its result is checked before it is made."""
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self._charge(_size(left) + _size(right))
        elif operator == "*":
            self._check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            _check_widths(_WIDE_PERCENT, left)
        return super().call_binop(context, operator, left, right)

    def _check_product(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > _MAX_INT_BITS:
                raise TemplateLimitError("it multiplies huge numbers")
            return
        for items, count in ((left, right), (right, left)):
            if hasattr(items, "__len__") and isinstance(count, int):
                self._charge(_size(items) * max(count, 0))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` and ``str.format_map``, with their widths checked."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        template = str(value.__self__)

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_widths(_WIDE_BRACES, template)
            return self._checked(wrapped(*args, **kwargs))

        return checked

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call something from a template; methods of texts and numbers have their sizes checked."""
        self._count_steps(_STEPS_OF_CALL)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str | bytes | int):
            name = getattr(obj, "__name__", "")
            if isinstance(owner, str) and name == "replace" and len(args) > 1:
                return self._replace(owner, *args)
            if isinstance(owner, str) and name == "join" and len(args) == 1:
                return self._join(args[0], owner)
            self._check_method(owner, name, args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def _check_method(self, owner: str | bytes | int, name: str, args: Iterable[Any], kwargs: dict[str, Any]) -> None:
        if name in ("replace", "join", "translate"):
            raise TemplateLimitError(f"it calls {name} in a way whose result cannot be bounded")
        size = 1 if isinstance(owner, int) else len(owner)
        self._charge(size)
        if name in _PADDING_METHODS:
            factor = size if name == "expandtabs" else 1
            for value in (*args, *kwargs.values()):
                if isinstance(value, int):
                    self._charge(max(value, 0) * factor)

    # --- filters ------------------------------------------------------------------------------------

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        if len(indent) > _MAX_PLACES if isinstance(indent, str) else (indent or 0) > _MAX_PLACES:
            raise TemplateLimitError(f"it indents JSON by more than {_MAX_PLACES}")
        return self._checked(
            json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        )

    def _join(self, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
        items: Iterable[Any] = value
        if attribute is not None:
            items = map(make_attrgetter(self, attribute), items)
        texts = [str(item) for item in items]
        self._charge(sum(map(len, texts)) + len(str(d)) * len(texts))
        return str(d).join(texts)

    def _replace(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, before, after = str(value), str(old), str(new)
        limit = -1 if count is None else count
        found = text.count(before) if limit < 0 else min(text.count(before), limit)
        self._charge(len(text) + found * len(after))
        return text.replace(before, after, limit)

    def _format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        _check_widths(_WIDE_PERCENT, str(value))
        return self._checked(do_format(str(value), *args, **kwargs))

    def _indent(self, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        text = str(value)
        self._charge(len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else len(width)))
        return do_indent(text, width, first, blank)


def _size(items: Any) -> int:
    return len(items) * (1 if isinstance(items, str | bytes) else _CHARS_OF_ITEM)


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > _MAX_PLACES:
        raise TemplateLimitError(f"it rounds to more than {_MAX_PLACES} places")
    return do_round(value, precision, method)


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and max(right, 0) * left.bit_length() > _MAX_INT_BITS:
        raise TemplateLimitError("it raises a number to a huge power")


def _check_widths(wide: re.Pattern[str], text: str) -> None:
    if wide.search(text):
        raise TemplateLimitError("it formats with a width of five digits or more, or with a computed one")


def _refuse(message: object) -> NoReturn:
    raise TemplateRefusalError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _GenerationBlock(Extension):
    """``{% generation %} … {% endgeneration %}`` marks an assistant's words for training; here it shows them."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's own content."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Instrument(NodeTransformer):
    """Puts calls of the environment's counters into a template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - Jinja's visitors are named so
        """Count what is looped over, and each pass."""
        self.generic_visit(node)
        node.iter = _filter(_COUNT_ITEMS, [node.iter])
        node.body.insert(0, _count_step())
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """Check the size of what ``~`` makes."""
        self.generic_visit(node)
        return _filter(_CONCAT, node.nodes)


def _filter(name: str, arguments: Sequence[nodes.Node]) -> nodes.Filter:
    return nodes.Filter(arguments[0], name, list(arguments[1:]), [], None, None)


def _count_step() -> nodes.Node:
    return nodes.ExprStmt(_filter(_COUNT_STEP, [nodes.Const(1)]))
