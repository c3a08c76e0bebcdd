#!/usr/bin/env bash
# sweep.sh - measure one engine's curve and its prefix caching, against a server that is already running.
#
#   bash scripts/sweep.sh llama|vllm|mlx [PART...] [-- FLAG...]
#   bash scripts/sweep.sh llama
#   bash scripts/sweep.sh vllm prefix
#   bash scripts/sweep.sh mlx -- --timeout 900
#
# Parts, in this order (all of them, if none is named):
#   baseline  one request by hand, then mixed prompts at 1, 5, 10, 20 in flight, then the curve, recorded
#   prefix    unique prefixes (the control) and a shared prefix at 1 and 10 in flight, then their comparison
# Labels: ENGINE-baseline, ENGINE-prefix-unique, ENGINE-prefix-shared. Records go to labbook.md in the current
# folder, which holds lab.env as well (lab-env.sh writes it). Flags after -- go to load_test.py, after our own.
#
# Before the load: what the server's log says it allocated, against the prediction, where the log lies in this
# folder (llama-server.log, vllm-server.log). After each load: no failures, tokens from usage, in flight close to
# the concurrency, cached shares as a control and a shared prefix must show them. The first thing not as predicted
# stops the sweep and says what to do.
# Running it again measures again; the newest run of each label counts.
#
# From the environment: PORT [llama 8080, vllm 8000, mlx 8081], LABBOOK [labbook.md], CTX [4096],
# LLAMA_QUANT [what the GGUF file says], MLX_QUANT [MLX 4-bit], MAX_SEQS [vllm 20], DECODE_CONCURRENCY [mlx 32],
# KEEP_GOING=1 (go on after what was not as predicted), PYTHON [python3].
# Exit: 1 when something is not as predicted, 2 for a wrong setting.
set -euo pipefail
# shellcheck source=lib.sh
. "$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)/lib.sh"

case "${1:-}" in
-h | --help) usage; exit 0 ;;
'') die "which engine? bash scripts/sweep.sh llama|vllm|mlx" ;;
esac
engine="$1"
shift
parts=""
while [ $# -gt 0 ]; do
  case "$1" in
  baseline | prefix) parts="$parts $1" ;;
  --) shift; break ;;
  *) die "unknown part '$1': baseline or prefix; load_test.py's own flags after --" ;;
  esac
  shift
done
parts="${parts:- baseline prefix} "

need_python
CTX="${CTX:-4096}"
LABBOOK="${LABBOOK:-labbook.md}"
need_number CTX "$CTX"
case "$engine" in
llama)
  load_lab_env HOST_DESC GGUF SLOTS KV_TYPE LLAMA_VERSION
  need_number SLOTS "$SLOTS"
  PORT="${PORT:-8080}"
  model=local-chat
  launcher=serve-llama-parallel.sh
  engine_name=llama.cpp
  version="$LLAMA_VERSION"
  quant="$(gguf_quant "$GGUF")"
  server_slots="$SLOTS"
  prefix_rounds=0
  sample=1
  ;;
vllm)
  load_lab_env HOST_DESC VLLM_MODEL VLLM_QUANT VLLM_KV_DTYPE VLLM_KV_BYTES
  PORT="${PORT:-8000}"
  model=local-chat
  launcher=serve-vllm-native.sh
  [ -z "${VLLM_IMAGE:-}" ] || launcher=serve-vllm-container.sh
  engine_name=vllm
  version="" # asked from the server below
  quant="$VLLM_QUANT"
  server_slots="${MAX_SEQS:-20}"
  prefix_rounds=4
  sample=1
  ;;
mlx)
  load_lab_env HOST_DESC MLX_MODEL
  PORT="${PORT:-8081}"
  [ -d "$MLX_MODEL" ] || die "there is no folder MLX_MODEL '$MLX_MODEL'"
  model="$(CDPATH='' cd -- "$MLX_MODEL" && pwd)" # the server loads what a request names: the absolute path
  launcher=serve-mlx.sh
  engine_name=mlx-lm
  version="$(mlx_version)"
  quant="${MLX_QUANT:-MLX 4-bit}"
  server_slots="${DECODE_CONCURRENCY:-32}"
  prefix_rounds=4
  sample="" # it has nothing to sample
  ;;
*) die "engine must be llama, vllm or mlx, not '$engine'" ;;
esac
need_port PORT "$PORT"

scratch_folder
trap clean_up EXIT

say "sweep.sh, $engine:${parts}"
show "server" "http://127.0.0.1:$PORT/v1, started in the other terminal by $launcher"
show "records" "$LABBOOK"
port_answers 127.0.0.1 "$PORT" ||
  stop_here "nothing answers on port $PORT" "start the server in the other terminal and wait until it is ready: bash $SCRIPTS_WORD/$launcher"
[ -n "$version" ] || version="$(vllm_version "$PORT")"

common=(--base-url "http://127.0.0.1:$PORT/v1" --model "$model" --engine "$engine_name" --engine-version "$version"
  --host-desc "$HOST_DESC" ${quant:+--quant "$quant"} --context-length "$CTX" --server-slots "$server_slots" --labbook "$LABBOOK")
watch=()
[ -z "$sample" ] || watch=(--sample "$sample")

check_server_log "$engine" "$CTX"

case "$parts" in
*" baseline "*)
  step "one request by hand"
  probe_endpoint "$PORT" "$model"

  step "$engine-baseline: mixed prompts at 1, 5, 10 and 20 in flight"
  run_load "${common[@]}" ${watch[@]+"${watch[@]}"} --label "$engine-baseline" --prompt-set mixed \
    --concurrency 1,5,10,20 --requests 40 --min-rounds 4 --max-tokens 128 "$@"
  check_levels - -

  step "the curve, recorded"
  run_summary --labbook "$LABBOOK" --label "$engine-baseline" --record
  ;;
esac

case "$parts" in
*" prefix "*)
  step "$engine-prefix-unique: the control, nothing to reuse"
  run_load "${common[@]}" ${watch[@]+"${watch[@]}"} --label "$engine-prefix-unique" --prompt-set unique-prefix \
    --concurrency 1,10 --requests 40 --min-rounds "$prefix_rounds" --max-tokens 64 "$@"
  check_levels - 10

  step "$engine-prefix-shared: the same length, everything before the question shared"
  run_load "${common[@]}" ${watch[@]+"${watch[@]}"} --label "$engine-prefix-shared" --prompt-set shared-prefix \
    --concurrency 1,10 --requests 40 --min-rounds "$prefix_rounds" --max-tokens 64 --recovery-check "$@"
  check_levels 50 -

  step "what the shared prefix was worth"
  run_summary --labbook "$LABBOOK" --compare "$engine-prefix-unique" "$engine-prefix-shared"
  ;;
esac

step "done"
case "$parts" in
*" prefix "*) ;;
*)
  say "next, with this server still running: bash $SCRIPTS_WORD/sweep.sh $engine prefix"
  exit 0
  ;;
esac
case "$engine" in
llama) say "next: stop this server (Ctrl-C in its terminal), then: bash $SCRIPTS_WORD/variants.sh" ;;
vllm) say "next: bash $SCRIPTS_WORD/crosscheck.sh while it runs; then stop it, and: bash $SCRIPTS_WORD/admission.sh" ;;
mlx) say "next: bash $SCRIPTS_WORD/cleanup.sh" ;;
esac
