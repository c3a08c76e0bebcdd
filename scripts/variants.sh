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
# Another cache than predicted, or a FAIL of summarise_load.py --check, stops it, says what to do and how to repeat
# that variant alone. What a change did to the speed is printed beside what was to be expected; a surprise there is
# a result to write down, so it stops nothing.
# Running it again measures again; the newest run of each label counts.
#
# From the environment: PORT [8080], LABBOOK [labbook.md], CTX [4096], LLAMA_QUANT [what the GGUF file says],
# CPU_EXPECTED=1 (llama-server is meant to run on the CPU), KEEP_GOING=1 (go on after what was not as predicted),
# PYTHON [python3], and what serve-llama-parallel.sh reads.
# Exit: 1 when something is not as predicted, 2 for a wrong setting, 130 after Ctrl-C.
set -euo pipefail
here="$(CDPATH=''; f="$0"; while [ -L "$f" ]; do cd -P -- "$(dirname -- "$f")"; f="$(readlink -- "${f##*/}")"; done
  cd -P -- "$(dirname -- "$f")" && pwd)" # also through a symbolic link
# shellcheck source=lib.sh
. "$here/lib.sh"
# shellcheck source=servers.sh
. "$here/servers.sh"
# shellcheck source=steps.sh
. "$here/steps.sh"

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

begin_step

# run_variant LABEL SLOTS CTX TYPE QUANT EXPECTED FLAG... - predict, start, measure, compare.
run_variant() {
  local label="$1" slots="$2" ctx="$3" type="$4" quant="$5" expected="$6" log="./$1.log"
  shift 6
  repeat_with "${label#llama-}" ${1:+-- "$@"}
  step "$label: $slots slots of $ctx tokens, cache $type"
  say "predicted:"
  program serving_arithmetic.py --gguf "$GGUF" --slots "$slots" --ctx "$ctx" --kv-type "$type" | sed '/^Bandwidth/,$d' ||
    stop_here "the cache could not be predicted" "GGUF in lab.env must be the model file"
  say "starting llama-server (log: $log)"
  MODEL="$GGUF" SLOTS="$slots" CTX_PER_SLOT="$ctx" CACHE_TYPE="$type" LOGFILE="$log" \
    PIDFILE="./$label.pid" start_server "$PORT" "$log" serve-llama-parallel.sh
  check_log llama "$log" "$slots" "$ctx" "$type"
  run_load "$label" --base-url "http://127.0.0.1:$PORT/v1" --model local-chat --engine llama.cpp \
    --engine-version "$LLAMA_VERSION" --host-desc "$HOST_DESC" ${quant:+--quant "$quant"} --context-length "$ctx" \
    --server-slots "$slots" --prompt-set mixed --concurrency 20 --requests 80 --max-tokens 128 --sample 0.5 \
    --wait-ready "${READY_SECONDS:-600}" "$@"
  stop_server
  rm -f "./$label.pid"
  run_summary --compare llama-baseline "$label"
  say "expected: $expected"
  say "measured: most requests deferred together $(peak_deferred "$label"), expected $((slots < 20 ? 20 - slots : 0)) (20 in flight less the slots)"
  say "write down: predicted and logged pool, tok/s, TTFT p90 and TPOT p50 at c = 20; a surprise is a result"
}

# peak_deferred LABEL - as sampled from the server during its newest run.
peak_deferred() {
  local peak
  peak="$(program summarise_load.py --labbook "$LABBOOK" --label "$1" --json 2>/dev/null | json_value levels.0.server.peak_deferred)" || true
  printf '%s' "${peak:-not sampled}"
}

say "variants.sh:$variants, each beside llama-baseline in $LABBOOK"
# shellcheck disable=SC2086  # names without spaces
repeat_with $variants ${1:+-- "$@"}
has_label llama-baseline ||
  stop_here "there is no llama-baseline in '$LABBOOK'" "measure it first: bash $SCRIPTS_WORD/sweep.sh llama"
refuse_busy_port 127.0.0.1 "$PORT"

for variant in $variants; do
  case "$variant" in
  slots8)
    run_variant llama-slots8 8 "$CTX" "$KV_TYPE" "$QUANT" \
      "TPOT p50 falls (fewer share a step), TTFT p90 climbs (the others wait), the pool shrinks to 8/$SLOTS" "$@"
    ;;
  ctx2048)
    run_variant llama-ctx2048 "$SLOTS" 2048 "$KV_TYPE" "$QUANT" \
      "nearly nothing: the same prompts are read, only the room kept for them halves" "$@"
    ;;
  kv-alt)
    run_variant llama-kv-alt "$SLOTS" "$CTX" "$ALT_KV_TYPE" "${QUANT:+$QUANT, }KV $ALT_KV_TYPE" \
      "the pool about halves; TPOT goes either way (fewer bytes to read, more work to unpack them)" "$@"
    ;;
  esac
done

step "done"
say "next: bash $SCRIPTS_WORD/sweep.sh with the second engine (vllm or mlx)"
