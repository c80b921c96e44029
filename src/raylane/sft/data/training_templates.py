"""Training versions of published chat templates in which rendering does not show all that the assistant wrote. Pure.

A training version is the published template with a few replacements of text. The comments below say where the two
render different texts. Only training uses it: the template that is saved with the tokenizer stays the published one, by
which the model is asked later. docs/reference/chat-templates.md lists the versions for users.
"""

from __future__ import annotations

import hashlib

_Replacements = tuple[tuple[str, str], ...]

# The template writes the reasoning of the last answer only, so an answer at the end of a conversation is rendered in
# another way than within it, and <|end|> ends reasoning as well as turns. The version collects an answer, and marks it
# without its first header, which the generation prompt has.
_GPT_OSS: _Replacements = (
    ("{%- if message.role == 'assistant' -%}", "{%- if message.role == 'assistant' -%}{%- set answer -%}"),
    (
        "{%- elif message.role == 'tool' -%}",
        '{%- endset -%}{{- "<|start|>assistant" -}}'
        '{%- generation -%}{{- answer.removeprefix("<|start|>assistant") -}}{%- endgeneration -%}'
        "{%- elif message.role == 'tool' -%}",
    ),
)

# The header of the next message is the end token of an answer, so the last answer has none. In the version an answer
# writes this header, and the last answer that of the message that it waits for, as the model does.
_GLM_4_MOE: _Replacements = (
    (
        "{% for m in messages %}",
        "{% for m in messages %}{%- set has_header = not loop.first and loop.previtem.role == 'assistant' -%}",
    ),
    (
        "{%- if m.role == 'user' -%}<|user|>",
        "{%- if m.role == 'user' -%}{{- '' if has_header else '<|user|>' }}",
    ),
    ("{%- set reasoning_content = '' %}", "{%- generation -%}{%- set reasoning_content = '' %}"),
    (
        "{%- elif m.role == 'tool' -%}",
        "{%- set following = ('tool' if m.tool_calls else 'user') if loop.last else loop.nextitem.role -%}"
        "{{- {'user': '<|user|>', 'tool': '<|observation|>'}.get(following, '') -}}{%- endgeneration -%}"
        "{%- elif m.role == 'tool' -%}",
    ),
    ("{{- '<|observation|>' }}", "{{- '' if has_header else '<|observation|>' }}"),
    ("<|observation|>{% for tr", "{{- '' if has_header else '<|observation|>' }}{% for tr"),
)

# The template concatenates the arguments of a call with texts, but in transformers they are an object. No marks: the
# search finds the spans, and refuses a second round of calls, which the template writes without its header.
_DEEPSEEK_V3: _Replacements = (("tool['function']['arguments']", "tool['function']['arguments'] | tojson"),)

# The template cuts off the reasoning within the text of every answer. In use this concerns earlier answers only, as the
# model writes the last one itself.
_DEEPSEEK_R1: _Replacements = (("{% if '</think>' in content %}", "{% if '</think>' in content and not loop.last %}"),)

_REPLACEMENTS: dict[str, _Replacements] = {
    "a4c9919cbbd4acdd51ccffe22da049264b1b73e59055fa58811a99efbd7c8146": _GPT_OSS,
    "44f815868bf02fa458dd2f741a338046f4bf45f398eb6d067766726b9d96cce3": _GLM_4_MOE,
    "563b1ce7d61d50a9b4c7439a912a1116f095b712df5b5e4d3e1116049874eb64": _DEEPSEEK_V3,
    "56a1447ad31926fdc21fb07e56e5642bd9c850c4f52d8c8af7bbe5f079a84f5f": _DEEPSEEK_R1,
}
"""SHA-256 of a published template without a line end at its end -> (its text, the text of the training version)."""


def training_version(template: str) -> str:
    """Return the template by which conversations are rendered for training: nearly always the template itself."""
    # Jinja leaves out one line end at the end of a template, and files of the same template differ in it.
    digest = hashlib.sha256(template.removesuffix("\n").encode()).hexdigest()
    for published, changed in _REPLACEMENTS.get(digest, ()):
        template = template.replace(published, changed)
    return template
