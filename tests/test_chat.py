"""Chat templates: what they render, and what a hostile one cannot do."""

import json
from pathlib import Path

import pytest
from builders import Built, build_text_model
from typer.testing import CliRunner

from kdtree_nb.chat import chat_tokens, render_chat
from kdtree_nb.checkpoint import convert, export
from kdtree_nb.cli import app
from kdtree_nb.engine import Engine

TEMPLATE = """
{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- bos_token + '<|system|>You help.<|end|>' }}
    {%- endif %}
    {{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}"""
RENDERED = "<s><|system|>You help.<|end|><|user|>Hi & <b>\n<|end|><|assistant|>"
MESSAGES = [{"role": "user", "content": "Hi & <b>\n"}]


@pytest.fixture
def built(tmp_path: Path) -> Built:
    built = build_text_model(tmp_path / "text")
    config = {"bos_token": {"content": "<s>"}, "chat_template": TEMPLATE}
    (tmp_path / "text" / "tokenizer_config.json").write_text(json.dumps(config))
    return built


def test_rendered_as_written(built: Built) -> None:
    assert render_chat(built.path.parent, MESSAGES) == RENDERED


def test_a_file_of_its_own_comes_first(built: Built) -> None:
    (built.path.parent / "chat_template.jinja").write_text("{{ messages[0].content | tojson }}")
    assert render_chat(built.path.parent, MESSAGES) == '"Hi & <b>\\n"'


def test_transformers_renders_the_same(built: Built) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(built.path.parent / "tokenizer.json"), bos_token="<s>", chat_template=TEMPLATE
    )
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True) == RENDERED


def test_tokens_of_a_message(built: Built) -> None:
    engine = Engine.load(built.path, "cpu")
    assert engine.tokenizer is not None
    assert engine.tokenizer.decode(chat_tokens(engine, "Hi & <b>\n"), skip_special_tokens=False) == RENDERED


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "fails: .*unsafe"),
        ("{{ messages.append(1) }}", "fails: .*unsafe|not safely callable"),
        ("{{ raise_exception('roles must alternate') }}", "fails: roles must alternate"),
        ("{% for %}", "fails: Expected"),
        ("{{ 1 / 0 }}", "fails: division by zero"),
        (None, "has no chat template"),
    ],
)
def test_templates_that_fail(built: Built, template: str | None, message: str) -> None:
    (built.path.parent / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ValueError, match=message):
        render_chat(built.path.parent, MESSAGES)


def test_a_template_that_is_no_text_is_named(built: Built) -> None:
    (built.path.parent / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template.jinja: is not UTF-8 text"):
        render_chat(built.path.parent, MESSAGES)


def test_the_template_comes_along(built: Built, tmp_path: Path) -> None:
    bundle = convert(export(built.path, tmp_path / "hf"), tmp_path / "bundle")
    arguments = ["--bundle", str(bundle), "--prompt", "Hi", "--max-new-tokens", "3", "--json", "--device", "cpu"]
    plain, chat = (CliRunner().invoke(app, ["generate", *arguments, *more]) for more in ([], ["--chat"]))
    assert (plain.exit_code, chat.exit_code) == (0, 0), chat.output
    engine = Engine.load(bundle, "cpu")
    expected = engine.generate(chat_tokens(engine, "Hi"), max_new_tokens=3).tokens
    assert json.loads(chat.stdout)["tokens"] == expected
    assert json.loads(plain.stdout)["tokens"] == engine.generate("Hi", max_new_tokens=3).tokens
