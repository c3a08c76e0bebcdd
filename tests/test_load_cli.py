"""The command line of `load_test.py`: every option, right and wrong, as a server and a shell see it."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from fake_server import (
    CHUNKED,
    DONE,
    LAST_CHUNK,
    ROOT,
    TO_CLOSE,
    FakeServer,
    Request,
    Running,
    Step,
    arguments,
    call_main,
    chunk,
    delta,
    json_answer,
    load,
    one_line,
    plain,
    read_records,
    strict_json,
    usage,
    whole_stream,
)

import load_test

HEALTHY = [whole_stream()]
MODELS = {"object": "list", "data": [{"id": "only-one", "object": "model"}]}


def options() -> dict[str, argparse.Action]:
    """Every option by its name."""
    return {name: action for action in load_test.build_parser()._actions for name in action.option_strings}


# ---------------------------------------------------------------- names and defaults

DEFAULTS: dict[str, Any] = {  # those of the lab's published commands, which must run unchanged
    "--base-url": "http://127.0.0.1:8000/v1",
    "--model": None,
    "--concurrency": "1,5,10,20",
    "--requests": 40,
    "--min-rounds": 0,
    "--max-tokens": 128,
    "--temperature": 0.0,
    "--timeout": 300.0,
    "--prompt-set": None,
    "--prompts": None,
    "--seed": None,
    "--warmup": 1,
    "--until": None,
    "--find-operating-point": None,
    "--duration": None,
    "--turns": None,
    "--slo-ttft": 2.0,
    "--slo-tpot": 0.1,
    "--label": "run",
    "--engine": "unknown",
    "--engine-version": "unknown",
    "--host-desc": "unknown",
    "--quant": "unknown",
    "--context-length": 0,
    "--server-slots": 0,
    "--api-key-env": "LOADTEST_API_KEY",
    "--labbook": "labbook.md",
    "--raw": None,
    "--extra-body": None,
    "--rename-field": [],
    "--header": [],
    "--sample": None,
    "--wait-ready": None,
    "--repeat": 1,
}
FLAGS = (
    *("--json", "--no-thinking", "--probe", "--stop-at-slo", "--recovery-check", "--calibrate", "--per-request"),
    "--quiet",
)


def test_the_options_are_those_of_the_contract_and_have_its_defaults() -> None:
    found = options()
    assert set(found) == {*DEFAULTS, *FLAGS, "--version", "--help", "-h"}
    assert {name: found[name].default for name in DEFAULTS} == DEFAULTS
    assert {found[name].default for name in FLAGS} == {False}
    checked = load_test.parse_options([])
    assert checked.concurrency == (1, 5, 10, 20) and checked.prompt_set == "mixed"
    assert (checked.context_length, checked.server_slots) == (None, None)


def test_every_option_is_explained_in_the_help(tmp_path: Path) -> None:
    result = call_main(["--help"], tmp_path)
    assert result.code == 0 and result.err == ""
    for name in options():
        assert re.search(rf"(^|\s){name}\b", result.out), name
    assert all(action.help for action in options().values())
    assert "Exit codes" in result.out and "Examples" in result.out


def test_version(tmp_path: Path) -> None:
    result = call_main(["--version"], tmp_path)
    assert (result.code, result.out, result.err) == (0, f"load_test.py {load_test.TOOL_VERSION}\n", "")


# ---------------------------------------------------------------- wrong values: one line, exit 2, nothing sent

NO_NUMBER = ["", "x", "1.5", "-1", "1e3", "0x10", "one", "9" * 5000, "nan", " "]
NO_SECONDS = ["", "x", "-1", "0", "nan", "inf", "-inf", "1e999", "1,5", "5s"]
WRONG: dict[str, list[str]] = {
    "--base-url": [
        *(
            "h:8080",
            "localhost:8080",
            "ftp://h",
            "http://",
            "http://h:99999",
            "http://h:0",
            "http://h:x",
            "http://[::1",
        ),
        *(
            "",
            "http://h/v1?x=1",
            "http://h/v1#top",
            "http://h ost/",
            "http://h\n/",
            "http://hö/",
            "//h:80",
            "unix:///x",
        ),
        *("http://:8080", "http://h:-1", "http:/h", "http//h", "http://[nonsense]:80/v1"),
    ],
    "--concurrency": [*NO_NUMBER, "0", "1,0", "1,,5", ",", "1,5,", "1;5", "1,5,1", "1,x", "99999999"],
    "--requests": [*NO_NUMBER, "0", "9" * 400],
    "--min-rounds": NO_NUMBER,
    "--max-tokens": [*NO_NUMBER, "0", "9" * 17],
    "--temperature": ["", "x", "-0.1", "nan", "inf", "1e999", "1e299"],
    "--timeout": NO_SECONDS,
    "--prompt-set": ["", "Mixed", "all", "mixed,unique-prefix"],
    "--prompts": ["no-such-file", ".", "", "nul\0byte"],
    "--seed": ["", "x", "1.5", "9" * 400],
    "--warmup": NO_NUMBER,
    "--slo-ttft": NO_SECONDS,
    "--slo-tpot": NO_SECONDS,
    "--label": ["", "two words", "tab\there", "line\nend", "esc\x1b[31m", "-a"],
    "--context-length": NO_NUMBER,
    "--server-slots": NO_NUMBER,
    "--labbook": ["no/such/folder/book.md", ".", "", "nul\0byte"],
    "--raw": ["no/such/folder/raw.jsonl", ".", "", "nul\0byte"],
    "--extra-body": [
        *("", "x", "[]", "5", "null", '"text"', "{", '{"a": NaN}', '{"a": Infinity}', '{"a": 1e999}', "[" * 100000),
        *('{"a": ' + "[" * 100 + "]" * 100 + "}", '{"a":' * 20000 + "1" + "}" * 20000),
        *('{"model": "x"}', '{"stream": false}', '{"stream_options": {}}', '{"messages": []}', '{"max_tokens": 5}'),
        *('{"max_completion_tokens": 5}', '{"n_predict": 5}', '{"x": ' + "9" * 400 + "}"),
        *('{"n": 2}', '{"best_of": 3}', '{"n": "2"}'),
    ],
    "--rename-field": [
        *("", "max_tokens", "max_tokens=", "model=x", "messages=", "stream=", "x=y", "=y", "temperature=two words"),
        *("temperature=model", "stream_options=messages", "max_tokens=stream"),
    ],
    "--header": [
        *("", "no colon", ": no name", "a b: c", "X: line\r\nInjected: 1", "X: \x00", "X: snowman \u2603", "Ü: x"),
        *("Content-Length: 5", "transfer-encoding: chunked", "Connection: keep-alive", "Host: elsewhere"),
    ],
    "--sample": NO_SECONDS,
    "--wait-ready": NO_SECONDS,
    "--repeat": [*NO_NUMBER, "0"],
    "--until": [*NO_SECONDS, "5 %"],
    "--find-operating-point": [*NO_NUMBER, "0"],
    "--duration": NO_SECONDS,
    "--turns": [*NO_NUMBER, "0"],
}
ANY_TEXT = ("--model", "--engine", "--engine-version", "--host-desc", "--quant")


def test_every_option_that_takes_a_value_is_tried_with_wrong_ones() -> None:
    takes_value = {name for name, action in options().items() if action.nargs != 0}
    assert takes_value == {*WRONG, *ANY_TEXT, "--api-key-env"}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_one_line_and_exit_2(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with FakeServer(HEALTHY) as server:
        result = load(server, tmp_path, f"{name}={value}")
    assert result.code == 2, result.said
    line = one_line(result)
    assert name in line and line.isprintable() and len(line) < 2100
    assert result.out == ""
    assert not server.connections and result.levels == []


@pytest.mark.parametrize(
    "args",
    [
        ["--no-such-option"],
        ["--conc", "1"],  # no abbreviations: they would mean something else in a later version
        ["positional"],
        ["--json=yes"],
        ["-x"],
        *([name] for name in DEFAULTS if name != "--find-operating-point"),
        ["--prompts", __file__, "--prompt-set", "mixed"],
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_2(args: list[str], tmp_path: Path) -> None:
    with FakeServer(HEALTHY) as server:
        result = load(server, tmp_path, *args)
    assert result.code == 2 and result.out == ""
    assert args[0].split("=")[0] in one_line(result)
    assert not server.connections


def test_raw_file_and_notebook_are_not_the_same_file(tmp_path: Path) -> None:
    book = tmp_path / "book.md"
    (tmp_path / "link.md").symlink_to(book)
    for name in (str(book), str(tmp_path / "." / "book.md"), str(tmp_path / "link.md")):
        result = load("http://127.0.0.1:1", tmp_path, "--raw", name)
        assert result.code == 2 and "--raw" in one_line(result)
    book.touch()
    os.link(book, tmp_path / "hard.jsonl")
    result = load("http://127.0.0.1:1", tmp_path, "--raw", tmp_path / "hard.jsonl")
    assert result.code == 2 and "--raw" in one_line(result)


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", "2>&- >/dev/full"])
@pytest.mark.parametrize("wrong", [["--requests", "0"], ["--labbook", "/no/such/folder/book.md"]])
def test_bad_input_is_exit_2_wherever_stderr_leads(wrong: list[str], redirection: str, tmp_path: Path) -> None:
    if "full" in redirection and not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    argv = arguments(tmp_path, "http://127.0.0.1:1", *wrong)
    with Running(tmp_path, argv, prefix=["bash", "-c", f'exec "$0" "$@" {redirection}']) as running:
        result = running.finish()
    assert (result.code, result.out) == (2, "")


def test_any_text_may_describe_the_engine(tmp_path: Path) -> None:
    text = 'q" \\ \n \u2028 \x1b ü \U0001f600'
    args = [f"{name}={text}" for name in ANY_TEXT if name != "--model"]
    with FakeServer(HEALTHY) as server:
        result = load(server, tmp_path, *args, "--model", text)
    assert result.code == 0
    (record,) = result.levels
    assert {record[key] for key in ("engine", "engine_version", "host", "quant", "model")} == {text}
    assert server.chats[0].doc["model"] == text
    assert "\x1b" not in result.said


@pytest.mark.parametrize("key", ["two words", "line\nend", "\u2603snowman", "tabbed\t"])
def test_a_key_that_no_header_can_carry_is_not_quoted(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", key)
    result = load("http://127.0.0.1:1", tmp_path, "--api-key-env", "MY_KEY")
    assert result.code == 2 and "MY_KEY" in one_line(result) and key.split()[0] not in result.said


# ---------------------------------------------------------------- what goes over the wire


def test_one_request_byte_for_byte(tmp_path: Path) -> None:
    with FakeServer(HEALTHY) as server:
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("grüße 你好\n", "utf-8")
        result = load(server, tmp_path, "--prompts", prompts, "--max-tokens", 17, "--temperature", 0.5)
    assert result.code == 0
    (request,) = server.chats
    assert request.head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert request.doc == {
        "model": "fake",
        "messages": [{"role": "user", "content": "grüße 你好"}],
        "max_tokens": 17,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert request.headers == {
        "host": server.authority,
        "user-agent": f"load_test.py/{load_test.TOOL_VERSION}",
        "accept": "text/event-stream",
        "accept-encoding": "identity",
        "connection": "close",
        "content-type": "application/json",
        "content-length": str(len(request.body)),
    }
    assert len(re.findall(rb"\n(?!\n)", request.head)) == request.head.count(b"\r\n")


def test_the_temperature_of_the_published_commands_is_sent_as_a_number(tmp_path: Path) -> None:
    with FakeServer(HEALTHY) as server:
        load(server, tmp_path)
    assert b'"temperature": 0.0' in server.chats[0].body and server.chats[0].doc["max_tokens"] == 128


def test_extra_body_is_merged_and_recorded(tmp_path: Path) -> None:
    extra = {"ignore_eos": True, "chat_template_kwargs": {"a": 1}, "top_k": None, "text": "ü"}
    with FakeServer(HEALTHY) as server:
        result = load(server, tmp_path, "--extra-body", json.dumps(extra), "--no-thinking")
    sent = {key: value for key, value in server.chats[0].doc.items() if key in extra}
    expected = {**extra, "chat_template_kwargs": {"a": 1, "enable_thinking": False}}
    assert sent == expected == result.levels[0]["extra_body"]


RENAMINGS: list[tuple[list[str], dict[str, Any], float | None]] = [  # what is given, what goes out, the record
    (["max_tokens=max_completion_tokens"], {"max_completion_tokens": 128, "temperature": 0.0}, 0.0),
    (["stream_options="], {"max_tokens": 128, "temperature": 0.0}, 0.0),
    (["temperature="], {"max_tokens": 128}, None),
    (["temperature=", "max_tokens=n_out", "stream_options="], {"n_out": 128}, None),
]


@pytest.mark.parametrize(("given", "sent", "recorded"), RENAMINGS)
def test_fields_that_a_server_refuses_go_by_another_name_or_not_at_all(
    given: list[str], sent: dict[str, Any], recorded: float | None, tmp_path: Path
) -> None:
    with FakeServer(HEALTHY) as server:
        result = load(server, tmp_path, *(part for one in given for part in ("--rename-field", one)))
    fields = server.chats[0].doc
    own = {"model", "messages", "stream"} | (set() if "stream_options=" in given else {"stream_options"})
    assert {name: value for name, value in fields.items() if name not in own} == sent and own <= set(fields)
    assert (result.levels[0]["temperature"], result.levels[0]["max_tokens"]) == (recorded, 128)


def test_no_thinking_is_the_published_example_spelled_out(tmp_path: Path) -> None:
    with FakeServer(HEALTHY) as server:
        load(server, tmp_path, "--no-thinking")
        load(server, tmp_path, "--extra-body", '{"chat_template_kwargs": {"enable_thinking": false}}')
        result = load(server, tmp_path)
    first, second, third = (request.doc for request in server.chats)
    assert first["chat_template_kwargs"] == second["chat_template_kwargs"] == {"enable_thinking": False}
    assert "chat_template_kwargs" not in third and result.levels[-1]["extra_body"] is None


def test_headers_of_our_own_go_out_and_win(tmp_path: Path) -> None:
    given = ["--header", "X-Team: a:b", "--header", "user-agent: mine", "--header", "X-Empty:", "--header", "X-L: \xe9"]
    with FakeServer(HEALTHY) as server:
        result = load(server, tmp_path, *given)
    assert result.code == 0
    (request,) = server.chats
    assert [request.headers[name] for name in ("x-team", "user-agent", "x-empty", "x-l")] == ["a:b", "mine", "", "\xe9"]
    assert request.head.lower().count(b"user-agent") == 1


@pytest.mark.parametrize(
    ("user", "extra", "key", "expected"),
    [
        ("", [], "", None),
        ("", [], "sk-1", "Bearer sk-1"),
        ("joe:pa%20ss@", [], "", "Basic " + base64.b64encode(b"joe:pa ss").decode()),
        ("joe@", [], "", "Basic " + base64.b64encode(b"joe:").decode()),
        ("joe:x@", [], "sk-1", "Basic " + base64.b64encode(b"joe:x").decode()),
        ("joe:x@", ["--header", "authorization: Token t"], "sk-1", "Token t"),
    ],
)
def test_which_credentials_are_sent(
    user: str, extra: list[str], key: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADTEST_API_KEY", key)
    with FakeServer(lambda r: HEALTHY if r.is_chat else [json_answer(MODELS)]) as server:
        result = load(f"http://{user}{server.authority}", tmp_path, "--model", "", *extra)
    assert result.code == 0
    assert {request.headers.get("authorization") for request in server.requests} == {expected}
    assert result.levels[0]["base_url"] == server.base_url
    assert "authorization" not in json.dumps(result.everything).lower()


# ---------------------------------------------------------------- the model's name


def models_server(answer: Step) -> FakeServer:
    return FakeServer(lambda request: HEALTHY if request.is_chat else [answer])


def test_the_single_model_is_used_and_printed(tmp_path: Path) -> None:
    with models_server(json_answer(MODELS)) as server:
        result = load(server, tmp_path, "--model", "")
    assert result.code == 0 and "only-one" in result.out
    assert server.requests[0].path == "/v1/models" and server.chats[0].doc["model"] == "only-one"
    assert result.levels[0]["model"] == "only-one"


def test_a_given_model_is_not_looked_up(tmp_path: Path) -> None:
    with models_server(json_answer(MODELS)) as server:
        load(server, tmp_path, "--model", "mine")
    assert [request.path for request in server.requests] == ["/v1/chat/completions"]


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        (json_answer({"data": []}), 2, "0 models"),
        (json_answer({"data": [{"id": "a"}, {"id": "b"}]}), 2, "a, b"),
        (json_answer({"data": [{"id": "esc\x1b[31m"}, {"id": "two\nlines"}]}), 2, "2 models"),
        (json_answer({"data": [{"name": "a"}, 5, None]}), 2, "0 models"),
        (json_answer({"data": 5}), 2, "0 models"),
        (json_answer({"data": True}), 2, "0 models"),
        (json_answer({"data": {"id": "a"}}), 2, "0 models"),
        (json_answer({"data": None}), 2, "0 models"),
        (json_answer([]), 2, "0 models"),
        (json_answer("text"), 2, "0 models"),
        (plain("404 Not Found", "Not Found"), 1, "404"),
        (
            plain("301 Moved", "", "text/html", "Location: https://elsewhere/v1/models"),
            1,
            "https://elsewhere/v1/models",
        ),
        (plain("503 Loading", '{"error":{"message":"Loading model"}}'), 1, "Loading model"),
        (plain("200 OK", "<html>a page\x1b[2J</html>", "text/html"), 1, "did not answer JSON"),
        (plain("200 OK", "[" * 100000), 1, "did not answer JSON"),
        (plain("200 OK", ""), 1, "did not answer JSON"),
        (b"garbage\r\n\r\n", 1, "garbage"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{", 1, "short of its Content-Length"),
        (b"", 1, "no response"),
    ],
)
def test_without_a_model_there_must_be_just_one(answer: Step, code: int, says: str, tmp_path: Path) -> None:
    with models_server(answer) as server:
        result = load(server, tmp_path, "--model", "")
    line = one_line(result)
    assert result.code == code and "--model" in line and says in line and line.isprintable()
    assert not server.chats and result.levels == []


@pytest.mark.parametrize("flags", ["-O", "-OO"])
def test_help_needs_no_docstring(flags: str) -> None:
    """Python drops docstrings at -OO."""
    program = str(load_test.__file__)
    said = [
        subprocess.run([sys.executable, *more, program, "--help"], capture_output=True, encoding="utf-8", check=True)
        for more in ([], [flags])
    ]
    assert said[0].stdout == said[1].stdout and "Examples:" in said[0].stdout


# ---------------------------------------------------------------- prompts


def test_prompt_text_tells_one_text_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: load_test.prompt_text(name) for name in (*load_test.PROMPT_SETS, "file:x")}
    assert before["file:x"] is None and before["shared-prefix"] == before["unique-prefix"]
    assert all(re.fullmatch("[0-9a-f]{8}", str(text)) for name, text in before.items() if name != "file:x")
    assert len(set(before.values())) == 4
    monkeypatch.setattr(load_test, "RULES", load_test.RULES[1:])
    changed = {name for name, text in before.items() if load_test.prompt_text(name) != text}
    assert changed == {"shared-prefix", "unique-prefix"}


def test_the_preamble_is_that_of_an_agent() -> None:
    """1,364 tokens under Qwen's tokeniser (the vocabulary of the package `dashscope`), measured when it was written."""
    text = load_test.preamble()
    assert hashlib.sha256(text.encode()).hexdigest()[:8] == "501262a1", "measure the tokens again, 1,355 to 1,375"
    assert text.count('"type": "object"') == len(load_test.TOOLS) and 15 < len(load_test.TOOLS) < 25


def sent_prompts(tmp_path: Path, *args: object, requests: int = 6) -> list[Any]:
    with FakeServer(HEALTHY) as server:
        result = load(server, tmp_path, "--requests", requests, *args)
    assert result.code == 0, result.said
    return [request.doc["messages"] for request in server.chats]


def test_prompts_of_a_file_in_both_forms(tmp_path: Path) -> None:
    file = tmp_path / "some prompts.txt"
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}]
    lines = [
        "\ufeffone line",
        "",
        "   two \u2028 with a separator  ",
        '{"prompt": "three\\nlines", "max_tokens": 7}',
        json.dumps({"messages": messages}),
        "# no comment: a prompt",
    ]
    file.write_bytes("\r\n".join(lines).encode())
    found = sent_prompts(tmp_path, "--prompts", file)
    user = [[{"role": "user", "content": text}] for text in ("one line", "two \u2028 with a separator", "three\nlines")]
    assert found == [*user, messages, [{"role": "user", "content": "# no comment: a prompt"}], user[0]]
    assert read_records(tmp_path / "book.md")[0]["prompt_set"] == "file:some prompts.txt"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no prompt"),
        (b"\n \r\n\t\n", "holds no prompt"),
        (b"fine\n{broken\n", "line 2"),
        (b'{"prompt": 5}\n', "line 1"),
        (b'{"prompt": ""}\n', "line 1"),
        (b'{"messages": []}\n', "line 1"),
        (b'{"messages": ["text"]}\n', "line 1"),
        (b'{"text": "x"}\n', "line 1: unknown key 'text'"),
        (b'a\n{"prompt": "x", "max_token": 5}\n', "line 2: unknown key 'max_token'"),
        (b'{"prompt": "x", "max_tokens": 0}\n', "max_tokens is 0"),
        (b'{"prompt": "x", "max_tokens": "9"}\n', "max_tokens is '9'"),
        (b'{"prompt": "x", "messages": [{}]}\n', "both"),
        (b"a\n\n" + b'{"x":' * 100000, "line 3"),
        (b'a\n{"messages": [{"content": ' + b"[" * 300 + b"]" * 300 + b"}]}", "line 2: messages nested over 100 deep"),
        (b"caf\xe9\n", "UTF-8"),
        ("utf-16".encode("utf-16"), "UTF-8"),
    ],
)
def test_prompts_that_are_none(content: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes(content)
    result = load("http://127.0.0.1:1", tmp_path, "--prompts", file)
    line = one_line(result)
    assert result.code == 2 and "--prompts" in line and str(file) in line and says in line


def test_prompts_come_from_no_pipe_and_no_device(tmp_path: Path) -> None:
    """Nobody waits for a pipe that no one writes to, or reads /dev/zero to its end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for name in (str(pipe), "/dev/zero"):
        result = load("http://127.0.0.1:1", tmp_path, "--prompts", name)
        assert result.code == 2 and f"--prompts {name}: is not a regular file" in one_line(result)


def texts_of(messages: Iterable[Any]) -> list[str]:
    return [one[-1]["content"] for one in messages]


# https://github.com/vllm-project/vllm/issues/54227 https://github.com/LMCache/LMBenchmark/issues/35
def test_mixed_prompts_share_no_beginning(tmp_path: Path) -> None:
    """Each begins with a random tag, so that no prefix cache has ever seen it, in this run or another."""
    found = texts_of(sent_prompts(tmp_path, requests=60) + sent_prompts(tmp_path, requests=60))
    assert len({text[:10] for text in found}) == 120
    questions = {text.split("] ", 1)[1] for text in found}
    assert len(questions) >= 24


def common_prefix(texts: list[str]) -> str:
    low, high = min(texts), max(texts)
    return low[: next((at for at, pair in enumerate(zip(low, high)) if pair[0] != pair[1]), len(low))]


def test_shared_prefix_is_the_same_to_the_byte(tmp_path: Path) -> None:
    found = texts_of(sent_prompts(tmp_path, "--prompt-set", "shared-prefix", requests=20))
    shared = common_prefix(found)
    assert 5400 <= len(shared.encode()) <= 6000
    assert len({text[len(shared) :] for text in found}) >= 8
    assert shared.count('"type": "object"') >= 19  # a tool's schema each


def test_unique_prefix_is_the_control_of_the_same_length(tmp_path: Path) -> None:
    shared = texts_of(sent_prompts(tmp_path, "--prompt-set", "shared-prefix", requests=10))
    unique = texts_of(sent_prompts(tmp_path, "--prompt-set", "unique-prefix", requests=10))
    assert len({text.split("\n")[0] for text in unique}) == 10
    assert len(common_prefix(unique)) < 20
    for with_prefix, control in zip(shared, unique):
        first_line, _, rest = control.partition("\n")
        assert rest == with_prefix and len(first_line) < 60


def test_mixed_length_is_three_short_and_one_long(tmp_path: Path) -> None:
    found = texts_of(sent_prompts(tmp_path, "--prompt-set", "mixed-length", requests=16))
    is_long = [len(text) > 2000 for text in found]
    assert is_long == [False, False, False, True] * 4
    assert len({text[:10] for text in found}) == 16


def test_a_seed_makes_the_prompts_repeatable(tmp_path: Path) -> None:
    args = ("--seed", 7, "--concurrency", "1", "--repeat", 2)
    first, second = sent_prompts(tmp_path, *args), sent_prompts(tmp_path, *args)
    assert first == second != sent_prompts(tmp_path, *args[2:])
    assert len({text[:10] for text in texts_of(first)}) == 12  # never twice within a run
    assert [record["seed"] for record in read_records(tmp_path / "book.md")] == [7, 7, 7, 7, None, None]


@pytest.mark.parametrize("refusals", [0, 2])
def test_a_seed_gives_the_same_prompts_however_long_the_server_loads(refusals: int, tmp_path: Path) -> None:
    left = [refusals]

    def answer(request: Request) -> list[Step]:
        left[0] -= 1
        return [plain("503 Busy", "") if left[0] >= 0 else whole_stream()]

    with FakeServer(answer) as server:
        more = ["--wait-ready", 30, "--warmup", 1 + refusals, "--requests", 3, "--seed", 7]
        assert load(server, tmp_path, *more).code == 0
    prompt_of = load_test.built_in_prompts("mixed", load_test.random_tags(7))
    sent = texts_of(request.doc["messages"] for request in server.chats[-3:])
    assert sent == texts_of(prompt_of(index) for index in range(3))


def test_stop_at_slo_leaves_out_higher_levels_only(tmp_path: Path) -> None:
    with FakeServer([whole_stream()]) as server:
        args = ["--concurrency", "2,1,4", "--requests", 2, "--stop-at-slo", "--slo-ttft", "0.0000001"]
        result = load(server, tmp_path, *args)
    assert [record["concurrency"] for record in result.levels] == [2, 1]


# ---------------------------------------------------------------- the ladder


def test_levels_repeat_interleaved_and_each_is_on_disk_before_the_next(tmp_path: Path) -> None:
    book = tmp_path / "book.md"
    lines_seen: list[int] = []

    def answer(request: Request) -> list[Step]:
        lines_seen.append(len(read_records(book)))
        return [whole_stream()]

    with FakeServer(answer) as server:
        args = ["--concurrency", "2,1,4", "--requests", 4, "--min-rounds", 2, "--repeat", 2, "--label", "x"]
        result = load(server, tmp_path, *args)
    assert result.code == 0
    assert [(record["concurrency"], record["repeat"]) for record in result.levels] == [
        *((2, 0), (1, 0), (4, 0)),
        *((2, 1), (1, 1), (4, 1)),
    ]
    assert [record["requests"] for record in result.levels] == [4, 4, 8, 4, 4, 8]
    assert len({record["run_id"] for record in result.levels}) == 1
    assert lines_seen == [0] * 4 + [1] * 4 + [2] * 8 + [3] * 4 + [4] * 4 + [5] * 8
    raw = result.requests
    assert len(raw) == 32 and sorted(r["index"] for r in raw if r["concurrency"] == 4 and r["repeat"]) == list(range(8))


def test_just_as_many_are_in_flight_as_the_level_says(tmp_path: Path) -> None:
    # https://github.com/kubernetes-sigs/inference-perf/issues/648 https://github.com/ray-project/ray/pull/63147
    # https://github.com/vllm-project/vllm/issues/54101
    lock, under_way, peaks = threading.Lock(), [0], []

    def count(step: int) -> None:
        with lock:
            under_way[0] += step
            peaks.append(under_way[0])

    def answer(request: Request) -> list[Step]:
        count(1)  # and out again before the client can know that it has ended
        rest = chunk(delta(finish="stop") + DONE) + LAST_CHUNK
        return [CHUNKED + chunk(delta("a")), 0.02, lambda: count(-1), rest]

    with FakeServer(answer) as server:
        load(server, tmp_path, "--concurrency", "7", "--requests", 21)
    assert max(peaks) == 7


def test_stop_at_slo(tmp_path: Path) -> None:
    with FakeServer(HEALTHY) as server:
        one = load(server, tmp_path, "--concurrency", "1,2", "--stop-at-slo", "--slo-ttft", "1e-9", "--repeat", 2)
        assert [record["concurrency"] for record in one.levels] == [1, 1] and one.code == 0
        assert one.levels[0]["within_slo"] == 0 and "outside the SLO" in one.out
        two = load(server, tmp_path, "--concurrency", "1,2", "--stop-at-slo", "--slo-ttft", 60, "--slo-tpot", 60)
        assert [record["concurrency"] for record in two.levels[2:]] == [1, 2]


UNFILLED = [  # options -> the level that would never be filled, or None
    (["--concurrency", "1,40", "--requests", 39], 40),
    (["--concurrency", "1,40", "--requests", 40], None),
    (["--concurrency", "1,40", "--requests", 1, "--min-rounds", 1], None),
    (["--concurrency", "64", "--requests", 1, "--probe"], None),
]


@pytest.mark.parametrize(("args", "level"), UNFILLED)
def test_fewer_requests_than_workers_are_refused(args: list[object], level: int | None) -> None:
    argv = [*map(str, args), "--labbook", "book.md"]
    if level is None:
        assert load_test.parse_options(argv)
        return
    with pytest.raises(load_test.UsageError, match=f"--concurrency {level} with --requests 39.*--min-rounds"):
        load_test.parse_options(argv)


@pytest.mark.parametrize(("requests", "said"), [(4, True), (7, True), (8, False)])
def test_under_two_rounds_is_said_at_the_level(requests: int, said: bool, tmp_path: Path) -> None:
    with FakeServer(HEALTHY) as server:
        result = load(server, tmp_path, "--concurrency", 4, "--requests", requests)
    assert (f"under two rounds ({requests} requests for 4 workers)" in result.out) == said


@pytest.mark.parametrize("option", ["--label", "--engine", "--host-desc", "--model"])
def test_a_locale_that_cannot_decode_a_text_does_not_spoil_it(option: str, tmp_path: Path) -> None:
    with FakeServer(HEALTHY) as server:
        argv = arguments(tmp_path, server.base_url, option, "größe-你")
        env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        with Running(tmp_path, argv, env=env) as running:
            result = running.finish()
    field = {"--host-desc": "host"}.get(option, option[2:])
    assert result.code == 0 and result.levels[0][field] == "größe-你"


def test_a_level_without_one_success_ends_the_ladder(tmp_path: Path) -> None:
    with FakeServer([plain("500 Oops", '{"error": "no such repo"}')]) as server:
        result = load(server, tmp_path, "--concurrency", "1,2", "--requests", 3)
    assert result.code == 1 and "c=1" in one_line(result)
    (record,) = result.levels
    assert (record["completed"], record["failed"], record["errors"]) == (0, 3, {"http": 3})
    assert "first error: http 500: no such repo" in result.out
    assert record["token_counts"] == "none" and record["finish_reasons"] == {}
    for name in ("ttft_s", "tpot_s", "e2e_s", "chunk_gap_s", "connect_s"):
        assert set(record[name].values()) == {None}


def test_two_lines_a_level_and_where_the_lines_went(tmp_path: Path) -> None:
    with FakeServer(HEALTHY) as server:
        result = load(
            server, tmp_path, "--concurrency", "1,20", "--requests", 20, "--label", "my-label", "--engine", "e"
        )
    level_lines = re.findall(
        r"^  c=([ \d]{3})  ok ([ \d]{3})/([\d ]{3}) fail (\d[ ]{2}) wall +[\d.]+s  out/s +[\d.]+  req/s +[\d.]+"
        r"  TTFT p50 [\d.]+ p90 [\d.]+  TPOT p50 [\d.]+ p90 [\d.]+\n"
        r"         goodput [\d.]+ req/s \(20/20 within SLO\)  in flight [\d.]+  prompt 7\.0 tok, cached n/a"
        r"  tokens from usage  finish \{'length': 20\}$",
        result.out,
        re.MULTILINE,
    )
    assert level_lines == [("  1", " 20", "20 ", "0  "), (" 20", " 20", "20 ", "0  ")]
    heading = result.out[: result.out.index("  c=")]
    for said in ("my-label", "fake", server.base_url, "mixed", "20 requests", "2 s", "0.1 s", "warm-up 0"):
        assert said in heading, said
    assert "2 line(s) appended" in result.out and "book.md" in result.out
    assert "40 request(s) appended" in result.out and "raw.jsonl" in result.out


# ---------------------------------------------------------------- the warm-up


def test_warm_up_is_sent_first_and_leaves_no_trace(tmp_path: Path) -> None:
    # https://github.com/ai-dynamo/aisimulate/issues/287
    with FakeServer(HEALTHY) as server:
        result = load(server, tmp_path, "--warmup", 3, "--requests", 2, "--prompt-set", "shared-prefix")
    assert [request.is_warm_up for request in server.requests] == [True] * 3 + [False] * 2
    warm = [request.prompt for request in server.requests[:3]]
    assert len(set(warm)) == 3 and all(request.doc["max_tokens"] < 20 for request in server.requests[:3])
    assert len(result.requests) == 2 and result.levels[0]["requests"] == 2 and result.levels[0]["warmup"] == 3


def test_a_warm_up_that_fails_in_part_is_said(tmp_path: Path) -> None:
    with FakeServer(lambda r: [plain("503 X", "busy")] if r.number == 0 else HEALTHY) as server:
        result = load(server, tmp_path, "--warmup", 2)
    assert result.code == 0 and "1 of 2 warm-up requests failed" in one_line(result) and "503" in result.err
    assert result.levels[0]["completed"] == 1


def test_a_warm_up_that_is_refused_ends_the_run(tmp_path: Path) -> None:
    with FakeServer([plain("401 No", "who are you?")]) as server:
        result = load(server, tmp_path, "--warmup", 2)
    assert result.code == 1 and "who are you?" in result.err and result.levels == []
    assert len(server.requests) == 2


def test_a_warm_up_that_fails_otherwise_does_not(tmp_path: Path) -> None:
    with FakeServer(lambda r: [TO_CLOSE + DONE] if r.is_warm_up else HEALTHY) as server:
        result = load(server, tmp_path, "--warmup", 2)
    assert result.code == 0 and "no_tokens" in one_line(result) and len(result.levels) == 1


# ---------------------------------------------------------------- what is printed where


def test_json_alone_on_stdout(tmp_path: Path) -> None:
    with FakeServer(HEALTHY) as server:
        result = load(server, tmp_path, "--json", "--concurrency", "1,2", "--requests", 2, "--per-request")
    lines = result.out.splitlines()
    assert [strict_json(line) for line in lines] == result.levels
    assert (tmp_path / "book.md").read_text("utf-8") == result.out
    assert "goodput" in result.err and "c=  1" in result.err and "latency" in result.err


def test_quiet(tmp_path: Path) -> None:
    with FakeServer(HEALTHY) as server:
        silent = load(server, tmp_path, "--quiet")
        assert (silent.code, silent.out, silent.err) == (0, "", "")
        lines = load(server, tmp_path, "--quiet", "--json")
        assert strict_json(lines.out) == lines.levels[-1] and lines.err == ""
    with FakeServer([plain("500 X", "no")]) as server:
        assert "completed no request" in one_line(load(server, tmp_path, "--quiet"))


def test_a_line_per_request(tmp_path: Path) -> None:
    with FakeServer(lambda r: [plain("500 X", "no")] if r.number == 1 else HEALTHY) as server:
        result = load(server, tmp_path, "--requests", 3, "--per-request")
    lines = [line for line in result.out.splitlines() if line.startswith("    #")]
    assert len(lines) == 3 and "http 500: no" in lines[1].replace("'", "")
    assert all("latency" in lines[n] and "tokens     3" in lines[n] for n in (0, 2))
    assert "latency mean" in result.out and "aggregate" in result.out


def closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("json_lines", [[], ["--json"]])
def test_a_closed_stdout_does_not_stop_the_measurement(json_lines: list[str], tmp_path: Path) -> None:
    """As in `load_test.py ... | head -0`."""
    writing = closed_pipe()
    with FakeServer(HEALTHY) as server:
        args = arguments(tmp_path, server.base_url, "--concurrency", "1,2", "--requests", 5, *json_lines)
        with Running(tmp_path, args, stdout=writing) as running:
            os.close(writing)
            result = running.finish()
    assert [record["completed"] for record in result.levels] == [5, 5]
    assert result.code == 0
    assert "Traceback" not in result.err and "BrokenPipe" not in result.err


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_into_a_closed_pipe_is_quiet(option: str, tmp_path: Path) -> None:
    writing = closed_pipe()
    with Running(tmp_path, [option], stdout=writing) as running:
        os.close(writing)
        result = running.finish()
    assert result.err == "" and result.code in (0, 1)


def test_a_closed_stderr_and_stdout(tmp_path: Path) -> None:
    """As in `load_test.py ... >&- 2>&-`: the streams are not there at all."""
    with FakeServer(HEALTHY) as server:
        argv = arguments(tmp_path, server.base_url)
        script = 'exec "$0" "$@" >&- 2>&-'
        done = subprocess.run(["sh", "-c", script, sys.executable, str(ROOT / "load_test.py"), *argv], timeout=60)
    assert done.returncode == 0 and len(read_records(tmp_path / "book.md")) == 1


def test_a_terminal_that_knows_only_ascii_loses_no_line(tmp_path: Path) -> None:
    with FakeServer([plain("500 X", "geht nicht: ü \U0001f600")]) as server:
        args = arguments(tmp_path, server.base_url, "--label", "größe", "--model", "m-你")
        with Running(tmp_path, args, env={"PYTHONIOENCODING": "ascii"}) as running:
            result = running.finish()
    assert result.code == 1
    assert result.out.startswith("label gr") and "model m-" in result.out and "first error: http 500" in result.out
    assert result.levels[0]["label"] == "größe" and "ü" in result.levels[0]["first_error"]


# ---------------------------------------------------------------- --probe


def probe_server(stream: bytes, props: bytes = plain("404 X", ""), models: bytes = plain("404 X", "")) -> FakeServer:
    def answer(request: Request) -> list[Step]:
        if request.is_chat:
            return [stream]
        return [props if request.path.endswith("/props") else models]

    return FakeServer(answer)


def test_probe_shows_what_came(tmp_path: Path) -> None:
    body = delta("Hello ", reasoning="hm") + delta("\x1b[31mworld", finish="stop", model="m") + usage(5, 2) + DONE
    stream = CHUNKED + chunk(body.replace(b'{"choices"', b'{"model":"real-name","choices"')) + LAST_CHUNK
    props = json_answer({"total_slots": 4, "default_generation_settings": {"n_ctx": 2048}})
    with probe_server(stream, props) as server:
        result = load(server, tmp_path, "--probe")
    assert result.code == 0 and result.err == ""
    for said in ("Hello", "world", '"completion_tokens": 2', "stop", "real-name", "2048", "hm"):
        assert said in result.out, said
    assert "\x1b" not in result.out
    assert len(server.chats) == 1 and result.everything == []


def test_probe_reads_the_context_of_a_vllm_server(tmp_path: Path) -> None:
    models = json_answer({"data": [{"id": "fake", "max_model_len": 4096}, {"id": "other", "max_model_len": 1}]})
    with probe_server(whole_stream(), models=models) as server:
        result = load(server, tmp_path, "--probe")
    assert result.code == 0 and "4096" in result.out


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        (CHUNKED + chunk(delta("a", finish="stop") + DONE) + LAST_CHUNK, "prompt_tokens"),
        (CHUNKED + chunk(delta("a", finish="stop") + usage(5, 0) + DONE) + LAST_CHUNK, "completion_tokens"),
        (CHUNKED + chunk(delta(finish="stop") + usage(5, 2) + DONE) + LAST_CHUNK, "no_tokens"),
        (plain("404 Not Found", '{"error": "no such model"}'), "no such model"),
        (b"", "truncated"),
    ],
)
@pytest.mark.parametrize(
    "others", [plain("404 X", ""), json_answer([]), json_answer({"data": 5}), b"", b"junk\r\n\r\n"]
)
def test_probe_fails_where_later_levels_would_divide_by_nothing(
    stream: bytes, says: str, others: bytes, tmp_path: Path
) -> None:
    with probe_server(stream, others, others) as server:
        result = load(server, tmp_path, "--probe")
    assert result.code == 1 and says in one_line(result)


def test_probe_writes_nothing_and_needs_no_notebook(tmp_path: Path) -> None:
    with probe_server(whole_stream()) as server:
        result = load(server, tmp_path, "--probe", "--labbook", "/no/such/folder/x.md", "--raw", "/no/such/y")
    assert result.code == 0 and list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- --calibrate


def test_calibrate_measures_the_client_alone_first(tmp_path: Path) -> None:
    with FakeServer(HEALTHY) as server:
        result = load(server, tmp_path, "--calibrate", "--concurrency", "1,2", "--requests", 2, "--max-tokens", 5)
    assert result.code == 0 and len(server.requests) == 4
    for record in result.levels:
        assert record["client"]["floor_us_per_delta"] > 0 and record["client"]["floor_ttft_s"] > 0
    assert result.out.count("null server") == 2
    assert not Path("/proc").exists() or not [
        entry for entry in Path("/proc").glob("[0-9]*/cmdline") if str(os.getpid()).encode() in parent(entry)
    ]


def parent(cmdline: Path) -> bytes:
    """The parent's number of a null server that still runs, or nothing."""
    try:
        if b"--null-server" not in cmdline.read_bytes():
            return b""
        return (cmdline.parent / "stat").read_bytes().rsplit(b")", 1)[1].split()[1]
    except OSError:
        return b""
