#!/usr/bin/env bash
# crosscheck.sh - our figures beside those of vLLM's own client, vllm bench serve, on the same running server.
#
#   bash scripts/crosscheck.sh
#   PAIRS=5 bash scripts/crosscheck.sh
#   bash scripts/crosscheck.sh -- --trust-remote-code
#
# Both send 80 requests of the same prompt length, 20 in flight, 128 tokens out with the end token ignored, greedy.
# One unrecorded run of each warms the server and settles the prompt length: the random prompts are set so that the
# server counts as many tokens for them as for ours. Then PAIRS runs of each, alternately (ours, theirs, theirs,
# ours, ...), and the medians: output tokens/s and median TPOT must agree within LIMIT_PERCENT. Each of their runs
# has a seed of its own, for the same random prompts a second time would come from the prefix cache.
#
# TTFT is printed but not judged: their clock starts before the connection is made and stops at the first chunk
# with a choice in it, ours at the first text after the request was written.
#
# The server of the other terminal must be running. Our rows go to labbook.md under the label vllm-crosscheck;
# their result files stay in the folder crosscheck/. Flags after -- go to vllm bench serve. On track S that client
# runs inside the server's container. Running it again measures again.
#
# From the environment: PORT [8000], PAIRS [3], LIMIT_PERCENT [5], LABBOOK [labbook.md], CTX [4096], MAX_SEQS [20],
# CONTAINER_NAME [vllm-lab], DOCKER [docker], VLLM_VENV, KEEP_GOING=1, PYTHON [python3]; and lab.env in the current
# folder. Exit: 1 when something is not as predicted, 2 for a wrong setting.
set -euo pipefail
here="$(CDPATH=''; f="$0"; while [ -L "$f" ]; do cd -P -- "$(dirname -- "$f")"; f="$(readlink -- "${f##*/}")"; done
  cd -P -- "$(dirname -- "$f")" && pwd)" # also through a symbolic link
# shellcheck source=lib.sh
. "$here/lib.sh"
# shellcheck source=servers.sh
. "$here/servers.sh"
# shellcheck source=steps.sh
. "$here/steps.sh"

launcher_arguments "vllm bench serve's" "$@"
[ "${1:-}" != -- ] || shift

need_python
load_lab_env HOST_DESC VLLM_MODEL VLLM_QUANT
PORT="${PORT:-8000}"
PAIRS="${PAIRS:-3}"
LIMIT_PERCENT="${LIMIT_PERCENT:-5}"
LABBOOK="${LABBOOK:-labbook.md}"
CTX="${CTX:-4096}"
MAX_SEQS="${MAX_SEQS:-20}"
CONTAINER_NAME="${CONTAINER_NAME:-vllm-lab}"
DOCKER="${DOCKER:-docker}"
RESULTS=crosscheck
need_port PORT "$PORT"
need_number PAIRS "$PAIRS"
need_number LIMIT_PERCENT "$LIMIT_PERCENT"
need_number MAX_SEQS "$MAX_SEQS"

if [ -n "${VLLM_IMAGE:-}" ]; then
  need "$DOCKER" "to run vLLM's client inside its container"
  bench=("$DOCKER" exec "$CONTAINER_NAME" vllm bench serve --base-url http://127.0.0.1:8000)
  their_folder=/tmp/crosscheck
else
  vllm="${VLLM_VENV:-$HOME/vllm/.venv}/bin/vllm"
  [ -x "$vllm" ] || vllm="$(command -v vllm)" || die "cannot find vllm, neither in VLLM_VENV nor on PATH"
  bench=("$vllm" bench serve --base-url "http://127.0.0.1:$PORT")
  their_folder="$RESULTS"
fi

scratch_folder
trap clean_up EXIT
mkdir -p "$RESULTS" || die "cannot make the folder '$RESULTS'"

say "crosscheck.sh: our client and vllm bench serve, $PAIRS runs each, on http://127.0.0.1:$PORT/v1"
port_answers 127.0.0.1 "$PORT" ||
  stop_here "nothing answers on port $PORT" "start vLLM in the other terminal and wait until it is ready"

# run_ours NUMBER LABBOOK - one level of ours; its record goes to crosscheck/ours-NUMBER.jsonl too.
run_ours() {
  run_load --base-url "http://127.0.0.1:$PORT/v1" --model local-chat --engine vllm --engine-version "$version" \
    --host-desc "$HOST_DESC" --quant "$VLLM_QUANT" --context-length "$CTX" --server-slots "$MAX_SEQS" \
    --labbook "$2" --label vllm-crosscheck --prompt-set mixed --concurrency 20 --requests 80 --max-tokens 128 \
    --temperature 0 --extra-body '{"ignore_eos": true}'
  check_levels - -
  cp "$SCRATCH/levels.jsonl" "$RESULTS/ours-$1.jsonl"
}

# run_theirs NUMBER INPUT_LEN FLAG... - one run of theirs; its result goes to crosscheck/theirs-NUMBER.json.
run_theirs() {
  local number="$1" length="$2" out="$RESULTS/theirs-$1.json"
  shift 2
  rm -f "$out"
  show_command "${bench[@]}" --random-input-len "$length" --seed "$((7100 + number))" ...
  "${bench[@]}" --backend openai-chat --endpoint /v1/chat/completions --model "$VLLM_MODEL" \
    --served-model-name local-chat --dataset-name random --random-input-len "$length" --random-output-len 128 \
    --ignore-eos --num-prompts 80 --max-concurrency 20 --percentile-metrics ttft,tpot,itl \
    --metric-percentiles 50,90 --goodput ttft:2000 tpot:100 --temperature 0 --seed "$((7100 + number))" \
    --disable-tqdm --save-result --result-dir "$their_folder" --result-filename "theirs-$number.json" "$@" \
    >"$RESULTS/theirs-$number.txt" 2>&1 || {
    tail -n 15 "$RESULTS/theirs-$number.txt" >&2
    die "vllm bench serve failed: its last lines are above, all of them in $RESULTS/theirs-$number.txt" 1
  }
  if [ "$their_folder" != "$RESULTS" ]; then
    "$DOCKER" cp "$CONTAINER_NAME:$their_folder/theirs-$number.json" "$out" >/dev/null ||
      die "cannot copy the result out of the container '$CONTAINER_NAME'" 1
  fi
  [ -s "$out" ] || die "vllm bench serve left no result in '$out'" 1
}

# prompt_tokens ours|theirs FILE - mean prompt tokens of one run, as the server counted them.
prompt_tokens() {
  "$PYTHON" -c 'import json, sys
with open(sys.argv[2], encoding="utf-8") as text:
    run = json.loads(text.readline() if sys.argv[1] == "ours" else text.read())
print(run["prompt_tokens_mean"] if sys.argv[1] == "ours" else run["total_input_tokens"] / run["completed"])' "$1" "$2"
}

version="$(vllm_version "$PORT")"

step "one run of each to warm the server and to settle the prompt length (not counted)"
run_ours 0 "$SCRATCH/warm-up.md"
ours="$(prompt_tokens ours "$RESULTS/ours-0.jsonl")"
length="$(awk -v mean="$ours" 'BEGIN { printf "%d", mean + 0.5 }')"
run_theirs 0 "$length" "$@"
theirs="$(prompt_tokens theirs "$RESULTS/theirs-0.json")"
# The chat template adds tokens to their random text as it does to ours, so their prompts come out longer.
corrected="$(awk -v n="$length" -v ours="$ours" -v theirs="$theirs" \
  'BEGIN { n = int(n + ours - theirs + 0.5); if (n < 1) n = 1; printf "%d", n }')"
say "  our mean prompt: $ours tokens; theirs at --random-input-len $length: $theirs; so --random-input-len $corrected"

number=1
while [ "$number" -le "$PAIRS" ]; do
  step "pair $number of $PAIRS"
  if [ $((number % 2)) -eq 1 ]; then
    run_ours "$number" "$LABBOOK"
    run_theirs "$number" "$corrected" "$@"
  else
    run_theirs "$number" "$corrected" "$@"
    run_ours "$number" "$LABBOOK"
  fi
  number=$((number + 1))
done

step "medians of $PAIRS runs each"
verdict=0
"$PYTHON" - "$RESULTS" "$PAIRS" "$LIMIT_PERCENT" <<'PYTHON' || verdict=$?
import json, statistics, sys
from pathlib import Path

folder, pairs, limit = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
ours, theirs = [], []
for number in range(1, pairs + 1):
    record = json.loads((folder / ("ours-%d.jsonl" % number)).read_text("utf-8").splitlines()[0])
    result = json.loads((folder / ("theirs-%d.json" % number)).read_text("utf-8"))
    if result["completed"] != 80 or result.get("failed"):
        sys.exit("run %d of vllm bench serve: %s of 80 requests completed" % (number, result["completed"]))
    ours.append((record["output_tokens_per_s"], 1000 * record["tpot_s"]["p50"], 1000 * record["ttft_s"]["p50"],
                 record["prompt_tokens_mean"], record["output_tokens"] / record["completed"]))
    theirs.append((result["output_throughput"], result["median_tpot_ms"], result["median_ttft_ms"],
                   result["total_input_tokens"] / 80, result["total_output_tokens"] / 80))
names = ("output tok/s", "TPOT p50 ms", "TTFT p50 ms", "prompt tokens", "output tokens")
judged = ("output tok/s", "TPOT p50 ms")
wide = False
print("%-14s %12s %12s %8s   runs: ours | theirs" % ("", "ours", "vllm bench", "diff %"))
for index, name in enumerate(names):
    a, b = [run[index] for run in ours], [run[index] for run in theirs]
    mine, other = statistics.median(a), statistics.median(b)
    difference = 100 * (mine / other - 1)
    wide = wide or (name in judged and abs(difference) > limit)
    print("%-14s %12.2f %12.2f %+8.2f   %s | %s" % (name, mine, other, difference, " ".join("%.2f" % x for x in a),
                                                  " ".join("%.2f" % x for x in b)))
    if name.endswith("tokens") and abs(difference) > 5:
        print("  note: the two sides differ in %s, so the rows above are not of the same load" % name)
print("limit: %g %% on %s" % (limit, " and ".join(judged)))
sys.exit(3 if wide else 0)
PYTHON
case "$verdict" in
0) say "agreed: within $LIMIT_PERCENT % on both" ;;
3)
  stop_here "the two clients differ by more than $LIMIT_PERCENT %" \
    "runs that differ among themselves point at something else running, or heat: stop it and repeat, with PAIRS=5; on a CPU five per cent is usual"
  ;;
*) exit 1 ;;
esac
