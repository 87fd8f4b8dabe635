"""TOML, YAML and `.env` files are edited in place."""

from __future__ import annotations

import pytest

from gateway.clients.document import DocumentError
from gateway.clients.env_document import EnvDocument, quoted, unquoted
from gateway.clients.toml_document import TomlDocument
from gateway.clients.yaml_document import YamlDocument

TOML = """\
# mine
model = "gpt-5" # the good one
approval_policy = "never"

[model_providers.other]
name = "Other"

[projects."/home/me"]
trust_level = "trusted"
"""

YAML = """\
# mine
name: My config
version: 0.0.1
schema: v1

models:
  # the good one
  - name: Good
    provider: anthropic   # paid
    roles: [chat, edit]

  - name: Local
    provider: ollama

context:
  - provider: code
"""

ITEM = {"name": "kvgate", "provider": "openai", "requestOptions": {"headers": {"X-Cache-Mode": "split"}}}


def test_toml_keeps_comments_order_and_other_tables():
    document = TomlDocument(TOML)
    document.set(("model",), "smollm2")
    document.set(("model_provider",), "kvgate")
    document.set(("model_providers", "kvgate", "base_url"), "http://x/v1")
    document.set(("model_providers", "kvgate", "http_headers", "X-Cache-Mode"), "split")
    again = TomlDocument(document.text).plain()
    assert again["model_provider"] == "kvgate"
    assert again["model_providers"]["kvgate"] == {"base_url": "http://x/v1", "http_headers": {"X-Cache-Mode": "split"}}
    assert again["model_providers"]["other"] == {"name": "Other"}
    assert again["projects"] == {"/home/me": {"trust_level": "trusted"}}
    assert '# mine\nmodel = "smollm2" # the good one\napproval_policy = "never"\n' in document.text
    assert document.text.index("model_provider =") < document.text.index("[model_providers.other]")


def test_toml_takes_out_what_it_put_in():
    document = TomlDocument(TOML)
    document.set(("model_provider",), "kvgate")
    document.set(("model_providers", "kvgate", "base_url"), "http://x/v1")
    document.remove(("model_providers", "kvgate"))
    document.remove(("model_provider",))
    document.remove(("none", "such"))
    assert document.plain() == TomlDocument(TOML).plain()


@pytest.mark.parametrize("text", ["a = ", "[t\n", "a = 1\na = 2\n", 'key = "sk-secret'])
def test_broken_toml_is_refused_without_quoting_it(text: str):
    with pytest.raises(DocumentError) as refusal:
        TomlDocument(text)
    assert "sk-secret" not in str(refusal.value)


def test_yaml_gets_an_item_after_the_last_one_and_keeps_every_other_line():
    document = YamlDocument(YAML)
    document.set(("models", "kvgate"), ITEM)
    added = (
        '  - name: "kvgate"\n    provider: "openai"\n    requestOptions:\n      headers:\n'
        '        X-Cache-Mode: "split"\n'
    )
    assert document.text == YAML.replace("    provider: ollama\n", f"    provider: ollama\n{added}")
    assert document.plain()["models"]["kvgate"] == ITEM
    document.remove(("models", "kvgate"))
    assert document.text == YAML


def test_yaml_replaces_an_item_where_it_stands():
    document = YamlDocument(YAML)
    document.set(("models", "Good"), {"name": "Good", "provider": "openai"})
    assert document.text == YAML.replace(
        "  - name: Good\n    provider: anthropic   # paid\n    roles: [chat, edit]\n",
        '  - name: "Good"\n    provider: "openai"\n',
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "name: x\n",
        "name: x",
        "models:\nname: x\n",
        "models: []\n",
        "models: [{name: a, b: 1}]\n",
        "models:\n- name: a\n  text: |\n    long\n    text\n\n# end\nname: x\n",
        "name: x\nmodels:\n  - name: a",
        "models:\n  - name: a\n  - {name: b}\n",
        "models:\n  -\n    name: a\n  -  # dash above\n    name: kvgate\n    b: 1\n",
    ],
)
def test_yaml_lists_of_every_shape_take_an_item_and_give_it_back(text: str):
    document = YamlDocument(text)
    before = document.plain()
    document.set(("models", "kvgate"), ITEM)
    assert document.plain()["models"]["kvgate"] == ITEM
    assert {key: value for key, value in document.plain().items() if key != "models"} == {
        key: value for key, value in before.items() if key != "models"
    }
    document.set(("models", "kvgate"), {**ITEM, "provider": "x"})
    assert document.plain()["models"]["kvgate"]["provider"] == "x"
    document.remove(("models", "kvgate"))
    others = {name: item for name, item in (before.get("models") or {}).items() if name != "kvgate"}
    assert (document.plain().get("models") or {}) == others


@pytest.mark.parametrize("text", ["a: [", "a: 1\n---\nb: 2\n", "- a\n", "a: 'sk-secret", "a: 1\na: 2\n", "{a: 1}\n"])
def test_yaml_that_can_not_be_edited_is_refused(text: str):
    with pytest.raises(DocumentError) as refusal:
        YamlDocument(text).plain()
    assert "sk-secret" not in str(refusal.value)


def test_yaml_where_models_is_no_list_is_refused():
    with pytest.raises(DocumentError, match="models holds something else"):
        YamlDocument("models: {a: 1}\n").set(("models", "kvgate"), ITEM)


def test_env_lines_are_set_in_place_and_others_stay():
    text = "# mine\nexport A=1\nB='two words'\n\nbroken line\nA=3"
    document = EnvDocument(text)
    assert document.plain() == {"A": "3", "B": "two words"}
    document.set(("B",), "x")
    document.set(("C",), "a b")
    assert document.text == "# mine\nexport A=1\nB=x\n\nbroken line\nA=3\nC='a b'\n"
    document.remove(("A",))
    assert document.text == "# mine\nB=x\n\nbroken line\nC='a b'\n"


@pytest.mark.parametrize(
    "value", ["plain", "two words", "it's", 'say "it\'s"', "a\\b c'", "", "#x", "X-Cache-Mode:split"]
)
def test_env_values_are_read_as_they_were_written(value: str):
    assert unquoted(quoted(value)) == value


def test_env_values_of_several_lines_are_refused():
    with pytest.raises(DocumentError):
        EnvDocument("").set(("A",), "1\nB=2")
