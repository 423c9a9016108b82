"""Tools as typed Python functions with docstrings.

The model sees a name, description and JSON schema made from the signature and the docstring. The arguments of its
calls are checked against the same signature.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, overload

import docstring_parser
import pydantic
from pydantic.fields import FieldInfo

from roll_flash.errors import EnvError

TOOL_TIMEOUT_S = 30.0
TOOL_OUTPUT_CHARACTERS = 4000
MAX_ERRORS = 1000
"""Maximum number of wrong values that are described, as describing more takes seconds."""
NOT_FINITE = "the numbers in its arguments must be finite"
_HUGE_EXPONENT = re.compile(r"e[+-]?[\d_]{5}", re.IGNORECASE)
"""`Fraction("1e99999999999")` computes this number: it would take all memory, and hold up the worker until then."""
_MARK = "__roll_flash_tool__"

Function = TypeVar("Function", bound=Callable[..., Any])


class ToolDefinitionError(EnvError):
    """A function whose definition cannot be made into a tool."""

    exit_code = 2


class WrongArguments(Exception):
    """Arguments that do not fit the tool. The message is shown to the model."""


class ToolError(Exception):
    """A call that failed. The message is shown to the model as it is, without the name of a type."""


@dataclass(frozen=True, slots=True)
class ToolOptions:
    timeout_s: float = TOOL_TIMEOUT_S
    max_characters: int = TOOL_OUTPUT_CHARACTERS
    name: str | None = None


@overload
def tool(function: Function, /) -> Function: ...


@overload
def tool(
    *, timeout_s: float = ..., max_characters: int = ..., name: str | None = ...
) -> Callable[[Function], Function]: ...


def tool(
    function: Any = None,
    /,
    *,
    timeout_s: float = TOOL_TIMEOUT_S,
    max_characters: int = TOOL_OUTPUT_CHARACTERS,
    name: str | None = None,
) -> Any:
    """Make a method of a `ToolEnv`, or a function, a tool: `@tool()` or `@tool`. Sync (runs in a thread) or async.

    A call may take `timeout_s` seconds; the model sees at most `max_characters` of its result, head and tail.
    """
    if not timeout_s > 0 or max_characters < 1:
        raise ValueError("@tool: timeout_s must be more than 0, and max_characters at least 1")

    def mark(function: Any) -> Any:
        method = getattr(function, "__func__", function)  # of a staticmethod or classmethod
        setattr(method, _MARK, ToolOptions(timeout_s, max_characters, name))
        return function

    return mark if function is None else mark(function)


@dataclass(frozen=True, slots=True)
class ToolDescription:
    """A tool as the model sees it."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, of type object."""

    @property
    def argument_names(self) -> tuple[str, ...]:
        return tuple(self.parameters.get("properties", ()))

    def schema(self) -> dict[str, Any]:
        """Return the OpenAI form, which chat templates and OpenAI-compatible endpoints take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Tool(ToolDescription):
    """A tool: its description for the model, and the function to call."""

    options: ToolOptions
    function: Callable[..., Any]
    """A method of the environment (the environment is its first argument) or a plain function, see `takes_env`."""
    takes_env: bool
    validate: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Returns the arguments converted to the types of the tool; raises pydantic.ValidationError."""

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments converted to the types of the tool. Raises WrongArguments."""
        try:
            checked = self.validate(arguments)
        except pydantic.ValidationError as error:
            raise WrongArguments(f"{self.name}: {_say(error)}. It takes {self._signature()}") from None
        except WrongArguments:
            raise
        except Exception as error:  # pydantic passes on what a type raises, such as the pattern `a{99999999999}`
            raise WrongArguments(f"{self.name}: its arguments: {type(error).__name__}: {error}") from None
        if not are_finite(arguments):
            raise WrongArguments(f"{self.name}: {NOT_FINITE}")
        return checked

    def _signature(self) -> str:
        required = self.parameters.get("required", ())
        names = [name if name in required else f"{name} (optional)" for name in self.argument_names]
        return ", ".join(names) or "no arguments"


def are_finite(arguments: Mapping[str, Any]) -> bool:
    """Return False if a number in a call's arguments is NaN or infinite: no comparison with NaN is true, and
    `min(1.0, nan)` is 1.0, so that it may pass for the right answer. Checks of types find it in a float only, not in a
    parameter that takes any list or object."""
    try:
        json.dumps(dict(arguments), allow_nan=False, default=str)
    except ValueError:
        return False
    return True


def options_of(function: Any) -> ToolOptions | None:
    """Return the arguments of `@tool`; None for a function that is not a tool."""
    found = getattr(function, _MARK, None)
    return found if isinstance(found, ToolOptions) else None


def make_tool(function: Callable[..., Any], *, takes_env: bool = False) -> Tool:
    """Make a tool of a function. Raises ToolDefinitionError for one without types, docstring or plain parameters."""
    options = options_of(function) or ToolOptions()
    name = options.name or function.__name__
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ToolDefinitionError(f"tool {name}: it yields; return its whole result, as the model sees it at once")
    documentation = docstring_parser.parse(inspect.getdoc(function) or "")
    if not documentation.short_description:
        raise ToolDefinitionError(f"tool {name}: it has no docstring; the model reads it to know what the tool does")
    about = {parameter.arg_name: parameter.description for parameter in documentation.params}
    model = _arguments_model(name, function, about, takes_env)
    takes_fractions = '"format": "fraction"' in json.dumps(model.model_json_schema())

    def validate(arguments: Mapping[str, Any]) -> dict[str, Any]:
        if takes_fractions and _HUGE_EXPONENT.search(json.dumps(arguments, ensure_ascii=False, default=str)):
            raise WrongArguments(f"{name}: an exponent of a fraction is too large")
        checked = model.model_validate(dict(arguments))
        return {name: getattr(checked, name) for name in model.model_fields}

    parts = (documentation.short_description, documentation.long_description)
    return Tool(
        name=name,
        description="\n".join(part.strip() for part in parts if part),
        parameters=without_titles(model.model_json_schema()),
        options=options,
        function=function,
        takes_env=takes_env,
        validate=validate,
    )


def _arguments_model(
    name: str, function: Callable[..., Any], about: Mapping[str, str | None], takes_env: bool
) -> type[pydantic.BaseModel]:
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ToolDefinitionError(f"tool {name}: a type cannot be found: {error}") from None
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[takes_env:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolDefinitionError(f"tool {name}: {parameter} cannot be given by name; use plain parameters")
        if parameter.name not in hints:
            raise ToolDefinitionError(
                f"tool {name}: parameter {parameter.name} has no type; write {parameter.name}: str"
            )
        fields[parameter.name] = _field(hints[parameter.name], parameter.default, about.get(parameter.name))
    try:
        config = pydantic.ConfigDict(
            extra="forbid",
            protected_namespaces=(),
            allow_inf_nan=False,  # they would become non-finite rewards, which fail an episode instead of scoring it
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # an argument may be named `copy` or `schema`
            model: type[pydantic.BaseModel] = pydantic.create_model(name, __config__=config, **fields)
        model.model_json_schema()
    except (pydantic.errors.PydanticUserError, NameError) as error:
        reason = str(error).partition("\n")[0]
        raise ToolDefinitionError(f"tool {name}: a parameter's type has no JSON form: {reason}") from None
    return model


def _field(hint: Any, default: Any, description: str | None) -> tuple[Any, Any]:
    """Return the type of a parameter, and its default. The description is that of the docstring, else that of a
    `Field` of pydantic, which stands in the type (`Annotated`) or in the place of the default."""
    described: dict[str, Any] = {} if description is None else {"description": description}
    if isinstance(default, FieldInfo):
        return Annotated[hint, default, pydantic.Field(**described)], pydantic.Field()
    return hint, pydantic.Field(... if default is inspect.Parameter.empty else default, **described)


def without_titles(schema: Any) -> Any:
    """Remove the titles that pydantic adds and the model does not need. A property named `title` stays."""
    if isinstance(schema, list):
        return [without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: without_titles(value) for key, value in schema.items() if key != "title" or isinstance(value, dict)}
    return kept


def _say(error: pydantic.ValidationError) -> str:
    if (count := error.error_count()) > MAX_ERRORS:
        return f"{count} of the values in its arguments are of the wrong type"
    said = []
    for problem in error.errors()[:3]:
        where = ".".join(map(str, problem["loc"]))
        match problem["type"]:
            case "missing":
                said.append(f"the argument {where} is missing")
            case "extra_forbidden":
                said.append(f"there is no argument {where}")
            case _:
                said.append(f"argument {where}: {problem['msg']} (given: {_shown(problem['input'])})")
    return "; ".join(said)


def _shown(value: object) -> str:
    try:
        return repr(str(value)[:80])
    except (ValueError, RecursionError):  # a number too long to print, or too deep nesting
        return f"a {type(value).__name__} that cannot be shown"
