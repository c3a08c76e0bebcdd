"""The prediction: the lab's table, the formulas on the command line, and options that are wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import RunProgram
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import serving_arithmetic as sa

DATA = Path(__file__).resolve().parent / "data"
PROGRAM = "serving_arithmetic.py"


def figures(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    """The program's JSON for these options."""
    code = sa.main([*map(str, args), "--json"])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    answer = json.loads(out, parse_constant=refuse)
    assert isinstance(answer, dict)
    return answer


def text(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert sa.main([*map(str, args)]) == 0
    return capsys.readouterr().out


# ------------------------------------------------------------------------------------------------- the lab's table


def test_without_arguments_it_prints_the_labs_table_to_the_byte(run_program: RunProgram) -> None:
    done = run_program(PROGRAM)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (DATA / "arithmetic_expected.txt").read_text(encoding="utf-8")


def test_json_alone_holds_the_figures_of_the_labs_table(capsys: pytest.CaptureFixture[str]) -> None:
    report = figures(capsys)
    assert [(row["kv_type"], row["bytes_per_token"]) for row in report["kv"]] == [
        ("f16", 147_456), ("q8_0", 78_336), ("fp8", 73_728), ("q4_0", 41_472),
    ]  # fmt: skip
    assert report["kv"][0]["pool_bytes"] == 12_079_595_520
    sums = {(row["weights"], row["kv_type"]): f"{row['needed_gib']:.2f}" for row in report["memory"]}
    assert sums["Q4_K_M GGUF", "f16"] == "15.93" and sums["Q4_K_M GGUF", "q8_0"] == "10.65"
    assert sums["AWQ safetensors", "f16"] == "16.93" and sums["AWQ safetensors", "fp8"] == "11.30"
    assert ("AWQ safetensors", "q8_0") not in sums and ("Q4_K_M GGUF", "fp8") not in sums
    spark = {(row["context"], row["batch"]): row for row in report["ceilings"] if row["bandwidth_gb_per_s"] == 273}
    assert round(spark[1500, 20]["aggregate_tokens_per_s"]) == 600
    assert round(spark[100, 1]["per_user_tokens_per_s"], 1) == 58.3


# ------------------------------------------------------------------------------------------- formulas by the options


@pytest.mark.parametrize(
    ("slots", "ctx", "kv_type", "mib"),
    [
        (20, 4096, "f16", 11520), (20, 4096, "q8_0", 6120), (10, 4096, "q8_0", 3060), (8, 4096, "f16", 4608),
        (20, 2048, "f16", 5760), (8, 4096, "q8_0", 2448), (20, 2048, "q8_0", 3060), (20, 4096, "q4_0", 3240),
        (10, 2048, "q8_0", 1530), (10, 4096, "q4_0", 1620), (40, 4096, "f16", 23040),
    ],
)  # fmt: skip
def test_pool_of_each_configuration_of_the_lab(
    capsys: pytest.CaptureFixture[str], slots: int, ctx: int, kv_type: str, mib: int
) -> None:
    (row,) = figures(capsys, "--slots", slots, "--ctx", ctx, "--kv-type", kv_type)["kv"]
    assert row["pool_mib"] == mib and row["allocated_mib"] == mib


@pytest.mark.parametrize(
    ("shape", "kib"),
    [((24, 2, 64), 12), ((28, 8, 128), 112), ((32, 32, 128), 512), ((36, 8, 128), 144)],
    ids=["Qwen2.5-0.5B", "Llama-3.2-3B", "Llama-2-7B", "Qwen3-8B"],
)
def test_cache_per_token_of_known_models(
    capsys: pytest.CaptureFixture[str], shape: tuple[int, int, int], kib: int
) -> None:
    layers, heads, dim = shape
    report = figures(capsys, "--layers", layers, "--kv-heads", heads, "--head-dim", dim, "--kv-type", "f16")
    assert report["kv"][0]["bytes_per_token"] == kib * 1024
    assert report["ceilings"] == [] and report["weights"] == [], "no weights are known, so none are invented"


def test_vllm_blocks_tokens_and_concurrency(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = figures(capsys, "--available-kv", "7.00", "--kv-type", "f16")["vllm"]
    assert (row["blocks"], row["tokens"], f"{row['max_concurrency']:.2f}") == (3185, 50_960, "12.44")
    (row,) = figures(capsys, "--available-kv", "11.25", "--kv-type", "auto")["vllm"]
    assert (row["tokens"], row["max_concurrency"]) == (81_920, 20.0)
    (row,) = figures(capsys, "--available-kv", "5.625", "--kv-type", "fp8_e4m3")["vllm"]
    assert (row["tokens"], row["max_concurrency"]) == (81_920, 20.0)
    (row,) = figures(capsys, "--available-kv", "5.625", "--kv-type", "auto")["vllm"]
    assert (row["tokens"], row["max_concurrency"]) == (40_960, 10.0)
    (row,) = figures(capsys, "--available-kv", "7", "--block-size", 128, "--kv-type", "f16", "--ctx", 1000)["vllm"]
    assert (row["blocks"], row["tokens"], row["max_concurrency"]) == (398, 50_944, 398 / 8)


def test_memory_says_whether_it_fits_by_how_much_and_how_many_slots(capsys: pytest.CaptureFixture[str]) -> None:
    report = figures(capsys, "--memory", 16, "--kv-type", "q8_0,fp8")
    gguf, awq = report["memory"]
    assert gguf["fits"] and gguf["left_bytes"] == 16 * sa.GIB - 5_021_827_072 - 78_336 * 81_920
    assert gguf["most_slots"] == (16 * sa.GIB - 5_021_827_072) // (78_336 * 4096) == 37
    assert awq["fits"] and awq["weights"] == "AWQ safetensors"
    (tight,) = figures(capsys, "--memory", 10, "--kv-type", "q8_0")["memory"]
    assert tight["fits"] is False and tight["left_bytes"] < 0
    assert "does not fit" in text(capsys, "--memory", 10, "--kv-type", "q8_0")


def test_the_shift_between_two_memory_fractions(capsys: pytest.CaptureFixture[str]) -> None:
    """0.10 of 119.70 GiB is 11.97 GiB, in tokens of the cache type."""
    stated = ("--fractions", "0.30,0.40", "--memory", "119.7", "--kv-type", "f16")
    facts = figures(capsys, *stated)["fractions"]
    assert facts["shift_bytes"] == pytest.approx(11.97 * sa.GIB)
    assert facts["shift_tokens"] == {"f16": pytest.approx(11.97 * sa.GIB / 147_456)}
    assert "(0.4 - 0.3) x 119.70 GiB = +11.97 GiB (+87,163 tokens of f16)" in text(capsys, *stated)
    assert figures(capsys, "--fractions", "0.9,0.8", "--memory", 24)["fractions"]["shift_bytes"] < 0


def test_memory_without_weights_decides_only_what_the_pool_decides(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--layers", 36, "--kv-heads", 8, "--head-dim", 128, "--kv-type", "f16")
    (row,) = figures(capsys, *shape, "--memory", 24)["memory"]
    assert row["fits"] is None and row["weights_counted"] is False and row["needed_gib"] == 11.25
    (row,) = figures(capsys, *shape, "--memory", 11)["memory"]
    assert row["fits"] is False


def test_stated_weights_give_the_ceiling(capsys: pytest.CaptureFixture[str]) -> None:
    stated = ("--weights-bytes", 5_021_827_072, "--not-read-bytes", 350_060_544)
    report = figures(capsys, *stated, "--bandwidth", "273,1008", "--kv-type", "f16")
    assert report["weights"][0]["read_per_step_bytes"] == 4_671_766_528
    rows = [row for row in report["ceilings"] if row["context"] == 100 and row["batch"] == 20]
    assert [round(row["aggregate_tokens_per_s"]) for row in rows] == [1099, 4059]
    assert rows[0]["read_per_step_bytes"] == 4_671_766_528 + 20 * 100 * 147_456
    whole = figures(capsys, "--weights-bytes", 5_021_827_072, "--kv-type", "f16")
    assert whole["weights"][0]["read_per_step_bytes"] == 5_021_827_072


def test_text_shows_each_formula_with_its_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    shown = text(capsys, "--slots", 8, "--kv-type", "q8_0", "--available-kv", 7, "--memory", 16)
    for part in (
        "78,336 B/token = 2 x 36 x 8 x 128 x 34/32",
        "cache 2,566,914,048 B = 2.39 GiB = 2448.00 MiB",
        "5,021,827,072 - 350,060,544 (token embedding) = 4,671,766,528 B",
        "blocks = floor(7,516,192,768 B / (16 x 78,336 B)) = 5,996",
        "q8_0 is llama.cpp's cache type",
    ):
        assert part in shown


def test_a_context_that_is_no_multiple_of_256_is_allocated_rounded_up(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = figures(capsys, "--ctx", 1000, "--kv-type", "f16")["kv"]
    assert row["pool_bytes"] == 20 * 1000 * 147_456 and row["allocated_bytes"] == 20 * 1024 * 147_456
    assert "whole 256s" in text(capsys, "--ctx", 1000)


def test_ceilings_of_a_tiny_model_stay_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """A batch of 20 and a seven-digit ceiling once ran into one number."""
    shape = ("--layers", 2, "--kv-heads", 2, "--head-dim", 32, "--weights-bytes", 1_000_000)
    for line in text(capsys, *shape).splitlines():
        if "ctx" in line:
            cells = line.split("B=")[1:]
            assert [cell.split()[0] for cell in cells] == ["1", "5", "10", "20"]


@given(st.integers(1, 200), st.integers(1, 128), st.integers(1, 512), st.sampled_from(sorted(sa.KV_TYPES)))
def test_cache_per_token_is_linear_in_layers_and_never_below_the_exact_size(
    layers: int, heads: int, dim: int, kv_type: str
) -> None:
    block_values, block_bytes = sa.KV_TYPES[kv_type]
    size = sa.bytes_per_token(sa.uniform_model("m", "here", layers, heads, dim), kv_type)
    assert size == layers * sa.bytes_per_token(sa.uniform_model("m", "here", 1, heads, dim), kv_type)
    exact = 2 * layers * heads * dim * block_bytes / block_values
    assert exact <= size <= exact + 2 * layers * block_bytes


@given(st.integers(1, 10**12), st.integers(1, 512), st.integers(1, 10**6), st.integers(1, 200_000))
def test_blocks_fill_the_pool_without_exceeding_it(pool: int, block: int, token: int, context: int) -> None:
    blocks = sa.vllm_blocks(pool, block, token)
    assert blocks * block * token <= pool < (blocks + 1) * block * token
    assert sa.vllm_max_concurrency(blocks, context, block) * context <= blocks * block + 1e-6 * pool


# --------------------------------------------------------------------------------------------------- wrong options


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--kv-type q9_9", "'q9_9' is not a cache type; known: f16,"),
        ("--kv-type f16,", "'' is not a cache type"),
        ("--slots 0", "--slots: '0' is not a whole number from 1 to 1,000,000,000,000,000"),
        ("--slots -4", "'-4'"),
        ("--slots 2.5", "'2.5'"),
        ("--slots 99999999999999999999", "'99999999999999999999' is not a whole number from 1 to"),
        ("--memory 1e16", "--memory: '1e16' is not a number above 0 and up to 1,000,000,000,000,000"),
        ("--weights-bytes 9999999999999999", "is not a whole number from 0 to"),
        ("--ctx 1e3", "'1e3'"),
        ("--ctx 4,096", "'4,096'"),
        ("--bandwidth nan", "--bandwidth: 'nan' is not a number above 0"),
        ("--bandwidth 273,inf", "'inf'"),
        ("--bandwidth 0", "'0'"),
        ("--memory -1", "'-1'"),
        ("--memory 1e999", "'1e999'"),
        ("--available-kv 0", "'0'"),
        ("--available-kv 1_0", "'1_0'"),
        ("--block-size 0 --available-kv 1", "--block-size"),
        ("--block-size 32", "--block-size needs --available-kv or --check-log"),
        ("--layers 3", "--layers needs --kv-heads and --head-dim too"),
        ("--kv-heads 3 --head-dim 1", "needs --layers too"),
        ("--config x --layers 3 --kv-heads 1 --head-dim 1", "--config and --layers contradict each other"),
        ("--config x --gguf y", "--config and --gguf contradict each other"),
        ("--gguf x --weights-bytes 7", "--gguf and --weights-bytes contradict each other"),
        ("--gguf x --safetensors y", "--gguf and --safetensors contradict each other"),
        ("--safetensors x --weights-bytes 7", "contradict each other"),
        ("--not-read-bytes 7", "--not-read-bytes needs --weights-bytes"),
        ("--weights-bytes 7 --not-read-bytes 7", "must be above"),
        ("--weights-bytes 0", "must be above"),
        ("--label x", "--measured NOTEBOOK and --label L need each other"),
        ("--measured x", "--measured NOTEBOOK and --label L need each other"),
        ("--check-log x --measured y --label z", "--check-log and --measured are mutually exclusive"),
        ("--check-log x --bandwidth 3", "--bandwidth cannot be combined with --check-log"),
        ("--check-log x --memory 3", "--memory with --check-log needs two logs"),
        ("--check-log x --fractions 0.3,0.4", "--fractions with --check-log needs two logs"),
        ("--measured x --label y --memory 3", "--memory cannot be combined with --measured"),
        ("--measured x --label y --slots 3", "--slots cannot be combined with --measured"),
        ("--measured x --label y --cpu-expected", "--cpu-expected cannot be combined with --measured"),
        ("--cpu-expected", "--cpu-expected needs --check-log"),
        ("--fractions 0.3,0.4", "--fractions needs --memory GIB"),
        ("--fractions 0.3 --memory 9", "'0.3' is not two fractions of at most 1"),
        ("--fractions 0.3,1.4 --memory 9", "'0.3,1.4' is not two fractions"),
        ("--check-log nowhere.log", "cannot read nowhere.log: No such file"),
        ("--check-log .", "cannot read .: it is a folder, not a file"),
        ("--measured nowhere.md --label x", "nowhere.md"),
        ("--config nowhere.json", "cannot read nowhere.json"),
        ("--gguf nowhere.gguf", "cannot read nowhere.gguf"),
        ("--safetensors nowhere", "cannot read nowhere"),
        ("--bogus", "unrecognized arguments: --bogus"),
        ("--slot 3", "unrecognized arguments"),
        ("word", "unrecognized arguments: word"),
        ("--slots", "expected one argument"),
    ],
)
def test_a_wrong_or_contradictory_option_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sa.main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("serving_arithmetic.py: ") and err.endswith("\n") and err.count("\n") == 1
    assert says in err and "Traceback" not in err


def test_control_characters_in_a_name_do_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert sa.main(["--gguf", str(tmp_path / "a\x1b[31mb\nc.gguf")]) == 2
    err = capsys.readouterr().err
    assert "\x1b" not in err and err.count("\n") == 1


# ------------------------------------------------------------------------------------------------------- as a program


def test_help_version_and_every_option_described(run_program: RunProgram) -> None:
    done = run_program(PROGRAM, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for option in sa.build_parser()._option_string_actions:
        assert option in done.stdout
    assert "python3 serving_arithmetic.py --gguf model.gguf" in done.stdout
    assert run_program(PROGRAM, "--version").stdout == f"serving_arithmetic.py {sa.TOOL_VERSION}\n"


@pytest.mark.parametrize("options", ["", "--help", "--slots 4 --json"])
def test_a_reader_that_goes_away_is_no_error(root: Path, options: str) -> None:
    command = f"'{sys.executable}' '{root / PROGRAM}' {options} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, encoding="utf-8", timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def redirected(root: Path, arguments: str, redirect: str) -> subprocess.CompletedProcess[str]:
    """The program under a shell that redirects its output."""
    if "/dev/full" in redirect and not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    command = f"exec '{sys.executable}' '{root / PROGRAM}' {arguments} {redirect}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, encoding="utf-8", timeout=60)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    return done


@pytest.mark.parametrize("arguments", ["", "--help", "--version", "--json"])
@pytest.mark.parametrize(("redirect", "why"), [(">&-", "standard output is closed"), (">/dev/full", "No space left")])
def test_output_that_cannot_be_written_is_said(root: Path, arguments: str, redirect: str, why: str) -> None:
    done = redirected(root, arguments, redirect)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"{PROGRAM}: cannot write the output: {why}")


@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full", ">&- 2>&-"])
def test_bad_input_ends_with_2_where_nothing_can_be_said(root: Path, redirect: str) -> None:
    done = redirected(root, "--check-log nowhere.log", redirect)
    assert (done.returncode, done.stdout) == (2, "")


def test_an_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for name in ("build_parser", "parse_options", "run", "emit"):
        with monkeypatch.context() as patch:
            patch.setattr(sa, name, interrupt)
            assert sa.main([]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("option", ["--measured", "--check-log", "--config", "--gguf", "--safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "/dev/zero"])
def test_what_is_no_file_is_refused_before_it_is_read(
    run_program: RunProgram, tmp_path: Path, option: str, kind: str
) -> None:
    path = tmp_path / "a thing"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(kind)
    done = run_program(PROGRAM, option, path, *(["--label", "x"] if option == "--measured" else []), timeout=30)
    assert done.returncode == 2 and f"cannot read {path}: it is a " in done.stderr and "not a file" in done.stderr


@pytest.mark.parametrize("heads", [10**400, [10**400]])
def test_a_shape_beyond_every_number_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], heads: Any) -> None:
    config = {"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 32, "num_key_value_heads": heads}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert sa.main(["--config", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_output_survives_an_ascii_terminal(run_program: RunProgram, tmp_path: Path) -> None:
    config = {"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 32, "_name_or_path": "модель"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    done = run_program(PROGRAM, "--config", tmp_path, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.returncode == 0 and "Model: \\u043c" in done.stdout
