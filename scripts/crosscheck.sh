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
# ours, ...), compared as two labels of one notebook: output tokens/s and median TPOT must agree within LIMIT_PERCENT.
# Each of their runs has a seed of its own, for the same random prompts again would come from the prefix cache.
#
# TTFT is printed but not judged: their clock starts before the connection is made and stops at the first chunk
# with a choice in it, ours at the first text after the request was written.
#
# The server of the other terminal must be running. Our rows go to labbook.md under the label vllm-crosscheck;
# all result files stay in the folder crosscheck/. Flags after -- go to vllm bench serve. On track S that client
# runs inside the server's container. Running it again measures again.
#
# From the environment: PORT [8000], PAIRS [3], LIMIT_PERCENT [5], LABBOOK [labbook.md], CTX [4096], MAX_SEQS [20],
# CONTAINER_NAME [vllm-lab], DOCKER [docker], VLLM_VENV, KEEP_GOING=1, PYTHON [python3]; and lab.env in the current
# folder. Exit: 1 when something is not as predicted, 2 for a wrong setting, 130 after Ctrl-C.
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

begin_step
repeat_with ${1:+-- "$@"}
mkdir -p "$RESULTS" || die "cannot make the folder '$RESULTS'"

# ------------------------------------------------------------------------------------------------------------
# One run of each client
# ------------------------------------------------------------------------------------------------------------

# run_ours NUMBER - one level of ours into LABBOOK; crosscheck/ours-NUMBER.json has it as their client would write it.
run_ours() {
  run_load vllm-crosscheck --base-url "http://127.0.0.1:$PORT/v1" --model local-chat --engine vllm \
    --engine-version "$version" --host-desc "$HOST_DESC" --quant "$VLLM_QUANT" --context-length "$CTX" \
    --server-slots "$MAX_SEQS" --prompt-set mixed --concurrency 20 --requests 80 --max-tokens 128 \
    --temperature 0 --extra-body '{"ignore_eos": true}'
  program summarise_load.py --labbook "$LABBOOK" --label vllm-crosscheck --json |
    program scripts/vllm_bench.py export --level 20 >"$RESULTS/ours-$1.json" ||
    die "our run could not be written as a result of vllm bench serve: the line above says why" 1
}

# run_theirs NUMBER INPUT_LEN FLAG... - one run of theirs; its result goes to crosscheck/theirs-NUMBER.json.
run_theirs() {
  local number="$1" length="$2" out="$RESULTS/theirs-$1.json"
  shift 2
  rm -f "$out"
  show_command "${bench[@]}" --random-input-len "$length" --seed "$((7100 + number))" ...
  attended "${bench[@]}" --backend openai-chat --endpoint /v1/chat/completions --model "$VLLM_MODEL" \
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
  [ "$(json_value completed <"$out")" = 80 ] ||
    die "run $number of vllm bench serve completed $(json_value completed <"$out") of 80 requests: see $RESULTS/theirs-$number.txt" 1
}

# mean_prompt FILE - prompt tokens of a request, as the server counted them.
mean_prompt() {
  awk -v all="$(json_value total_input_tokens <"$1")" -v n="$(json_value completed <"$1")" 'BEGIN { printf "%.1f", all / n }'
}

say "crosscheck.sh: our client and vllm bench serve, $PAIRS runs each, on http://127.0.0.1:$PORT/v1"
need_server "$PORT" "$(vllm_launcher)"
version="$(server_says "$PORT" /version version)"
[ -n "$version" ] || stop_here "what answers on port $PORT is not vLLM" "it has no /version: stop it, and start $(vllm_launcher), or set PORT"

# ------------------------------------------------------------------------------------------------------------
# The same load, alternately
# ------------------------------------------------------------------------------------------------------------

step "one run of each to warm the server and to settle the prompt length (not counted)"
notebook="$LABBOOK"
LABBOOK="$SCRATCH/warm-up.md"
run_ours 0
LABBOOK="$notebook"
ours="$(mean_prompt "$RESULTS/ours-0.json")"
run_theirs 0 "${ours%.*}" "$@"
theirs="$(mean_prompt "$RESULTS/theirs-0.json")"
# The chat template adds tokens to their random text as it does to ours, so their prompts come out longer.
length="$(awk -v n="${ours%.*}" -v ours="$ours" -v theirs="$theirs" 'BEGIN { n = int(n + ours - theirs + 0.5); print(n < 1 ? 1 : n) }')"
say "  our mean prompt: $ours tokens; theirs at --random-input-len ${ours%.*}: $theirs; so --random-input-len $length"

our_files=()
their_files=()
number=1
while [ "$number" -le "$PAIRS" ]; do
  step "pair $number of $PAIRS"
  if [ $((number % 2)) -eq 1 ]; then
    run_ours "$number"
    run_theirs "$number" "$length" "$@"
  else
    run_theirs "$number" "$length" "$@"
    run_ours "$number"
  fi
  our_files=(${our_files[@]+"${our_files[@]}"} "$RESULTS/ours-$number.json")
  their_files=(${their_files[@]+"${their_files[@]}"} "$RESULTS/theirs-$number.json")
  number=$((number + 1))
done

# ------------------------------------------------------------------------------------------------------------
# Both as notebook lines, each side's runs as repeats of one level
# ------------------------------------------------------------------------------------------------------------

step "$PAIRS runs of each, side by side"
both="$RESULTS/both.jsonl"
rm -f "$both"
LABBOOK="$both"
unreadable="the results could not be read as notebook lines: the line above says why"
program scripts/vllm_bench.py import ${our_files[@]+"${our_files[@]}"} --label ours --labbook "$both" || die "$unreadable" 1
program scripts/vllm_bench.py import ${their_files[@]+"${their_files[@]}"} --label vllm-bench --labbook "$both" || die "$unreadable" 1
run_summary --compare ours vllm-bench
program summarise_load.py --labbook "$both" --compare ours vllm-bench --json >"$SCRATCH/both.json"

# agree NAME OURS THEIRS - within LIMIT_PERCENT?
agree() {
  say "  $1: ours $2, theirs $3, $(awk -v a="$2" -v b="$3" 'BEGIN { printf "%+.2f %%", 100 * (a / b - 1) }')"
  awk -v a="$2" -v b="$3" -v limit="$LIMIT_PERCENT" 'BEGIN { d = 100 * (a / b - 1); exit (d > limit || d < -limit) }' ||
    stop_here "the two clients differ by more than $LIMIT_PERCENT % in $1" \
      "runs that differ among themselves point at something else running, or heat: stop it and repeat, with PAIRS=5; on a CPU five per cent is usual"
}
step "within $LIMIT_PERCENT %?"
agree "output tok/s" "$(json_value a.levels.0.output_tokens_per_s <"$SCRATCH/both.json")" "$(json_value b.levels.0.output_tokens_per_s <"$SCRATCH/both.json")"
agree "median TPOT" "$(json_value a.levels.0.tpot_s.p50 <"$SCRATCH/both.json")" "$(json_value b.levels.0.tpot_s.p50 <"$SCRATCH/both.json")"
say "agreed: within $LIMIT_PERCENT % on both"
say "write down: both differences, and the TTFT of each side with the two definitions"
