#!/usr/bin/env bash
# admission.sh - vLLM's two limits: how many sequences it admits, and how much memory its cache gets.
#
#   bash scripts/admission.sh [PART...] [-- FLAG...]
#   bash scripts/admission.sh
#   bash scripts/admission.sh fractions -- --enforce-eager
#
# Parts (all of them, if none is named), each with a server started and stopped here, so the port must be free:
#   seqs8      at most 8 sequences at once and 20 requests in flight, the queue sampled: 8 running, 12 waiting,
#              almost all of the pool idle. Label vllm-seqs8, compared with vllm-baseline where that is recorded
#   fractions  lab.env's MEM_FRACTION_A, then B: the pool predicted from the memory that the log says is available
#              for the cache, against the tokens that the log prints
# Records go to labbook.md in the current folder, which holds lab.env as well. Logs stay as vllm-seqs8.log,
# vllm-fraction-a.log and vllm-fraction-b.log. Flags after -- go to vLLM. On track S the container is started,
# elsewhere the vLLM of VLLM_VENV.
#
# The first thing not as predicted stops it and says what to do. Running it again measures again.
#
# From the environment: PORT [8000], LABBOOK [labbook.md], CTX [4096], KEEP_GOING=1 (go on after what was not as
# predicted), PYTHON [python3], and what the launcher reads.
# Exit: 1 when something is not as predicted, 2 for a wrong setting.
set -euo pipefail
# shellcheck source=lib.sh
. "$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)/lib.sh"

parts=""
while [ $# -gt 0 ]; do
  case "$1" in
  -h | --help) usage; exit 0 ;;
  seqs8 | fractions) parts="$parts $1" ;;
  --) shift; break ;;
  *) die "unknown part '$1': seqs8 or fractions; vLLM's own flags after --" ;;
  esac
  shift
done
parts="${parts:- seqs8 fractions} "

need_python
load_lab_env HOST_DESC VLLM_MODEL VLLM_QUANT VLLM_KV_DTYPE VLLM_KV_BYTES MEM_FRACTION_A MEM_FRACTION_B
PORT="${PORT:-8000}"
CTX="${CTX:-4096}"
LABBOOK="${LABBOOK:-labbook.md}"
need_port PORT "$PORT"
need_number CTX "$CTX"
need_fraction MEM_FRACTION_A "$MEM_FRACTION_A"
need_fraction MEM_FRACTION_B "$MEM_FRACTION_B"

launcher=serve-vllm-native.sh
if [ -n "${VLLM_IMAGE:-}" ]; then
  launcher=serve-vllm-container.sh
  export IMAGE="$VLLM_IMAGE"
fi
export MODEL="$VLLM_MODEL" KV_DTYPE="$VLLM_KV_DTYPE" PORT CTX

scratch_folder
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

run_seqs8() {
  local log=./vllm-seqs8.log
  step "vllm-seqs8: at most 8 sequences at once, 20 requests in flight"
  say "predicted: 8 running, 12 waiting, almost all of the pool idle; a longer TTFT, a shorter TPOT than the baseline's"
  MAX_SEQS=8 KV_BYTES="$VLLM_KV_BYTES" LOGFILE="$log" PIDFILE=./vllm-seqs8.pid start_server "$PORT" "$log" "$launcher" \
    -- "$@"
  check_log vllm "$log" 8 "$CTX" "$KV_DTYPE" "$VLLM_KV_BYTES"
  run_load --base-url "http://127.0.0.1:$PORT/v1" --model local-chat --engine vllm \
    --engine-version "$(vllm_version "$PORT")" --host-desc "$HOST_DESC" --quant "$VLLM_QUANT" --context-length "$CTX" \
    --server-slots 8 --labbook "$LABBOOK" --label vllm-seqs8 --prompt-set mixed --concurrency 20 --requests 80 \
    --max-tokens 128 --sample 0.5 --wait-ready "${READY_SECONDS:-600}"
  check_levels - -
  check_queue
  stop_server
  rm -f ./vllm-seqs8.pid
  if in_notebook vllm-baseline; then
    run_summary --labbook "$LABBOOK" --compare vllm-baseline vllm-seqs8
  fi
}

# check_queue - 8 running, 12 waiting, the pool nearly idle, as sampled from the server.
check_queue() {
  local findings="$SCRATCH/queue.txt" what advice
  "$PYTHON" - "$SCRATCH/levels.jsonl" >"$findings" <<'PYTHON'
import json, sys

with open(sys.argv[1], encoding="utf-8") as lines:
    levels = [record for record in map(json.loads, lines) if "concurrency" in record]
for level in levels:
    server = level.get("server") or {}
    running, waiting, usage = (server.get(key) for key in ("peak_running", "peak_waiting", "peak_cache_usage"))
    print("  sampled: running %s, waiting %s, cache usage %s" % (running, waiting, usage), file=sys.stderr)
    if running is None or waiting is None:
        print("the server's metrics could not be sampled\tlook at http://127.0.0.1:PORT/metrics by hand")
    else:
        if running != 8:
            print("at most %d sequences were seen running, predicted 8\tcompare --max-num-seqs in the log with 8" % running)
        if waiting != level["concurrency"] - 8:
            print("at most %d requests were seen waiting, predicted %d\tsample more often, or send more requests" %
                  (waiting, level["concurrency"] - 8))
PYTHON
  while IFS="$(printf '\t')" read -r what advice; do
    stop_here "$what" "$advice"
  done <"$findings"
}

# run_fraction LETTER FRACTION FLAG...
run_fraction() {
  local letter="$1" fraction="$2" log="./vllm-fraction-$1.log"
  shift 2
  step "memory fraction $fraction: the pool is what is left after weights and buffers"
  say "predicted: floor(available bytes / (block x bytes per token)) blocks; the log gives the available memory"
  MAX_SEQS=20 KV_BYTES="" MEM_FRACTION="$fraction" LOGFILE="$log" PIDFILE="./vllm-fraction-$letter.pid" \
    start_server "$PORT" "$log" "$launcher" -- "$@"
  check_log vllm "$log" 20 "$CTX" "$KV_DTYPE"
  stop_server
  rm -f "./vllm-fraction-$letter.pid"
  printf '%s\t%s\n' "$fraction" "$(grep -oE 'GPU KV cache size: [0-9,]+ tokens' "$log" | tail -n 1)" >>"$SCRATCH/fractions.txt"
}

say "admission.sh:${parts}with $launcher on port $PORT, records in $LABBOOK"
refuse_busy_port 127.0.0.1 "$PORT"

case "$parts" in
*" seqs8 "*) run_seqs8 "$@" ;;
esac
case "$parts" in
*" fractions "*)
  run_fraction a "$MEM_FRACTION_A" "$@"
  run_fraction b "$MEM_FRACTION_B" "$@"
  step "the two fractions"
  cat "$SCRATCH/fractions.txt"
  ;;
esac

step "done"
say "next: bash $SCRIPTS_WORD/cleanup.sh"
