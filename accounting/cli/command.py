"""Commands are functions: cyclopts reads their options from signature and docstring.

    def verify(directory: str, /, *, resample: bool = False) -> None:
        \"\"\"Checks every byte of batches.

        Args:
          directory: Folder of the batches.
          resample: Also make every record again.
        \"\"\"

A parameter that is a dataclass gives the options of its fields: `of_fields`.

Public: everything.
"""

from __future__ import annotations

import io
import re
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import cyclopts
import pydantic
from cyclopts import App, Group, Parameter
from cyclopts.argument import ArgumentCollection
from cyclopts.config import Toml
from cyclopts.help.help import create_parameter_help_panel

from accounting.core.settings import OPTIONS, REQUIRED, bound_of
from accounting.core.validation import InputError, did_you_mean

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console

#: The annotation of a parameter whose fields are options.
of_fields = Parameter(name="*")
#: What a command hands on to another program.
PassedOn = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]
T = TypeVar("T")

_WIDTH = 80
_NAMES = 26


class _Help:
    """Writes a short help as plain text: what an option is in one sentence.

    The reference has all of it: `options_by_group`.
    """

    def __call__(self, console: Console, options: Any, panel: HelpPanel) -> None:
        """Writes the options of a group.

        Args:
          console: Where the help is written.
          options: What the console can do; not used.
          panel: The group of options.
        """
        del options
        if panel.format == "command":  # --help
            return
        rows = [_beside(*_said_of(entry, _sentence)) for entry in panel.entries]
        if rows:
            _print(console, "\n".join([f"{_plain(panel.title)}:", *rows]))

    def render_usage(self, console: Console, options: Any, usage: Any) -> None:
        """Writes how the command is given; arguments as for a call."""
        del options
        _print(console, f"Usage: {_plain(usage).strip()}\n")

    def render_description(self, console: Console, options: Any, text: Any) -> None:
        """Writes what the command does, and examples; arguments as for a call."""
        del options
        first, *others = _plain(text).strip().split("\n\n")
        examples = [each for each in others if each.startswith("For example")]
        _print(console, "\n\n".join([first, *examples]) + "\n")


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _plain(text: Any) -> str:
    """Returns text of cyclopts, which may be a renderable of rich."""
    if isinstance(text, str):
        return text
    if hasattr(text, "plain"):
        return str(text.plain)
    from rich.console import Console

    console = Console(file=io.StringIO(), width=_WIDTH, no_color=True)
    with console.capture() as captured:
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    return captured.get().rstrip()


def _sentence(words: str) -> str:
    """Returns the first sentence, and the part that names the default."""
    default = re.search(r"\[default: .*\]", words)
    first = re.split(r"(?<!e\.g)(?<=\.) (?=\S)", words, maxsplit=1)[0]
    return first if default is None or "[" in first else f"{first} {default[0]}"


def _said_of(entry: Any, shorten: Callable[[str], str]) -> tuple[str, str]:
    """Returns the names of an option, and its description.

    Args:
      entry: The option, as cyclopts describes it.
      shorten: Shortens the description.
    """
    names = ", ".join(entry.display_labels_with_metavar)
    names = names.replace("--[KEYWORD] STR", "--NAME VALUE")
    words = " ".join(_plain(entry.description).split()) if entry.description else ""
    found = [shorten(words)] if words else []
    if entry.choices and not all(each in words for each in entry.choices):
        found.append(f"[{', '.join(entry.choices)}]")
    default = _plain(entry.default) if entry.default is not None else ""
    if default not in ("", '""', "False", "()") and "[default" not in words:
        found.append(f"[default: {default}]")
    return names, " ".join(found)


def _beside(names: str, words: str) -> str:
    lines = textwrap.wrap(words, _WIDTH - _NAMES) or [""]
    first = f"  {names}"
    if len(first) > _NAMES - 1:
        lines.insert(0, "")
    head = f"{first:<{_NAMES}}{lines[0]}".rstrip()
    return "\n".join([head, *(f"{'':{_NAMES}}{line}" for line in lines[1:])])


def resolved(cls: type[T]) -> type[T]:
    """Lets cyclopts read a dataclass whose bases are of other modules."""
    init: Any = cls.__init__
    init.__annotations__ = typing.get_type_hints(cls, include_extras=True)
    return cls


def app_of(function: Callable[..., Any], **options: Any) -> App:
    """Returns the cyclopts app of a command.

    Args:
      function: The command.
      **options: Further arguments of `cyclopts.App`.
    """
    app = App(**{**APP_OPTIONS, **options})
    app.default(function)
    return app


def _read_config(app: App, commands: tuple[str, ...], arguments: Any) -> None:
    """Takes the values of options from a file, for those that are not given."""
    for each in arguments:
        if "--config" in each.names and each.tokens:
            source = Toml(
                each.tokens[0].value, must_exist=True, use_commands_as_keys=False
            )
            try:
                source(app, commands, arguments)
            except cyclopts.UnknownOptionError:
                raise
            except (OSError, ValueError, cyclopts.CycloptsError) as error:
                raise InputError(
                    f"--config {each.tokens[0].value} is not readable as TOML: {error}."
                    " Write lines such as learning_rate = 0.1."
                ) from None


def call(function: Callable[..., Any], tokens: Sequence[str], name: str) -> Any:
    """Runs a command, or prints its help; returns what the command returns.

    Args:
      function: The command.
      tokens: What follows the command's name on the command line.
      name: How the command is called.

    Raises:
      InputError: an argument is missing, unknown or refused, or the work ends by it.
    """
    app = app_of(function, name=name)
    try:
        return app([*tokens])
    except cyclopts.CycloptsError as error:
        raise input_error(error, names_of(function), tokens) from None


def parse(function: Callable[..., Any], tokens: Sequence[str]) -> dict[str, Any]:
    """Returns the arguments of a command.

    Args:
      function: The command.
      tokens: What follows the command's name on the command line.

    Raises:
      InputError: an argument is missing, unknown or refused.
    """
    try:
        _, bound, _ = app_of(function).parse_args(
            [*tokens], exit_on_error=False, print_error=False
        )
    except cyclopts.CycloptsError as error:
        raise input_error(error, names_of(function), tokens) from None
    bound.apply_defaults()
    return dict(bound.arguments)


def input_error(
    error: cyclopts.CycloptsError, names: Sequence[str], tokens: Sequence[str]
) -> InputError:
    """Returns the error of a command line as one line.

    Args:
      error: What cyclopts found.
      names: Names of all options of the command.
      tokens: What was given.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, InputError):
            return cause
        if isinstance(cause, pydantic.ValidationError):
            name = error.argument.name if error.argument else "the value"
            return InputError(bound_of(name.lstrip("-").replace("-", "_"), cause))
        cause = cause.__cause__ or cause.__context__
    given = (token.partition("=")[0] for token in tokens)
    unknown = [
        each for each in given if re.match(r"--[\w-]+$", each) and each not in names
    ]
    if unknown and not isinstance(error, cyclopts.CoercionError):
        hint = did_you_mean(unknown[0], names)
        return InputError(f"No such option: {unknown[0]}.{hint} See --help.")
    text = " ".join(str(error).split())
    if isinstance(error, cyclopts.CoercionError) and error.token and error.argument:
        kind = _kind(error.argument.hint)
        text = f"Expected {error.argument.name} {error.token.value!r} to be {kind}."
    elif isinstance(error, cyclopts.MissingArgumentError) and error.argument:
        text = f"Expected {error.argument.name} with a value."
    elif isinstance(error, cyclopts.UnusedCliTokensError) and error.unused_tokens:
        text = f"Expected no argument {error.unused_tokens[0]!r}."
    return InputError(f"{text} See --help.")


def _value(hint: Any, tokens: Sequence[cyclopts.Token]) -> Any:
    """Returns the value of an option; cyclopts alone would round 1.5 to an integer."""
    kinds = {hint, *typing.get_args(hint)}
    for token in tokens:
        if int in kinds and float not in kinds and "." in token.value:
            raise cyclopts.CoercionError(token=token, target_type=hint)
    return cyclopts.convert(hint, [*tokens])


def _kind(hint: Any) -> str:
    """Returns what values of a type are, in words."""
    if typing.get_origin(hint) is typing.Annotated:
        return _kind(typing.get_args(hint)[0])
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(str, typing.get_args(hint)))
    if arguments := [each for each in typing.get_args(hint) if each is not type(None)]:
        return " or ".join(map(_kind, arguments))
    words = {int: "an integer", float: "a number", bool: "true or false"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def names_of(function: Callable[..., Any]) -> list[str]:
    """Returns the options of a command."""
    collection = app_of(function).assemble_argument_collection()
    names = (name for each in collection if each.parse for name in each.names)
    return [name for name in names if name != "*"]  # fields that are not parsed


def options_by_group(function: Callable[..., Any]) -> dict[str, list[tuple[str, str]]]:
    """Returns all options of a command with their descriptions, by group."""
    shown = Parameter(show=True)
    groups: dict[Group, list[tuple[str, str]]] = {}
    for each in app_of(function).assemble_argument_collection(parse_docstring=True):
        if not each.parse or each.names == ("--config",):
            continue
        each.parameter = Parameter.combine(each.parameter, shown)
        (group, *_) = cast(tuple[Group, ...], each.parameter.group)
        panel = create_parameter_help_panel(
            group, ArgumentCollection([each]), "plaintext"
        )
        rows = groups.setdefault(group, [])
        rows += [_said_of(entry, str) for entry in panel.entries]
    order = sorted(groups.items(), key=lambda item: item[0].sort_key or 0)
    return {group.name: rows for group, rows in order if rows}


def app_of_all(name: str, functions: Mapping[str, Callable[..., Any]]) -> App:
    """Returns an app of several commands, for the completion of shells.

    Args:
      name: Name of the program.
      functions: Commands by name.
    """
    app = App(name=name, **APP_OPTIONS)
    for command, function in functions.items():
        app.command(app_of(function, name=command))
    return app


#: What all apps have in common.
APP_OPTIONS: dict[str, Any] = {
    "config": (_read_config,),
    "help_formatter": _Help(),
    "version_flags": (),
    "help_format": "plaintext",
    "help_flags": ("--help",),
    "default_parameter": Parameter(
        negative=(), show_env_var=False, allow_repeating=True, converter=_value
    ),
    "group_parameters": OPTIONS,
    "group_arguments": REQUIRED,
    "exit_on_error": False,
    "print_error": False,
    "suppress_keyboard_interrupt": False,  # they are StoppedErrors with a message
    "verbose": False,
    "result_action": "return_value",
}
