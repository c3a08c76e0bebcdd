#!/usr/bin/env bash
# variants.sh - llama-server with one setting changed at a time: fewer slots, half the context, another cache type.
#
#   bash scripts/variants.sh [VARIANT...] [-- FLAG...]
#   bash scripts/variants.sh
#   bash scripts/variants.sh kv-alt
#
# Variants (all of them, if none is named), each against the baseline that sweep.sh llama left:
#   slots8   8 slots instead of lab.env's         label llama-slots8
#   ctx2048  2,048 tokens a slot, not 4,096        label llama-ctx2048
#   kv-alt   lab.env's ALT_KV_TYPE for the cache   label llama-kv-alt
# For each: the predicted cache, a server of its own (started and stopped here, so the port must be free), its log
# against the prediction, mixed prompts at 20 in flight, the comparison with the baseline. Records go to
# labbook.md in the current folder, which holds lab.env as well. Logs stay as VARIANT.log. Flags after -- go to
# load_test.py, after our own.
#
# Another cache than predicted, or a failed request, stops it and says what to do. What a change did to the speed
# is printed beside what was to be expected; a surprise there is a result to write down, so it stops nothing.
# Running it again measures again; the newest run of each label counts.
#
# From the environment: PORT [8080], LABBOOK [labbook.md], CTX [4096], LLAMA_QUANT [what the GGUF file says],
# KEEP_GOING=1 (go on after what was not as predicted), PYTHON [python3], and what serve-llama-parallel.sh reads.
# Exit: 1 when something is not as predicted, 2 for a wrong setting.
set -euo pipefail
# shellcheck source=lib.sh
. "$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)/lib.sh"

variants=""
while [ $# -gt 0 ]; do
  case "$1" in
  -h | --help) usage; exit 0 ;;
  slots8 | ctx2048 | kv-alt) variants="$variants $1" ;;
  --) shift; break ;;
  *) die "unknown variant '$1': slots8, ctx2048 or kv-alt; load_test.py's own flags after --" ;;
  esac
  shift
done
variants="${variants:- slots8 ctx2048 kv-alt}"

need_python
load_lab_env HOST_DESC GGUF LLAMA_BIN LLAMA_VERSION SLOTS KV_TYPE ALT_KV_TYPE
PORT="${PORT:-8080}"
CTX="${CTX:-4096}"
LABBOOK="${LABBOOK:-labbook.md}"
QUANT="$(gguf_quant "$GGUF")"
need_port PORT "$PORT"
need_number CTX "$CTX"
need_number SLOTS "$SLOTS"
export PORT

scratch_folder
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# run_variant LABEL SLOTS CTX TYPE QUANT FLAG...
run_variant() {
  local label="$1" slots="$2" ctx="$3" type="$4" quant="$5" log="./$1.log"
  shift 5
  step "$label: $slots slots of $ctx tokens, cache $type"
  say "predicted:"
  program serving_arithmetic.py --gguf "$GGUF" --slots "$slots" --ctx "$ctx" --kv-type "$type" | sed '/^Bandwidth/,$d' ||
    stop_here "the cache could not be predicted" "GGUF in lab.env must be the model file"
  say "starting llama-server (log: $log)"
  MODEL="$GGUF" SLOTS="$slots" CTX_PER_SLOT="$ctx" CACHE_TYPE="$type" LOGFILE="$log" \
    PIDFILE="./$label.pid" start_server "$PORT" "$log" serve-llama-parallel.sh
  check_log llama "$log" "$slots" "$ctx" "$type"
  run_load --base-url "http://127.0.0.1:$PORT/v1" --model local-chat --engine llama.cpp \
    --engine-version "$LLAMA_VERSION" --host-desc "$HOST_DESC" ${quant:+--quant "$quant"} --context-length "$ctx" \
    --server-slots "$slots" --labbook "$LABBOOK" --label "$label" --prompt-set mixed --concurrency 20 \
    --requests 80 --max-tokens 128 --sample 0.5 --wait-ready "${READY_SECONDS:-600}" "$@"
  check_levels - -
  stop_server
  rm -f "./$label.pid"
  run_summary --labbook "$LABBOOK" --compare llama-baseline "$label"
}

# expected TEXT - what the change was to do, beside what the last load shows of the server.
expected() {
  say "expected: $1"
  "$PYTHON" - "$SCRATCH/levels.jsonl" <<'PYTHON'
import json, sys

with open(sys.argv[1], encoding="utf-8") as lines:
    for record in map(json.loads, lines):
        if "concurrency" in record:
            server = record.get("server") or {}
            waiting = max(record["concurrency"] - (record.get("server_slots") or record["concurrency"]), 0)
            print("measured: most requests deferred together %s, expected %d (that is %d in flight less the slots)"
                  % (server.get("peak_deferred"), waiting, record["concurrency"]))
PYTHON
  say "If it did something else, that is the variant that surprised: write it down."
}

say "variants.sh:$variants, each beside llama-baseline in $LABBOOK"
in_notebook llama-baseline ||
  stop_here "there is no llama-baseline in '$LABBOOK'" "measure it first: bash $SCRIPTS_WORD/sweep.sh llama"
refuse_busy_port 127.0.0.1 "$PORT"

for variant in $variants; do
  case "$variant" in
  slots8)
    run_variant llama-slots8 8 "$CTX" "$KV_TYPE" "$QUANT" "$@"
    expected "TPOT p50 falls (fewer share a step), TTFT p90 climbs (the others wait), the pool shrinks to 8/$SLOTS"
    ;;
  ctx2048)
    run_variant llama-ctx2048 "$SLOTS" 2048 "$KV_TYPE" "$QUANT" "$@"
    expected "nearly nothing: the same prompts are read, only the room kept for them halves"
    ;;
  kv-alt)
    run_variant llama-kv-alt "$SLOTS" "$CTX" "$ALT_KV_TYPE" "${QUANT:+$QUANT, }KV $ALT_KV_TYPE" "$@"
    expected "the pool about halves; TPOT goes either way (fewer bytes to read, more work to unpack them)"
    ;;
  esac
done

step "done"
say "next: bash $SCRIPTS_WORD/sweep.sh with the second engine (vllm or mlx)"
