"""A message as the text that a chat model was trained on: the checkpoint's own template, run in a sandbox."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdtree_nb.bundle.format import fault
from kdtree_nb.bundle.headers import read_small
from kdtree_nb.checkpoint.folder import read_json

if TYPE_CHECKING:
    from kdtree_nb.engine import Engine

LARGEST_TEMPLATE = 2**20


def chat_tokens(engine: "Engine", message: str) -> list[int]:
    """Token ids of a conversation that has one message by the user, up to where the answer begins.

    Raises
    ------
    ValueError
        If the bundle has no tokenizer or no chat template beside it, or if the template fails.
    """
    if engine.tokenizer is None:
        raise ValueError(f"{engine.bundle.path} names no tokenizer, which --chat needs")
    text = render_chat(engine.bundle.path.parent, [{"role": "user", "content": message}])
    return list(engine.tokenizer.encode(text, add_special_tokens=False).ids)  # the template writes them itself


def render_chat(folder: Path, messages: list[dict[str, str]]) -> str:
    """The text of a conversation, with what opens the assistant's turn at its end.

    The template is ``chat_template.jinja``, or ``chat_template`` in ``tokenizer_config.json``. It runs in Jinja's
    immutable sandbox, with transformers' ``raise_exception`` and ``tojson``.

    Raises
    ------
    ValueError
        If there is no template or Jinja is not installed, or if the template fails.
    """
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ValueError("a chat template needs Jinja: pip install 'kdtree_nb[chat]'") from error

    settings = folder / "tokenizer_config.json"
    config = read_json(settings) if settings.is_file() else {}
    path = folder / "chat_template.jinja"
    own = path.is_file()
    try:
        template = read_small(path, LARGEST_TEMPLATE).decode() if own else config.get("chat_template")
    except UnicodeDecodeError:
        raise fault(path, "is not UTF-8 text") from None
    if not isinstance(template, str):
        raise fault(folder, "has no chat template, expected chat_template.jinja or one in tokenizer_config.json")

    def fail(message: str) -> None:
        raise TemplateError(message)

    def as_json(value: object, indent: int | None = None, separators: tuple[str, str] | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = fail
    environment.filters["tojson"] = as_json  # Jinja's own escapes for HTML
    tokens = {name: _text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    try:
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **tokens)
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise fault(folder, f"the chat template fails: {error}") from error


def _text(token: Any) -> str:
    """A special token as tokenizer_config.json has it, a text or an object."""
    return str(token.get("content", "")) if isinstance(token, dict) else token or ""
