#!/usr/bin/env bash
# sweep.sh - measure one engine's curve and its prefix caching, against a server that is already running, and
# compare the second engine with llama.cpp.
#
#   bash scripts/sweep.sh llama|vllm|mlx [PART...] [--find-operating-point] [-- FLAG...]
#   bash scripts/sweep.sh llama
#   bash scripts/sweep.sh vllm prefix
#   bash scripts/sweep.sh mlx -- --timeout 900
#
# Parts, in this order (all of them, if none is named; for llama without the last):
#   baseline  one request by hand, then mixed prompts at 1, 5, 10, 20 in flight, then the curve, recorded
#   prefix    unique prefixes (the control) and a shared prefix at 1 and 10 in flight, then their comparison
#   compare   this engine's baseline beside llama-baseline, and what is equal on both sides; needs no server
#   --find-operating-point   after the baseline's levels, go on to the highest that still meets the objective
# Labels: ENGINE-baseline, ENGINE-prefix-unique, ENGINE-prefix-shared. Records go to labbook.md in the current
# folder, which holds lab.env as well (lab-env.sh writes it). Flags after -- go to load_test.py, after our own.
#
# Before the load: is it this engine that answers, and does its log (llama-server.log, vllm-server.log in this
# folder) agree with the prediction? A CPU build of llama-server stops it, too. After each load summarise_load.py
# --check judges the label. The first FAIL stops the sweep and says what to do, and how to repeat that part alone.
# Running it again measures again; the newest run of each label counts.
#
# From the environment: PORT [llama 8080, vllm 8000, mlx 8081], LABBOOK [labbook.md], CTX [4096],
# LLAMA_QUANT [what the GGUF file says], MLX_QUANT [MLX 4-bit], MAX_SEQS [vllm 20], DECODE_CONCURRENCY [mlx 32],
# CPU_EXPECTED=1 (llama-server is meant to run on the CPU), KEEP_GOING=1 (go on after what was not as predicted),
# PYTHON [python3].
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

case "${1:-}" in
-h | --help) usage; exit 0 ;;
'') die "which engine? bash scripts/sweep.sh llama|vllm|mlx" ;;
esac
engine="$1"
shift
parts=""
search=()
while [ $# -gt 0 ]; do
  case "$1" in
  baseline | prefix | compare) parts="$parts $1" ;;
  --find-operating-point) search=(--find-operating-point) ;;
  --) shift; break ;;
  *) die "unknown part '$1': baseline, prefix or compare; load_test.py's own flags after --" ;;
  esac
  shift
done

# ------------------------------------------------------------------------------------------------------------
# Settings
# ------------------------------------------------------------------------------------------------------------

need_python
CTX="${CTX:-4096}"
LABBOOK="${LABBOOK:-labbook.md}"
need_number CTX "$CTX"
watch=(--sample 1)
prefix_rounds=4
all_parts="baseline prefix compare"
case "$engine" in
llama)
  load_lab_env HOST_DESC GGUF SLOTS KV_TYPE LLAMA_VERSION
  need_number SLOTS "$SLOTS"
  PORT="${PORT:-8080}"
  model=local-chat
  launcher=serve-llama-parallel.sh
  named=(--engine llama.cpp --engine-version "$LLAMA_VERSION" --server-slots "$SLOTS")
  quant="$(gguf_quant "$GGUF")"
  prefix_rounds=0
  all_parts="baseline prefix"
  ;;
vllm)
  load_lab_env HOST_DESC VLLM_MODEL VLLM_QUANT VLLM_KV_DTYPE VLLM_KV_BYTES
  PORT="${PORT:-8000}"
  model=local-chat
  launcher="$(vllm_launcher)"
  named=(--engine vllm --server-slots "${MAX_SEQS:-20}") # its version is asked from the server
  quant="$VLLM_QUANT"
  ;;
mlx)
  load_lab_env HOST_DESC MLX_MODEL
  PORT="${PORT:-8081}"
  [ -d "$MLX_MODEL" ] || die "there is no folder MLX_MODEL '$MLX_MODEL': bash $SCRIPTS_WORD/fetch-models.sh"
  model="$(CDPATH='' cd -- "$MLX_MODEL" && pwd)" # the server loads what a request names: the absolute path
  launcher=serve-mlx.sh
  named=(--engine mlx-lm --engine-version "$(mlx_version)" --server-slots "${DECODE_CONCURRENCY:-32}")
  quant="${MLX_QUANT:-MLX 4-bit}"
  watch=() # it has nothing to sample
  ;;
*) die "engine must be llama, vllm or mlx, not '$engine'" ;;
esac
need_port PORT "$PORT"
parts=" ${parts:-$all_parts} "
wanted() { case "$parts" in *" $1 "*) return 0 ;; *) return 1 ;; esac; }

begin_step
say "sweep.sh, $engine:${parts}"
show "server" "http://127.0.0.1:$PORT/v1, started in the other terminal by $launcher"
show "records" "$LABBOOK"

# measure LABEL PROMPT_SET LEVELS ROUNDS MAX_TOKENS FLAG... - one load with this engine's settings.
measure() {
  local label="$1" prompt_set="$2" levels="$3" rounds="$4" max_tokens="$5"
  shift 5
  run_load "$label" --base-url "http://127.0.0.1:$PORT/v1" --model "$model" "${named[@]}" --host-desc "$HOST_DESC" \
    ${quant:+--quant "$quant"} --context-length "$CTX" --prompt-set "$prompt_set" --concurrency "$levels" \
    --requests 40 --min-rounds "$rounds" --max-tokens "$max_tokens" ${watch[@]+"${watch[@]}"} "$@"
}

# ------------------------------------------------------------------------------------------------------------
# The server: is it there, is it the right one, did it allocate what was predicted?
# ------------------------------------------------------------------------------------------------------------

if wanted baseline || wanted prefix; then
  # shellcheck disable=SC2086  # names without spaces
  repeat_with "$engine" $parts ${search[@]+"${search[@]}"} ${1:+-- "$@"}
  need_server "$PORT" "$launcher"
  log="$engine-server.log"
  case "$engine" in
  llama)
    [ -n "$(server_says "$PORT" /props build_info)" ] || stop_here "what answers on port $PORT is not llama-server" \
      "it has no /props: stop it, and start $launcher, or set PORT"
    ;;
  vllm)
    version="$(server_says "$PORT" /version version)"
    [ -n "$version" ] || stop_here "what answers on port $PORT is not vLLM" \
      "it has no /version: stop it, and start $launcher, or set PORT"
    named=("${named[@]}" --engine-version "${version:-unknown}")
    ;;
  esac
  step "what the server allocated"
  if [ "$engine" = mlx ]; then
    say "  mlx_lm.server sets no pool aside: its caches grow with the prompts"
  elif [ ! -f "$log" ]; then
    say "  not checked: there is no $log in this folder"
  elif [ "$engine" = llama ]; then
    check_log llama "$log" "$SLOTS" "$CTX" "$KV_TYPE"
  else
    check_log vllm "$log" "${MAX_SEQS:-20}" "$CTX" "$VLLM_KV_DTYPE" "$VLLM_KV_BYTES"
  fi
fi

# ------------------------------------------------------------------------------------------------------------
# baseline: the curve
# ------------------------------------------------------------------------------------------------------------

if wanted baseline; then
  repeat_with "$engine" baseline ${search[@]+"${search[@]}"} ${1:+-- "$@"}
  step "one request by hand"
  probe_endpoint "$PORT" "$model"
  step "$engine-baseline: mixed prompts at 1, 5, 10 and 20 in flight"
  measure "$engine-baseline" mixed 1,5,10,20 4 128 ${search[@]+"${search[@]}"} "$@"
  step "the curve, recorded"
  run_summary --label "$engine-baseline" --record
  say "write down: the recording sheet of this engine, its knee and operating point, and what was odd"
fi

# ------------------------------------------------------------------------------------------------------------
# prefix: what a shared prefix is worth, the control first
# ------------------------------------------------------------------------------------------------------------

if wanted prefix; then
  repeat_with "$engine" prefix ${1:+-- "$@"}
  step "$engine-prefix-unique: the control, nothing to reuse"
  measure "$engine-prefix-unique" unique-prefix 1,10 "$prefix_rounds" 64 "$@"
  step "$engine-prefix-shared: the same length, everything before the question shared"
  measure "$engine-prefix-shared" shared-prefix 1,10 "$prefix_rounds" 64 --recovery-check "$@"
  step "what the shared prefix was worth"
  run_summary --compare "$engine-prefix-unique" "$engine-prefix-shared"
  say "write down: how TTFT changed at c = 1 and c = 10, and the cached tokens behind each change"
fi

# ------------------------------------------------------------------------------------------------------------
# compare: this engine beside llama.cpp
# ------------------------------------------------------------------------------------------------------------

# shape OPTION PATH - layers, KV heads and head dimension of a model, for "the same family and size".
shape() {
  program serving_arithmetic.py "$1" "$2" --json 2>/dev/null >"$SCRATCH/shape.json" || return 0
  printf '%s layers, %s KV heads of %s' "$(json_value model.layers <"$SCRATCH/shape.json")" \
    "$(json_value model.kv_heads <"$SCRATCH/shape.json")" "$(json_value model.head_dim <"$SCRATCH/shape.json")"
}

# pool_tokens - of this engine's cache: what vLLM's log says, else what its bytes hold.
pool_tokens() {
  local folder
  [ "$engine" = vllm ] || return 0
  folder="$(vllm_folder)"
  program serving_arithmetic.py --config "$folder/config.json" --block-size "${VLLM_BLOCK_SIZE:-16}" --kv-type "$VLLM_KV_DTYPE" \
    --available-kv "$(gib "$VLLM_KV_BYTES")" --json 2>/dev/null |
    json_value vllm.0.tokens || true
}

unequal=""
# equal NAME A B - one of the five things, both sides.
equal() {
  local word=equal
  if [ -z "$2" ] || [ -z "$3" ]; then
    word="not known"
  elif [ "$2" != "$3" ]; then
    word=DIFFERS
  fi
  [ "$word" = equal ] || unequal="$unequal${unequal:+, }$1"
  printf '  %-22s %-32s %-32s %s\n' "$1" "${2:--}" "${3:--}" "$word"
}

compare_engines() {
  local label side settings=() book="$SCRATCH/compare.json"
  for label in llama-baseline "$engine-baseline"; do
    if ! has_label "$label"; then
      say "  not compared: there is no $label in '$LABBOOK'; measure it first: bash $SCRIPTS_WORD/sweep.sh ${label%-baseline} baseline"
      return
    fi
  done
  run_summary --compare llama-baseline "$engine-baseline"
  program summarise_load.py --labbook "$LABBOOK" --compare llama-baseline "$engine-baseline" --json >"$book" 2>/dev/null || true
  for side in a b; do
    settings=(${settings[@]+"${settings[@]}"} "$(json_value "$side.settings.context_length" <"$book")"
      "$(json_value "$side.settings.server_slots" <"$book")" "$(json_value "$side.settings.quant" <"$book")"
      "$(json_value "$side.settings.prompt_set" <"$book"), $(json_value "$side.settings.max_tokens" <"$book") tokens")
  done
  step "equal on both sides?"
  if [ "$engine" = vllm ]; then
    equal "model family and size" "$(shape --gguf "${GGUF:-}")" "$(shape --config "$(vllm_folder)/config.json")"
  else
    equal "model family and size" "$(shape --gguf "${GGUF:-}")" "$(shape --config "$MLX_MODEL/config.json")"
  fi
  equal "context per sequence" "${settings[0]}" "${settings[4]}"
  equal "cap on sequences" "${settings[1]}" "${settings[5]}"
  equal "tokens in the pool" "${settings[0]:+$((settings[0] * settings[1]))}" "$(pool_tokens)"
  equal "client and load" "${settings[3]}" "${settings[7]}"
  [ -z "$unequal" ] || say "  not equal, or not known: $unequal. Say so beside the comparison; it explains a part of B/A"
  say "  weights: ${settings[2]:-unknown} and ${settings[6]:-unknown}, as each engine has them: fewer bytes are read faster"
  say "write down: B/A down the levels (above 1: $engine is ahead), where it turns, and which of the five explains it"
}

if wanted compare; then
  repeat_with "$engine" compare
  step "$engine-baseline beside llama-baseline"
  if [ "$engine" = llama ]; then
    say "  not compared: this is llama-baseline; name the other engine: bash $SCRIPTS_WORD/sweep.sh vllm compare, or mlx"
  else
    compare_engines
  fi
fi

step "done"
if ! wanted prefix && wanted baseline; then
  say "next, with this server still running: bash $SCRIPTS_WORD/sweep.sh $engine prefix"
  exit 0
fi
case "$engine" in
llama) say "next: stop this server (Ctrl-C in its terminal), then: bash $SCRIPTS_WORD/variants.sh" ;;
vllm) say "next: bash $SCRIPTS_WORD/crosscheck.sh while it runs; then stop it, and: bash $SCRIPTS_WORD/admission.sh" ;;
mlx) say "next: bash $SCRIPTS_WORD/cleanup.sh" ;;
esac
