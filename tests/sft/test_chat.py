"""Tokens and masks: the spans of the template, of transformers and of the people who wrote agree."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from raylane.errors import ConfigError, DataError
from raylane.sft.data.chat import ChatTokenizer, chatml_template, runs, train_tokenizer
from raylane.training.config.policy import TokenizerConfig
from raylane.training.text.messages import conversation_of
from raylane.training.text.tokenizer import template_text
from sft.conversations import question, talk, tokenizer, turn

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


ANSWER = "{% generation %}BEFORE{{ m.content }} <|im_end|>AFTER{% endgeneration %}"
ANSWERS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}" + ANSWER + "{% else %}user {{ m.content }} {% endif %}"
    "{% endfor %}"
)


def words_tokenizer():
    """Return a tokenizer of whole words, which drops what is between them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ("?", "user", "q1", "a1", "q2", "a2", "<|im_end|>")
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?", eos_token="<|im_end|>")


def spans(conversation) -> list[str]:
    encoded = tokenizer().encode(conversation)
    return [tokenizer().decode(encoded.tokens[start:end]) for start, end in runs(encoded.supervised)]


@pytest.mark.claim("fine-tuning", "the loss covers words and end tokens of all turns of the assistant, nothing else")
def test_mask_covers_assistant_turns_and_end_tokens_only() -> None:
    conversation = talk(
        turn("system", "You are kind."), turn("user", "one?"), turn("assistant", "1"), turn("user", "two?"),
        turn("assistant", "2"),
    )  # fmt: skip
    assert spans(conversation) == ["1<|im_end|>", "2<|im_end|>"]
    encoded = tokenizer().encode(conversation)
    assert (encoded.num_turns, encoded.num_ended_turns) == (2, 2)
    assert (encoded.tokens.dtype, encoded.supervised.dtype) == (np.int32, np.bool_)


@pytest.mark.claim("fine-tuning", "tool calls are supervised, and answers of tools are not")
def test_tool_calls_are_supervised_and_tool_answers_are_not() -> None:
    call = {"function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    conversation = talk(
        turn("system", "Be exact."),
        turn("user", "1 + 2?"),
        turn("assistant", "Let me see.", tool_calls=[call]),
        turn("tool", "the tool says three"),
        turn("assistant", "3"),
        tools=TOOLS,
    )
    first, second = spans(conversation)
    assert first == ('Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>')
    assert second == "3<|im_end|>"
    text = tokenizer().decode(tokenizer().encode(conversation).tokens)
    assert text.count("Be exact.") == 1
    assert '"name": "add", "parameters"' in text
    assert "<|im_start|>tool\nthe tool says three<|im_end|>" in text


def test_a_message_of_calls_alone_is_supervised() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("f", "g")]
    (span,) = spans(talk(turn("user", "?"), turn("assistant", None, tool_calls=calls)))
    assert span.startswith("<tool_call>")
    assert span.count("</tool_call>") == 2


def test_weight_zero_takes_a_turn_out_of_the_loss() -> None:
    conversation = talk(
        turn("user", "a"), turn("assistant", "bad", weight=0), turn("user", "b"), turn("assistant", "good")
    )
    assert spans(conversation) == ["good<|im_end|>"]


def test_the_text_is_what_the_template_says() -> None:
    conversation = talk(turn("user", "Hé, 你好 \U0001f600"), turn("assistant", "  spaces\n\nstay  "))
    text = tokenizer().decode(tokenizer().encode(conversation).tokens)
    assert text == (
        "<|im_start|>user\nHé, 你好 \U0001f600<|im_end|>\n<|im_start|>assistant\n  spaces\n\nstay  <|im_end|>\n"
    )


def test_generation_prompt_precedes_a_supervised_span() -> None:
    """Otherwise the model would be asked, when used, from a place that it never saw in training."""
    conversation = talk(turn("user", "one?"), turn("assistant", "1"))
    encoded = tokenizer().encode(conversation)
    start = runs(encoded.supervised)[0][0]
    prompt = tokenizer().hf.apply_chat_template(
        [turn("user", "one?")], add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    assert prompt == encoded.tokens[:start].tolist()


def test_trained_tokenizer_is_deterministic_and_complete() -> None:
    texts = [json.dumps(question(seed)) for seed in range(20)]
    one, other = train_tokenizer(texts, 350), train_tokenizer(texts, 350)
    assert one.get_vocab() == other.get_vocab()
    assert len(one) == 350
    assert one.decode(one.encode("\x00 ünï \U0001f600")) == "\x00 ünï \U0001f600"
    assert (one.eos_token, one.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_a_saved_tokenizer_loads_and_encodes_the_same(tmp_path: Path) -> None:
    tokenizer().save(tmp_path)
    again = ChatTokenizer.load(tmp_path)
    conversation = talk(*question(3)["messages"])
    one, other = tokenizer().encode(conversation), again.encode(conversation)
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.supervised.tolist() == other.supervised.tolist()
    assert (again.pad_id, again.end_ids, again.vocab_size) == (
        tokenizer().pad_id,
        tokenizer().end_ids,
        tokenizer().vocab_size,
    )


def test_end_tokens_of_the_generation_config_count_too(tmp_path: Path) -> None:
    tokenizer().save(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert ChatTokenizer.load(tmp_path).end_ids == {2, 5}


def test_a_template_comes_from_a_file_or_by_name(tmp_path: Path) -> None:
    assert template_text(None) is None
    assert template_text("chatml") == chatml_template()
    (tmp_path / "mine.jinja").write_text("mine")
    assert template_text(str(tmp_path / "mine.jinja")) == "mine"
    with pytest.raises(ConfigError, match="or a readable file, got 'chatmll'"):
        template_text("chatmll")


def test_template_refusal_names_file_and_line() -> None:
    template = chatml_template() + "{{ raise_exception('no tools today') }}"
    chat = ChatTokenizer(train_tokenizer(["a"], 300), template)
    with pytest.raises(DataError, match=r"talk\.jsonl:1: the chat template refuses .*no tools today"):
        chat.encode(talk(turn("user", "a"), turn("assistant", "b")))


def test_chatml_needs_its_tokens() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0, "</s>": 1}, [])), eos_token="</s>")
    with pytest.raises(DataError, match=r"lacks <\|im_start\|> and <\|im_end\|>"):
        ChatTokenizer(bare, chatml_template())


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(ConfigError, match="no tokenizer folder 'nowhere/at/all'"):
        ChatTokenizer.load("nowhere/at/all")


def test_no_template_at_all_is_answered_with_what_to_set() -> None:
    chat = ChatTokenizer(train_tokenizer(["a"], 300))
    with pytest.raises(ConfigError, match=r"no chat template; set policy.tokenizer.chat_template=chatml"):
        chat.encode(talk(turn("user", "a"), turn("assistant", "b")))


def test_plain_text_needs_no_template_and_ends() -> None:
    chat = ChatTokenizer(train_tokenizer(["a"], 300))
    encoded = chat.encode(conversation_of({"text": "Ab c"}, "f:1"))
    assert chat.decode(encoded.tokens) == "Ab c<|im_end|>"
    assert encoded.supervised.tolist() == [False, True, True, True, True]
    assert (encoded.num_turns, encoded.num_ended_turns) == (1, 1)


def test_weight_needs_one_span_for_each_message() -> None:
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    chat = ChatTokenizer(train_tokenizer(["a"], 300), template)
    with pytest.raises(DataError, match="makes 1 spans for 2 assistant messages"):
        chat.encode(talk(turn("user", "a"), turn("assistant", "b", weight=0), turn("assistant", "c")))


def test_settings_train_a_tokenizer_with_its_own_template(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(chatml_template().replace("<|im_start|>", "<|im_start|> "))
    settings = TokenizerConfig(train_vocab_size=300, chat_template=str(tmp_path / "t.jinja"))
    assert "<|im_start|> " in ChatTokenizer.train(["a"], settings).hf.chat_template


def test_runs_are_half_open() -> None:
    assert runs(np.array([True, True, False, True])) == [(0, 2), (3, 4)]
    assert runs(np.zeros(3, dtype=bool)) == []
    assert runs(np.zeros(0, dtype=bool)) == []


def test_reasoning_is_supervised_by_the_bundled_template() -> None:
    conversation = talk(turn("user", "2 + 2?"), turn("assistant", "4", reasoning_content="two and two"))
    assert spans(conversation) == ["<think>\ntwo and two\n</think>\n\n4<|im_end|>"]
    assert not tokenizer().reasoning_left_out(conversation, tokenizer().encode(conversation))


def test_reasoning_that_a_template_leaves_out_is_noticed() -> None:
    template = chatml_template().replace("message.reasoning_content %}", "false %}")
    chat = ChatTokenizer(train_tokenizer(["a"], 300), template)
    conversation = talk(turn("user", "2 + 2?"), turn("assistant", "4", thinking="two and two"))
    assert chat.reasoning_left_out(conversation, chat.encode(conversation))


def test_mask_check_accepts_a_tokenizer_that_normalises() -> None:
    """NFC puts decomposed letters together: the text read back is not the text written."""
    from tokenizers import normalizers

    hf = train_tokenizer(["a"], 300)
    hf.backend_tokenizer.normalizer = normalizers.NFC()
    chat = ChatTokenizer(hf, chatml_template())
    decomposed = "cafe\u0301 au lait, s'il vous plai\u0302t"
    conversation = talk(turn("user", decomposed), turn("assistant", decomposed))
    assert chat.misplaced(conversation, chat.encode(conversation)) is None


def test_mask_check_accepts_a_template_that_strips_reasoning() -> None:
    template = chatml_template().replace(
        "message.content if message.content else ''", "message.content.split('</think>')[-1] | trim"
    )
    chat = ChatTokenizer(train_tokenizer(["a"], 300), template)
    conversation = talk(turn("user", "2 + 2?"), turn("assistant", "<think>two and two</think>\n4"))
    encoded = chat.encode(conversation)
    assert "two and two" not in chat.decode(encoded.tokens)
    assert chat.misplaced(conversation, encoded) is None
    assert chat.reasoning_left_out(conversation, encoded)
    assert not tokenizer().reasoning_left_out(conversation, tokenizer().encode(conversation))


@pytest.mark.parametrize(
    ("before", "after", "where"),
    [("", " ", "a span ends with it"), (" ", "", "a span begins with it"), (" ", "\n", "both")],
)
def test_marked_spans_survive_a_dropped_blank(before: str, after: str, where: str) -> None:
    """Check masks of a tokenizer that drops blanks, whose learned text runs on, or ends before the second answer."""
    chat = ChatTokenizer(words_tokenizer(), ANSWERS.replace("BEFORE", before).replace("AFTER", after))
    conversation = talk(turn("user", "q1"), turn("assistant", "a1"), turn("user", "q2"), turn("assistant", "a2"))
    encoded = chat.encode(conversation)
    said = [chat.decode(encoded.tokens[start:end]) for start, end in runs(encoded.supervised)]
    assert said == ["a1 <|im_end|>", "a2 <|im_end|>"], where
    assert chat.misplaced(conversation, encoded) is None


def test_mask_check_sees_spans_that_run_on_or_end_early() -> None:
    chat = ChatTokenizer(words_tokenizer(), ANSWERS.replace("BEFORE", "").replace("AFTER", ""))
    conversation = talk(turn("user", "q1"), turn("assistant", "a1"), turn("user", "q2"), turn("assistant", "a2"))
    encoded = chat.encode(conversation)
    (first, _), (_, last) = runs(encoded.supervised)
    runs_on, ends_early = encoded.supervised.copy(), encoded.supervised.copy()
    runs_on[first:last] = True
    ends_early[last - 3 :] = False
    assert "did not write: 'q2'" in (chat.misplaced(conversation, replace(encoded, supervised=runs_on)) or "")
    assert "the assistant wrote: 'a2'" in (chat.misplaced(conversation, replace(encoded, supervised=ends_early)) or "")


def test_blocks_that_mark_one_message_are_one_span() -> None:
    halves = "{% generation %}{{ m.content }}{% endgeneration %}{% generation %}<|im_end|>{% endgeneration %}"
    chat = ChatTokenizer(words_tokenizer(), ANSWERS.replace(ANSWER, halves))
    answers = turn("assistant", "a1", weight=0), turn("assistant", "a2")
    encoded = chat.encode(talk(turn("user", "q1"), answers[0], turn("user", "q2"), answers[1]))
    assert [chat.decode(encoded.tokens[start:end]) for start, end in runs(encoded.supervised)] == ["a2 <|im_end|>"]


@pytest.mark.parametrize(
    "body",
    ["{{ 1 / 0 }}", "{% for a in range(10**9) %}{% endfor %}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"],
)
def test_template_that_fails_in_any_way_is_a_data_error(body: str) -> None:
    chat = ChatTokenizer(train_tokenizer(["a"], 300), chatml_template() + body)
    with pytest.raises(DataError, match=r"talk\.jsonl:1: the chat template refuses this conversation"):
        chat.encode(talk(turn("user", "a"), turn("assistant", "b")))


@pytest.mark.parametrize(
    "content", ["{", "[1]", '{"eos_token_id": ["x"]}', '{"eos_token_id": {"a": 1}}', "[" * 100_000]
)
def test_damaged_generation_config_is_named(tmp_path: Path, content: str) -> None:
    tokenizer().save(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json is damaged"):
        ChatTokenizer.load(tmp_path)


@pytest.mark.claim("security", "a tokenizer that needs code of its own is refused")
def test_tokenizer_that_needs_code_of_its_own_is_refused(tmp_path: Path) -> None:
    """transformers would ask on the terminal whether to run it."""
    tokenizer().save(tmp_path)
    auto = {"auto_map": {"AutoTokenizer": ["theirs.Tokenizer", None]}, "tokenizer_class": "Theirs"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(auto))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "theirs", **auto}))
    (tmp_path / "theirs.py").write_text("raise SystemExit('was run')")
    with pytest.raises(ConfigError, match="cannot load a tokenizer"):
        ChatTokenizer.load(tmp_path)


LLAMA_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def test_llama3_template_supervises_answers_and_calls() -> None:
    hf = train_tokenizer(["a"], 300)
    with pytest.raises(DataError, match=r"chat_template=llama3 needs the tokens .* lacks <\|start_header_id\|>"):
        ChatTokenizer(hf, template_text("llama3"))
    hf.add_special_tokens({"additional_special_tokens": list(LLAMA_TOKENS)})
    hf.bos_token = LLAMA_TOKENS[0]
    chat = ChatTokenizer(hf, template_text("llama3"))
    assert chat.end_ids == {hf.convert_tokens_to_ids("<|eot_id|>")}
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    conversation = talk(
        turn("user", "one?"), turn("assistant", None, tool_calls=[call]), turn("tool", "1"), turn("assistant", "1"),
        tools=TOOLS,
    )  # fmt: skip
    encoded = chat.encode(conversation)
    said = [chat.decode(encoded.tokens[start:end]) for start, end in runs(encoded.supervised)]
    assert said == ['{"name": "add", "parameters": {"a": 1}}<|eot_id|>', "1<|eot_id|>"]
    text = chat.decode(encoded.tokens)
    assert text.startswith("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nYou may call")
    assert "<|start_header_id|>ipython<|end_header_id|>\n\n1<|eot_id|>" in text


def test_template_may_stand_in_the_configuration_itself() -> None:
    assert template_text("{{ messages }}") == "{{ messages }}"
    assert template_text("default") is None


def test_vocabulary_size_has_room_for_the_highest_number() -> None:
    """Numbers of tokens may have gaps; a model with one row for each token would be too small."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"a": 0, "<|im_start|>": 7, "<|im_end|>": 9}
    hf = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, [])))
    assert ChatTokenizer(hf, chatml_template()).vocab_size == 10


STYLED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ style | default('plain') }}: {{ m.content }} {% endif %}{% endfor %}"
)


def test_template_variables_reach_the_template() -> None:
    hf = train_tokenizer(["plain kind: hello you"], 300)
    texts = []
    for values in ({}, {"style": "kind"}):
        made = ChatTokenizer(hf, STYLED, template_kwargs=values)
        texts.append(made.decode(made.encode(talk(turn("user", "hello"), turn("assistant", "you"))).tokens))
    assert texts == ["plain: hello you<|im_end|>", "kind: hello you<|im_end|>"]


def test_template_variable_named_as_a_parameter_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"chat_template_kwargs sets padding, tokenize, which raylane passes itself"):
        ChatTokenizer(
            train_tokenizer(["a"], 300), STYLED, template_kwargs={"tokenize": False, "padding": True, "style": 1}
        )
