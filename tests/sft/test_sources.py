"""Data in every kind of file, folder and storage: the same conversations give the same tokens."""

from __future__ import annotations

import bz2
import datetime
import gzip
import json
import lzma
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from raylane.errors import ConfigError, DataError
from raylane.sft.data.mixing import open_rows, open_training_rows
from raylane.sft.data.places import FilePlace, place_of
from raylane.sft.data.prepare import num_processes, prepare
from raylane.sft.data.prepared import PreparedData
from raylane.sft.data.rows import TokenCache
from raylane.sft.data.sources import ARRAY, ARROW, CSV, LINES, PARQUET, TEXT, kind_of
from sft.conversations import config, question, tokenizer, turn

CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
TALKS = [
    *(question(seed)["messages"] for seed in range(6)),
    [
        turn("user", "1 + 1?"),
        turn("assistant", "", tool_calls=[CALL]),
        turn("tool", "2"),
        turn("assistant", "It is 2."),
    ],
]
ROWS = [{"messages": messages} for messages in TALKS]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)
PAIRS = [(messages[0]["content"], messages[-1]["content"]) for messages in TALKS[:6]]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer().save(folder)
    return str(folder)


@pytest.fixture
def tokens_of(tmp_path: Path, tokenizer_folder: str) -> Callable[..., list[tuple[list[int], list[bool]]]]:
    def read(train: Any, **data: Any) -> list[tuple[list[int], list[bool]]]:
        cache = TokenCache(prepared_from(tmp_path, tokenizer_folder, train, **data).train)
        return [(tokens.tolist(), mask.tolist()) for tokens, mask in map(cache.document, range(len(cache)))]

    return read


def prepared_from(tmp_path: Path, tokenizer_folder: str, train: Any, **data: Any) -> PreparedData:
    policy = {"tokenizer": {"train_vocab_size": None, "name": tokenizer_folder}}
    return prepare(config(tmp_path, policy=policy, data={"train": train, **data}))


def write_all(folder: Path) -> dict[str, Any]:
    """Write the conversations in each kind; return `data.train` by kind."""
    text = JSONL.encode()
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(str(folder / "a.parquet"))
    table.save_to_disk(str(folder / "saved"))
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(str(folder / "splits"))
    (folder / "published" / "data").mkdir(parents=True)
    table.to_parquet(str(folder / "published" / "data" / "train-00000-of-00001.parquet"))
    (arrow,) = (folder / "saved").glob("*.arrow")
    (folder / "stream").write_bytes(arrow.read_bytes())
    (folder / "array.json").write_text(json.dumps(ROWS, indent=1))
    (folder / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n\r\n"))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(text))
    (folder / "unnamed").write_bytes(gzip.compress(text))
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress(text))
    (folder / "a.jsonl.bz2").write_bytes(bz2.compress(text))
    (folder / "a.jsonl.xz").write_bytes(lzma.compress(text))
    (folder / "array.json.gz").write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    (folder / "with[brackets]*.jsonl").write_bytes(text)
    for number, line in enumerate(JSONL.splitlines()):
        (folder / f"part-{number}.jsonl").write_text(line)
    fsspec.filesystem("memory").pipe("/raylane-sources/a.jsonl", text)
    named = ("a.parquet", "saved", "splits", "published", "stream", "array.json", "bom.jsonl", "a.jsonl.gz", "unnamed")
    named += ("a.jsonl.zst", "a.jsonl.bz2", "a.jsonl.xz", "array.json.gz", "with[brackets]*.jsonl", "part-*.jsonl")
    several = [str(folder / f"part-{number}.jsonl") for number in range(len(ROWS))]
    return {
        **{name: str(folder / name) for name in named},
        "several": several,
        "split": [{"path": str(folder / "splits"), "split": "train"}],
        "url": "memory://raylane-sources/a.jsonl",
        "glob of urls": "memory://raylane-sources/*.jsonl",
    }


def test_every_kind_of_source_gives_the_same_tokens(tmp_path: Path, tokens_of: Any) -> None:
    (tmp_path / "plain.jsonl").write_text(JSONL)
    expected = tokens_of(str(tmp_path / "plain.jsonl"))
    assert len(expected) == len(ROWS)
    for name, train in write_all(tmp_path).items():
        assert tokens_of(train) == expected, name
    assert tokens_of(str(tmp_path / "plain.jsonl"), num_proc=2) == expected


def test_tables_of_text_give_the_same_tokens(tmp_path: Path, tokens_of: Any) -> None:
    rows = [{"question": asked, "answer": answer} for asked, answer in PAIRS] + [
        {"question": "1\n+ 1?", "answer": "2"},
        {"question": "missing?", "answer": "NA"},
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = tokens_of(str(tmp_path / "pairs.jsonl"))
    table = datasets.Dataset.from_list(rows)
    table.to_pandas().to_csv(str(tmp_path / "pairs.csv"))  # with a column of numbers that has no name
    table.to_csv(str(tmp_path / "pairs.tsv"), sep="\t")
    assert tokens_of(str(tmp_path / "pairs.csv")) == tokens_of(str(tmp_path / "pairs.tsv")) == expected


def test_lines_of_plain_text_are_learned_whole(tmp_path: Path, tokens_of: Any) -> None:
    (tmp_path / "tale.txt").write_text("Once upon a time.\n\n[there] was\n")
    (tmp_path / "tale.jsonl").write_text('{"text": "Once upon a time."}\n{"text": "[there] was"}\n')
    documents = tokens_of(str(tmp_path / "tale.txt"))
    assert documents == tokens_of(str(tmp_path / "tale.jsonl"))
    chat = tokenizer()
    assert [chat.decode(np.array(tokens)) for tokens, _ in documents] == [
        "Once upon a time.<|im_end|>",
        "[there] was<|im_end|>",
    ]
    assert all(not mask[0] and all(mask[1:]) for _, mask in documents)


def test_arguments_of_calls_stay_apart_in_tables(tmp_path: Path, tokens_of: Any) -> None:
    """A column has the keys of all rows: a call must not get the keys of another one, as null."""
    rows = [
        {
            "messages": [
                turn("user", "?"),
                turn("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": a}}]),
            ]
        }
        for a in ({"x": 1}, {"y": "z"})
    ]
    (tmp_path / "calls.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "calls.parquet"))
    assert tokens_of(str(tmp_path / "calls.parquet")) == tokens_of(str(tmp_path / "calls.jsonl"))


def test_bad_rows_are_skipped_and_counted(tmp_path: Path, tokenizer_folder: str, caplog: Any) -> None:
    lines = ["", "{", json.dumps({"prompt": "a"}), *map(json.dumps, ROWS)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"train\.jsonl:2: not JSON"):
        prepared_from(tmp_path, tokenizer_folder, str(tmp_path / "train.jsonl"))
    caplog.set_level("WARNING", "raylane")
    for fraction in (0.0, 0.5):
        data = {"on_bad_row": "skip", "validation_fraction": fraction}
        prepared = prepared_from(tmp_path, tokenizer_folder, str(tmp_path / "train.jsonl"), **data)
        assert (prepared.report["train"].skipped, prepared.files[0].conversations) == (2, 7 if fraction == 0 else 4)
    assert "row left out: " in caplog.text
    assert "train.jsonl:3: no known layout has the keys ['prompt']" in caplog.text
    assert "train: 2 rows cannot be used and are left out (data.on_bad_row=skip)" in caplog.text


def test_folder_is_read_as_its_files_are(tmp_path: Path, tokens_of: Any) -> None:
    """A file beside the data is not read, and a null of a call's argument stays."""
    call = {"function": {"name": "f", "arguments": {"a": None, "b": 1}}}
    row = {"messages": [turn("user", "?"), turn("assistant", "", tool_calls=[call])]}
    folder = tmp_path / "downloaded"
    (folder / ".cache").mkdir(parents=True)
    (folder / ".cache" / "train.jsonl.lock").touch()
    (folder / "README.md").write_text("# Talks\n")
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    expected = tokens_of(str(folder / "train.jsonl"))
    assert tokens_of(str(folder)) == expected
    assert "null" in tokenizer().decode(np.array(expected[0][0]))
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n{\n")
    with pytest.raises(DataError, match=r"downloaded/train\.jsonl:2: not JSON"):
        tokens_of(str(folder))


def test_columns_of_other_types_become_text_or_are_refused(tmp_path: Path, tokens_of: Any) -> None:
    def table(extra: Any) -> str:
        messages = [{"role": "user", "content": "hi", "extra": extra}, {"role": "assistant", "content": "yo"}]
        pa.parquet.write_table(pa.Table.from_pylist([{"messages": messages}]), tmp_path / "extra.parquet")
        return str(tmp_path / "extra.parquet")

    assert tokens_of(table(datetime.datetime(2020, 1, 1))) == tokens_of(table("2020"))
    with pytest.raises(DataError, match=r"extra\.parquet, row 1: 'messages' has bytes"):
        tokens_of(table(b"\xff"))


@pytest.mark.faults
@pytest.mark.processes
def test_lost_process_and_interrupt_are_told(tmp_path: Path, tokenizer_folder: str) -> None:
    (tmp_path / "train.jsonl").write_text(JSONL * 20)
    code = (
        "import os, signal, sys\nfrom raylane.sft.data import encoding, prepare\n"
        "from sft.test_sources import prepared_from\nfrom pathlib import Path\n"
        "def end(self, columns, indices):\n    os.kill(os.getpid() if sys.argv[1] == 'kill' else os.getppid(), "
        "signal.SIGKILL if sys.argv[1] == 'kill' else signal.SIGINT)\n    signal.pause()\n"
        "encoding.RowEncoder.__call__ = end\n"
        "try: prepared_from(Path(sys.argv[2]), sys.argv[3], sys.argv[2] + '/train.jsonl', num_proc=2)\n"
        "except BaseException as error: print(type(error).__name__, error)\n"
    )
    for event, told in (
        ("kill", "DataError one of 2 processes that tokenise .* has ended: .* set data.num_proc=1"),
        ("interrupt", "KeyboardInterrupt"),
    ):
        command = [sys.executable, "-c", code, event, str(tmp_path), tokenizer_folder]
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path}, check=False
        )
        assert re.search(told, done.stdout), done.stdout + done.stderr
        assert not list((tmp_path / "cache").iterdir())


def test_places_name_file_and_row(tmp_path: Path, tokenizer_folder: str) -> None:
    (tmp_path / "a.jsonl").write_text("\n" + JSONL)
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "b.parquet"))
    run = config(
        tmp_path,
        policy={"tokenizer": {"train_vocab_size": None, "name": tokenizer_folder}},
        data={"train": [str(tmp_path / "a.jsonl"), str(tmp_path / "b.parquet")]},
    )
    prepared = prepare(run)
    rows = open_training_rows(prepared, run)
    places = [place_of(rows.places, origin) for origin in rows.cache.origin.tolist()]
    assert places[0] == f"{tmp_path}/a.jsonl:2"
    assert places[6] == f"{tmp_path}/a.jsonl:8"
    assert places[7] == f"{tmp_path}/b.parquet, row 1"
    assert [file.kind for file in prepared.files] == ["JSON Lines: messages (7)", "Parquet: messages (7)"]
    assert len(open_rows(prepared.train, run.policy, prepared.pad_id).cache) == 14


BAD = {
    "empty.jsonl": (b"\n\n", r"empty\.jsonl holds no conversation"),
    "zero.jsonl": (b"", r"zero\.jsonl holds no conversation"),
    "latin.jsonl": ('{"messages": "é"}'.encode("latin-1"), r"latin\.jsonl: not UTF-8 .*convert the file"),
    "cut.parquet": (b"PAR1\x15\x04\x15", r"cannot read data file .*cut\.parquet"),
    "cut.gz": (gzip.compress(JSONL.encode())[:80], r"cannot read data file .*cut\.gz"),
    "a.zip": (b"PK\x03\x04", r"a\.zip is a zip archive, .*Unpack it"),
    "list.json": (b'[{"messages": []}', r"list\.json: not JSON .*must be one list"),
    "twice.json": (b'[{"text": "a", "text": "b"}]', r"twice\.json: not JSON \(key 'text' is repeated"),
    "item.json": (b'[{"text": "a b"}, {"text": 3}]', r"item\.json, row 2: 'text' is a int, not a text"),
    "none.json": (b"[]", r"none\.json holds no conversation"),
    "cells.csv": (b"question,answer\na,b\na,b,c\n", r"cells\.csv"),
    "more.csv": (b"question,answer\na,b,c\n", r"more\.csv: Error tokenizing data. C error: Expected 2 fields"),
    "twice.csv": (b"answer,answer\na,b\n", r"twice\.csv: two columns have one name"),
    "header.csv": (b"question,answer\n", r"header\.csv holds no conversation"),
    "bom.jsonl": (b"\xef\xbb\xbf", r"bom\.jsonl holds no conversation"),
    "missing.csv": (b"question,answer\na,b\nc\n", r"missing\.csv, row 2: the answer is empty"),
    "columns.csv": (b"one,two\na,b\n", r"columns\.csv, row 1: no known layout has the keys \['one', 'two'\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_file_that_cannot_be_used_is_named(tmp_path: Path, tokens_of: Any, name: str) -> None:
    content, told = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=told):
        tokens_of(str(tmp_path / name))
    assert not list((tmp_path / "cache").glob("*"))


def test_sources_that_are_not_there_are_told_at_once(
    tmp_path: Path, tokens_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"gone\.jsonl: No such file or folder"):
        tokens_of(str(tmp_path / "gone.jsonl"))
    with pytest.raises(DataError, match=r"no file matches .*none-\*\.jsonl"):
        tokens_of(str(tmp_path / "none-*.jsonl"))
    write_all(tmp_path)
    with pytest.raises(DataError, match=r"has no split 'extra', but \['test', 'train'\]\. Write \{path: "):
        tokens_of([{"path": str(tmp_path / "splits"), "split": "extra"}])
    for kind in ("split", "subset"):
        with pytest.raises(DataError, match="is a file, and has no split or subset"):
            tokens_of([{"path": str(tmp_path / "a.parquet"), kind: "test"}])
    with pytest.raises(DataError, match=r"is one data set without splits\. Remove split='test'"):
        tokens_of([{"path": str(tmp_path / "saved"), "split": "test"}])
    with pytest.raises(DataError, match="are of two kinds, JSON Lines and JSON array"):
        tokens_of(str(tmp_path / "*.json*"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"no file or folder somebody/talks, and http://127\.0\.0\.1:9 does not answer"):
        tokens_of("somebody/talks")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match="s3:// needs a package that cannot be imported"):
        tokens_of("s3://bucket/a.jsonl")


@pytest.mark.parametrize(
    ("name", "head", "kind"),
    [
        ("a.jsonl", b'{"a": 1}', LINES),
        ("a.txt.jsonl", b"{", LINES),
        ("a.jsonl.gz", b"\n [", ARRAY),
        ("a", b"\xef\xbb\xbf[", ARRAY),
        ("A.CSV", b"[a]", CSV),
        ("a.csv.gz", b"a,b", CSV),
        ("a.txt", b"[", TEXT),
        ("a.jsonl", b"PAR1", PARQUET),
        ("a", b"ARROW1\0\0", ARROW),
    ],
)
def test_kind_follows_from_content_and_name(name: str, head: bytes, kind: Any) -> None:
    assert kind_of(name, head) is kind


def test_place_is_that_of_the_file_with_the_row() -> None:
    places = (FilePlace("a", 0, True), FilePlace("b", 3, True), FilePlace("c", 4, False))
    assert [place_of(places, row) for row in (0, 2, 3, 4, 9)] == ["a:1", "a:3", "b:1", "c, row 1", "c, row 6"]


@pytest.mark.parametrize(
    ("asked", "rows", "processors", "expected"),
    [(None, 10, 8, 1), (None, 50_000, 8, 2), (None, 10**7, 64, 8), (None, 10**7, 2, 2), (4, 10, 2, 4), (4, 3, 2, 3)],
)
def test_processes_follow_from_rows_and_processors(asked: Any, rows: int, processors: int, expected: int) -> None:
    assert num_processes(asked, rows, processors) == expected
